"""Where a server listens and what it serves: bound sockets, the API key, and the variables of
Vertex AI's custom containers (AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_STORAGE_URI).
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from ingot.base.environment import secret
from ingot.base.errors import Failed, IngotError, WrongInput
from ingot.base.listing import find_files
from ingot.base.storage import CHUNK_BYTES, atomic_file, is_remote, open_read, stays_inside
from ingot.config.sections.deployment import Serve


@contextlib.contextmanager
def bound_socket(
    host: str, port: int, host_knob: str = "serve.host", port_knob: str = "serve.port"
) -> Iterator[socket.socket]:
    """A socket that is bound to the address but does not listen yet, so that nobody connects before
    the model is loaded. Errors name the two knobs.

    Raises:
        WrongInput: an address that is not this machine's, or a port this user may not bind.
        Failed: the port is taken.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise WrongInput(
            f"{host_knob} {host} is no address ({error.strerror}); set it to 127.0.0.1, or 0.0.0.0"
            " for all networks"
        ) from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            raise bind_error(error, host, port, host_knob, port_knob) from None
        yield listener


def bind_error(
    error: OSError,
    host: str,
    port: int,
    host_knob: str = "serve.host",
    port_knob: str = "serve.port",
) -> Failed | WrongInput:
    """The error for an address that could not be bound."""
    if error.errno == errno.EADDRINUSE:
        return Failed(
            f"port {port} on {host} is taken; stop what listens there, or set {port_knob} (0 takes"
            " a free one)"
        )
    if error.errno == errno.EACCES:
        return WrongInput(
            f"port {port} needs rights that this user has not; set {port_knob} to one above 1023"
        )
    return WrongInput(
        f"{host}:{port} cannot be listened on ({error.strerror}); set {host_knob} to an address of"
        " this machine"
    )


def free_port(host: str, port: int) -> int:
    """`port` if it is free, or for 0 a free one. It is released again for another process to bind.
    Raises as `bound_socket` does.
    """
    with bound_socket(host, port) as listener:
        return int(listener.getsockname()[1])


def kept_port(host: str) -> int:
    """A free port that the system gives to nobody who asks for any one, for about a minute: a
    connection to it has just ended. Only a server that asks for it by number, with SO_REUSEADDR as
    vLLM does, can have it meanwhile.
    """
    with bound_socket(host, 0) as listener:
        listener.listen(1)
        with socket.create_connection(listener.getsockname()[:2]):
            # The side that ends first is the one that waits (TIME_WAIT), and ours has the port.
            listener.accept()[0].close()
            return int(listener.getsockname()[1])


def url_host(host: str) -> str:
    """A host as written in a URL."""
    return f"[{host}]" if ":" in host else host


def read_api_key(reference: str | None) -> str | None:
    """The API key that `serve.api_key` refers to, None where no key is required. An empty key would
    let everybody in, so it is refused.
    """
    if reference is None:
        return None
    key = secret(reference, "serve.api_key").strip()
    if not key:
        raise WrongInput(
            f"serve.api_key refers to {reference}, which is empty; set it to the key, or remove"
            " serve.api_key"
        )
    return key


LOOPBACK, ALL_INTERFACES = "127.0.0.1", "0.0.0.0"


def listen_address(settings: Serve, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and port to listen on. Where Vertex AI sets the port, its proxy connects from outside,
    so loopback becomes all interfaces.

    Raises:
        WrongInput: AIP_HTTP_PORT is not a port.
    """
    text = environ.get("AIP_HTTP_PORT")
    if not text:
        return settings.host, settings.port
    if not text.isdecimal() or int(text) > 65535:
        raise WrongInput(
            f"$AIP_HTTP_PORT is {text!r}, not a port; set it to a number from 0 to 65535 or"
            " unset it"
        )
    return (ALL_INTERFACES if settings.host == LOOPBACK else settings.host), int(text)


def health_routes(environ: Mapping[str, str]) -> list[str]:
    """Routes of the health check: our own and Vertex AI's."""
    return list(dict.fromkeys(["/health", environ.get("AIP_HEALTH_ROUTE") or "/health"]))


@contextlib.contextmanager
def fetched_model_folder(target: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder to serve: that of AIP_STORAGE_URI, downloaded for the length of the block, else
    `target`.

    Raises:
        WrongInput: there is no file at AIP_STORAGE_URI, or one that lies outside of it.
        Failed: the storage cannot be read.
    """
    uri = environ.get("AIP_STORAGE_URI", "")
    if not uri:
        yield target
    elif not is_remote(uri):
        yield Path(uri.removeprefix("file://"))
    else:
        with tempfile.TemporaryDirectory(prefix="ingot-model-") as folder:
            _download(uri, Path(folder))
            yield Path(folder)


def _download(uri: str, folder: Path) -> None:
    root = PurePosixPath(uri)
    try:
        files = {file: PurePosixPath(file).relative_to(root) for file in find_files(uri)}
        if outside := next((file for file, path in files.items() if not stays_inside(path)), None):
            raise WrongInput(
                f"$AIP_STORAGE_URI {uri} holds {outside}, which would lie outside of the model's"
                " folder; remove it there"
            )
        for file, path in files.items():
            with open_read(file) as source, atomic_file(folder / path) as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
    except IngotError:
        raise
    except Exception as error:  # each storage client has exceptions of its own
        raise Failed(
            f"$AIP_STORAGE_URI {uri} cannot be read ({type(error).__name__}: {error}); check the"
            " bucket and the service account"
        ) from error
    if not files:
        raise WrongInput(
            f"$AIP_STORAGE_URI {uri} holds no file; give the folder that the model was uploaded to"
        )
