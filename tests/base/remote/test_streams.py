"""Remote files through fsspec, by its real client, from a web server that keeps to little."""

from __future__ import annotations

import io
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.streams import WholeFile, version_of
from ingot.base.remote.web import web_client
from ingot.base.storage import open_read, stamp
from tests.lazy import lazy, require
from tests.loopback import Loopback

require("aiohttp", reason="aiohttp is not installed")
fsspec = lazy("fsspec")

DATA = bytes(range(256)) * 40
BLOCK = 1000


class Web(Loopback):
    """Serves DATA. `whims` tells of each request for content what goes wrong with it."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.headers: dict[str, str] = {"ETag": '"one"'}
        self.whims: list[str] = []
        self.ranges = self.tells_size = True
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        self._answer(200, DATA)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        whim = self.server.whims.pop(0) if self.server.whims else ""
        first, _, last = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
        if whim == "busy":
            self._answer(503, b"busy")
        elif whim == "page":
            self._answer(200, b"<html>log in</html>")
        elif whim == "gone":
            self._answer(416, b"")
        elif first and self.server.ranges:
            self._answer(206, DATA[int(first) : int(last) + 1])
        else:
            self._answer(200, DATA, cut=whim == "cut")

    def _answer(self, code: int, data: bytes, *, cut: bool = False) -> None:
        self.send_response(code)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if self.server.tells_size and not cut:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr("ingot.base.remote.web.PAUSES_S", (0.0, 0.0))
    server = Web()
    yield server
    server.server_close()


def opened(web: Web, **options: Any) -> io.BufferedReader:
    filesystem = fsspec.filesystem("http", block_size=BLOCK, get_client=web_client, **options)
    return io.BufferedReader(WholeFile(filesystem, f"{web.address}/a"), BLOCK)


def test_a_file_is_read_in_ranges_from_anywhere(web: Web) -> None:
    with opened(web) as stream:
        assert stream.read() == DATA
        assert stream.seek(5000) == 5000
        assert stream.read(10) == DATA[5000:5010]
        assert stream.seek(-3, io.SEEK_END) == len(DATA) - 3
        assert stream.read() == DATA[-3:]


@pytest.mark.parametrize("whim", ["gone", "page"])
def test_what_ends_early_is_no_end(web: Web, whim: str) -> None:
    web.whims = ["", whim]
    with (
        opened(web) as stream,
        pytest.raises(Failed, match=r"/a broke off \(it ended after .* of 10,240 bytes"),
    ):
        stream.read()


def test_what_comes_in_one_answer_may_end_early_too(web: Web) -> None:
    web.headers["Accept-Ranges"], web.whims = "none", ["cut"]
    with opened(web) as stream, pytest.raises(Failed, match="after 5,120 of 10,240 bytes"):
        stream.read()


def test_a_server_without_ranges_is_read_in_one_answer(web: Web) -> None:
    web.ranges = False
    with opened(web) as stream:
        assert stream.read() == DATA
        with pytest.raises(WrongInput, match="its server sends it only as a whole; download it"):
            stream.seek(0)


def test_a_file_whose_size_nobody_tells(web: Web) -> None:
    web.tells_size = False
    assert stamp(f"{web.address}/a")["bytes"] == 0
    with open_read(f"{web.address}/a") as stream:
        assert stream.read() == DATA


def test_a_busy_server_is_asked_again(web: Web) -> None:
    web.whims = ["", "busy", "", "busy", "busy"]
    with opened(web) as stream:
        assert stream.read() == DATA
    web.whims = ["busy"] * 3
    with opened(web) as stream, pytest.raises(Failed, match="503"):
        stream.read()


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("ETag", '"one"', '"two"'),
        ("Last-Modified", "Fri, 27 Nov 2026 10:00:00 GMT", "Sat, 28 Nov 2026 10:00:00 GMT"),
    ],
)
def test_a_file_written_again_at_the_same_size_has_another_stamp(
    web: Web, name: str, before: str, after: str
) -> None:
    url, web.headers = f"{web.address}/a", {name: before}
    first = stamp(url)
    assert first == stamp(url) == {"path": url, "bytes": len(DATA), "tag": before}
    web.headers = {name: after}
    assert stamp(url) != first


def test_an_object_of_a_bucket_keeps_the_stamp_that_it_had() -> None:
    class Bucket:
        protocol = "gs"

        def info(self, _: str) -> dict[str, Any]:
            return {"size": 3, "etag": "v1", "generation": "7", "mtime": "today"}

    assert version_of(Bucket(), "a") == {"bytes": 3, "tag": "v1"}
