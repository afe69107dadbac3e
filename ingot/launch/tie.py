"""What ties a node to a launcher that reaches it over a connection: its standard input. Its first
line holds secrets, then come signs of life.

A connection that is closed, or that says nothing for a while, is a launcher that is gone: nobody
would ever end what it started.
"""

from __future__ import annotations

import json
import os
import select
import time

from ingot.base.errors import Failed

SIGN_S, SILENT_S = 5.0, 45.0
"""Seconds between two signs of the launcher, and after which silence means that it is gone or
cannot reach us.
"""


class Tie:
    """Standard input, read without ever being waited for, but for the first line."""

    def __init__(self, descriptor: int = 0, *, silent_s: float = SILENT_S) -> None:
        self._descriptor, self._silent_s = descriptor, silent_s
        self._heard = time.monotonic()

    def environment(self) -> dict[str, str]:
        """The first line: variables as a JSON object. Raises Failed when it does not come."""
        line = b""
        while not line.endswith(b"\n"):
            if not self._ready(self._silent_s) or not (byte := self._read(1)):
                raise Failed(
                    "the launcher was gone before it had said what it wanted; start the job again"
                )
            line += byte
        return {str(name): str(value) for name, value in json.loads(line).items()}

    def broken(self) -> str | None:
        """Why nobody is there any more, or None."""
        now = time.monotonic()
        while self._ready(0.0):
            if not self._read(4096):
                return "the connection to the launcher was closed"
            self._heard = now
        return (
            f"the launcher gave no sign of life for {self._silent_s:g} s"
            if now - self._heard > self._silent_s
            else None
        )

    def _read(self, most: int) -> bytes:
        try:
            return os.read(self._descriptor, most)
        except ConnectionError:  # reset: as good as closed
            return b""

    def _ready(self, seconds: float) -> bool:
        # The descriptor is left blocking: standard output may be the same socket.
        # And it is polled: `select` takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
