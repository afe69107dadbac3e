"""A server in this process, for proofs that ask one often: the same application behind the same
address, without the seconds that a process takes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from ingot.base.errors import Failed, WrongInput
from ingot.config.sections.deployment import Serve
from ingot.models.device import Compute
from ingot.serve.http.middleware import ServerMetrics
from ingot.serve.http.service import Service
from ingot.serve.native.engine import ServingEngine
from ingot.serve.native.model import load
from ingot.serve.server import create_app


@contextlib.contextmanager
def served_here(folder: Path, compute: Compute) -> Iterator[str]:
    """In place of `ingot.verify.export.server.server`; what a process would say before it ends is raised
    as that does.
    """
    settings = Serve(port=0)
    try:
        loaded = load(folder, compute=compute)
    except WrongInput as error:
        raise Failed(f"the server ended before it listened (exit 2): error: {error}") from None
    metrics = ServerMetrics()
    engine = ServingEngine(
        loaded.worker(settings.max_batch),
        metrics,
        max_batch=settings.max_batch,
        max_queue=settings.max_queue,
    )
    app = create_app(Service("here", loaded, engine, settings), metrics, key=None, environ={})
    web = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
        thread.start()
        engine.start()
        try:
            while not web.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            web.should_exit = True
            thread.join()
            engine.stop()
