"""How the HTTP server handles slow senders, slow readers and requests in a thousand pieces, so that
none of them delays other connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for a request's head, and for a reader to take more of an answer that waits for it, before
# the connection is closed. Between requests a connection is kept for KEEP_ALIVE_S.
HEAD_S, READER_S, KEEP_ALIVE_S = 60.0, 60.0, 75
MAX_HEAD_BYTES = 16 << 10
# Bytes parsed before other connections get their turn. A chunk may be a single byte, and each
# chunk, like each header line, costs as much as a large one.
SLICE, SLICE_IN_CHUNKS = 1 << 16, 512


def http_config(app: Any, stop_s: int) -> uvicorn.Config:
    """uvicorn's settings for `app`; running requests get `stop_s` when the server stops."""
    return uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=stop_s,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


class GracefulServer(uvicorn.Server):
    """A server that ends well when it is stopped by a signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, except that the signal is not raised again afterwards."""
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, with limits of time and of what is parsed at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self._parsing: asyncio.Handle | None = None
        self._head: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Whatever waits for the reader is timed. A transport that is closed first sends what it
        # holds, be it little, and without a limit of time to a client that reads nothing.
        transport.set_write_buffer_limits(high=0)
        self._head = self.loop.call_later(HEAD_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        for timer in (self._parsing, self._head, self._reader):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._parsing is None:
            self._parse()

    def _parse(self) -> None:
        """Parse a slice, and the next one when others had their turn."""
        self._parsing = None
        size = SLICE if self._in_body() and not self._in_chunks() else SLICE_IN_CHUNKS
        piece = bytes(self._unparsed[:size])
        del self._unparsed[:size]
        super().data_received(piece)
        self._time_head()
        if self.transport.is_closing():
            self._unparsed.clear()
        elif self._unparsed:
            self.transport.pause_reading()
            self._parsing = self.loop.call_soon(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _in_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _in_chunks(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _time_head(self) -> None:
        """The time limit runs from the first byte of a head to its last; further bytes do not
        extend it.
        """
        waiting = self.cycle is None or self.cycle.response_complete
        if waiting and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._end)
        elif not waiting and self._head is not None:
            self._head.cancel()
            self._head = None

    def _end(self) -> None:
        """Close the connection, after an error response if there is half a request to answer."""
        if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(math.inf)

    def _watch_reader(self, held: float) -> None:
        """Go on while the reader takes something, be it slow. Until all is taken nothing is added
        to what is held: whoever writes waits.
        """
        left = self.transport.get_write_buffer_size()
        if left >= held:
            self.transport.abort()
        else:
            self._reader = self.loop.call_later(READER_S, self._watch_reader, left)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader:
            self._reader.cancel()
            self._reader = None
