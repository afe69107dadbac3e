"""The address that a server listens on: taken before a model is loaded, and refused in words."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from ingot.base.environment import secret
from ingot.base.errors import Failed, WrongInput


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that owns the address but does not listen yet: nobody connects before the model is
    there.

    Raises:
        WrongInput: an address that is not this machine's, or a port that this user may not take.
        Failed: the port is taken.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise WrongInput(
            f"serve.host {host} is no address ({error.strerror}); set it to 127.0.0.1, or 0.0.0.0"
            " for all networks"
        ) from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError as error:
            raise refusal(error, host, port) from None
        yield listener


def refusal(error: OSError, host: str, port: int) -> Failed | WrongInput:
    """Why an address could not be taken."""
    if error.errno == errno.EADDRINUSE:
        return Failed(
            f"port {port} on {host} is taken; stop what listens there, or set serve.port (0 takes a"
            " free one)"
        )
    if error.errno == errno.EACCES:
        return WrongInput(
            f"port {port} needs rights that this user has not; set serve.port to one above 1023"
        )
    return WrongInput(
        f"{host}:{port} cannot be listened on ({error.strerror}); set serve.host to an address of"
        " this machine"
    )


def free_port(host: str, port: int) -> int:
    """`port`, once it is known to be free; for 0 one that is. Another process is to take it, so it
    is let go again. Raises as `bound` does.
    """
    with bound(host, port) as listener:
        return int(listener.getsockname()[1])


def shown(host: str) -> str:
    """A host as it stands in an address."""
    return f"[{host}]" if ":" in host else host


def key_of(reference: str | None) -> str | None:
    """The API key behind `serve.api_key`, None where nobody is asked. An empty one would let
    everybody in, and so is refused.
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
