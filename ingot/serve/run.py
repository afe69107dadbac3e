"""`ingot serve`: open the model, listen, answer until SIGTERM or Ctrl-C, finish what runs, leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from ingot.base.environment import secret
from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.config.place import Serve
from ingot.serve.app import create_app
from ingot.serve.engine import Engine
from ingot.serve.loaded import load
from ingot.serve.metrics import Metrics
from ingot.serve.service import Service
from ingot.serve.vertex import address, model_folder

# Seconds that running requests get to finish in once the server is asked to stop.
GRACE_S = 10.0


def serve(target_folder: Path, settings: Serve, name: str) -> None:
    """Serve the model in `target_folder` under `name`; blocks until SIGTERM or SIGINT, then returns.

    Raises:
        WrongInput: no model or no tokenizer there, an address that is not this machine's, a key that is not set.
        Failed: the port is taken.
    """
    key = _key(settings.api_key) if settings.api_key else None
    host, port = address(settings, os.environ)
    # The port comes first: a model that takes minutes to load should not find it taken then.
    with _bound(host, port) as listener, model_folder(target_folder, os.environ) as folder:
        loaded = load(folder, any_template=settings.any_template)
        metrics = Metrics()
        engine = Engine(loaded.worker(settings.max_batch), metrics, max_batch=settings.max_batch, max_queue=settings.max_queue)
        app = create_app(Service(name, loaded, engine, settings), metrics, key=key, environ=os.environ)
        shown = f"[{host}]" if ":" in host else host
        Server(app, engine, f"serving {name} at http://{shown}:{listener.getsockname()[1]}").run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn with our end: running requests get GRACE_S, what is left then is answered with 503, and the exit is clean."""

    def __init__(self, app: FastAPI, engine: Engine, greeting: str) -> None:
        super().__init__(uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=int(GRACE_S) + 2
        ))
        self._engine, self._greeting = engine, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # another server that was loading, too, listened first
            raise _refusal(error, *(sockets or [])[0].getsockname()[:2]) from None
        self._engine.start()
        say(self._greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.get_running_loop().call_later(GRACE_S, self._engine.abort)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()
            await asyncio.to_thread(self._engine.stop)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, but the signal is not raised again afterwards: to be stopped is how a server ends well."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _key(reference: str) -> str:
    """The API key. An empty one would let everybody in, and so is refused."""
    key = secret(reference, "serve.api_key").strip()
    if not key:
        raise WrongInput(f"serve.api_key refers to {reference}, which is empty; set it to the key, or remove serve.api_key")
    return key


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that owns the address but does not listen yet: nobody connects before the model is there."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise WrongInput(f"serve.host {host} is no address ({error.strerror}); set it to 127.0.0.1, or 0.0.0.0 for all networks") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            raise _refusal(error, host, port) from None
        yield listener


def _refusal(error: OSError, host: str, port: int) -> Failed | WrongInput:
    if error.errno == errno.EADDRINUSE:
        return Failed(f"port {port} on {host} is taken; stop what listens there, or set serve.port (0 takes a free one)")
    if error.errno == errno.EACCES:
        return WrongInput(f"port {port} needs rights that this user has not; set serve.port to one above 1023")
    return WrongInput(f"{host}:{port} cannot be listened on ({error.strerror}); set serve.host to an address of this machine")
