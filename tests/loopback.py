"""HTTP servers on the loopback, for clients that are the real ones."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Loopback(ThreadingHTTPServer):
    """Answers from when it is made until `server_close`, which hangs up on all clients: whoever
    keeps a connection open would keep a thread of ours.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """A client that was killed has hung up: no news. Anything else is a fault of the test."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*_)

    def server_close(self) -> None:
        self.shutdown()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # its own thread was faster
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()
