"""Connections: heads that never end, readers that do not read, requests in a thousand pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from ingot.serve.http import connection
from ingot.serve.http.connection import BoundedConnection, http_config

HALF = b"POST / HTTP/1.1\r\nHost: here\r\nX-Half: "
WHOLE = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER_S = 300.0
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body; to a GET, with more than any buffer holds."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    large = scope["method"] == "GET"
    for _ in range(50 if large else 0):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b"%d" % size, "more_body": False})


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[int, ServerState]]:
    loop, state, config = asyncio.get_running_loop(), ServerState(), http_config(app, 1)
    server = await loop.create_server(
        lambda: BoundedConnection(config, state, {}, loop), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1], state
    finally:
        server.close()


def talk(what: Talk) -> None:
    async def run() -> None:
        async with served() as (port, state):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(ANSWER_S):
                await what(reader, writer)
                while state.connections:  # the server has let go of it, too
                    await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(run())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(connection, "READER_S", 0.2)


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Transport]:
    """Those of the connections, in the server, as they are made."""
    seen, made = list[asyncio.Transport](), BoundedConnection.connection_made

    def connection_made(self: BoundedConnection, transport: asyncio.Transport) -> None:
        seen.append(transport)
        made(self, transport)

    monkeypatch.setattr(BoundedConnection, "connection_made", connection_made)
    return seen


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("first", [b"", HALF, WHOLE + HALF])
def test_a_head_that_never_ends_ends_its_connection(first: bytes) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        said = await reader.read()
        assert said.endswith(b"\r\n2\r\n0\r\n\r\n") or b" 408 " in said or not first, said

    if first.startswith(WHOLE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "KEEP_ALIVE_S", 1)
            talk(half)
    else:
        talk(half)


@pytest.mark.usefixtures("soon")
def test_a_byte_more_does_not_buy_more_time() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        await reader.readuntil(b"\r\n2\r\n0\r\n\r\n")
        writer.write(HALF)
        said = asyncio.ensure_future(reader.read())
        with contextlib.suppress(ConnectionError):
            while not said.done():
                writer.write(b"a")
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            assert b" 408 " in await said

    talk(drip)


@pytest.mark.usefixtures("soon")
def test_an_answer_that_nobody_reads_ends_its_connection() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")

    talk(deaf)


def test_a_reader_that_is_slow_and_steady_gets_the_whole_answer(
    transports: list[asyncio.Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single large answer takes it many times the limit; the clock goes on as the reader does."""
    whole = 1 << 25

    async def one_piece(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(whole), "more_body": False})

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        clock, ahead, got, held = loop.time, 0.0, 0, whole
        monkeypatch.setattr(loop, "time", lambda: clock() + ahead)
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        while piece := await reader.read(1 << 20):
            got += len(piece)
            left = transports[0].get_write_buffer_size()
            if 0 < left < held - (1 << 21):
                held, ahead = left, ahead + connection.READER_S / 2
        assert got > whole
        assert ahead >= 2 * connection.READER_S

    monkeypatch.setattr(connection, "READER_S", 20.0)
    monkeypatch.setattr(f"{__name__}.app", one_piece)
    talk(slow)


@pytest.mark.usefixtures("soon")
def test_a_connection_that_is_closed_does_not_wait_for_its_reader(
    transports: list[asyncio.Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has taken most of the answer, and what is left is less than a transport minds."""

    async def just_too_much(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not transports[0].is_closing() and not transports[0].get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(1 << 15), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        while not transports:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(f"{__name__}.app", just_too_much)
    talk(deaf)


def test_others_get_their_turn_while_a_body_in_many_chunks_is_parsed() -> None:
    chunks, turns = b"1\r\na\r\n" * 20_000, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beside = asyncio.ensure_future(other())
        writer.write(CHUNKED + chunks + b"0\r\n\r\n")
        said = await reader.readuntil(b"0\r\n\r\n")
        assert b"20000" in said
        beside.cancel()
        writer.write(b"no HTTP\r\n\r\n")

    talk(send)
    assert turns > len(chunks) // 3000
