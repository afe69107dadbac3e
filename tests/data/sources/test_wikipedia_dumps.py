"""The download of a dump: resumed where it was broken off, never mixed with another version, told
in words.
"""

from __future__ import annotations

import bz2
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources import wikipedia as dumps
from ingot.data.sources.find import source_stamps
from ingot.data.sources.wikipedia import fetch_dump, find_dump
from tests.data.small import recipe
from tests.data.sources.test_wikipedia import SMALL
from tests.data.test_ingest import documents
from tests.loopback import Loopback

PAGE = b"<html>log in</html>"
NAME = "dewiki-20260101-pages-articles-multistream.xml.bz2"


class Server(Loopback):
    """Serves one file by HTTP ranges; `breaks` says after how many bytes each of the next answers
    ends.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.data, self.tag = bz2.compress(SMALL), '"one"'
        self.breaks: list[int] = []
        self.ranges = self.tells_size = True
        self.others: list[str] = []
        """The tags of the next answers, each of another server of a mirror."""
        self.pages = 0
        """How many of the next answers are those of a network that wants to be logged in to."""
        self.meeting: threading.Barrier | None = None
        """Where an answer waits a while for another one, after its first byte."""
        self.asked: list[tuple[str, str]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        server, asked = self.server, self.headers.get("Range", "")
        server.asked.append((self.command, asked))
        if not self.path.endswith(f"/dewiki/20260101/{NAME}"):
            self.send_error(404)
            return
        if send and server.pages:
            server.pages -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)
            return
        tag = server.others.pop(0) if send and server.others else server.tag
        same = server.ranges and self.headers.get("If-Range") in (None, tag)
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and same else 0
        data = server.data[begin:]
        self.send_response(206 if begin else 200)
        if server.tells_size:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", tag)
        self.end_headers()
        if send:
            if server.meeting is not None:
                self.wfile.write(data[:1])
                data = data[1:]
                with contextlib.suppress(threading.BrokenBarrierError):
                    server.meeting.wait(timeout=2)
            self.wfile.write(data[: server.breaks.pop(0)] if server.breaks else data)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    monkeypatch.setenv("WIKIPEDIA_DUMPS", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(dumps, "PAUSE_S", 0.0)
    yield server
    server.server_close()


def find(name: str = "wikipedia:de:20260101") -> Any:
    return find_dump(SourceSettings(source=name), "data.train[0].source")


def gets(server: Server) -> list[str]:
    return [asked for verb, asked in server.asked if verb == "GET"]


def test_a_dump_becomes_documents(tmp_path: Path, server: Server) -> None:
    pytest.importorskip("mwparserfromhell", reason="mwparserfromhell is not installed")
    small = recipe(tmp_path, {"source": "wikipedia:de:20260101", "weight": 2.0})
    ingest(small)
    assert list(documents(small.folder.raw)) == [f"{NAME}:12", f"{NAME}:16"]
    ingest(small)
    assert gets(server) == [""], "what is there is not fetched again"
    before = source_stamps(small)
    server.tag = '"two"'
    assert source_stamps(small) != before
    open_raw(small)


def test_a_broken_download_goes_on(server: Server) -> None:
    server.breaks = [100, 50, 0, 0]
    fetch_dump(file := find())
    assert Path(file.path).read_bytes() == server.data
    assert gets(server) == ["", "bytes=100-", "bytes=150-", "bytes=150-", "bytes=150-"]
    assert [path.name for path in Path(file.path).parent.iterdir()] == [NAME]


def test_two_that_fetch_one_dump_at_once_fetch_it_once(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.meeting, file = threading.Barrier(2), find()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fetch_dump, [file, file]))
    assert Path(file.path).read_bytes() == server.data
    assert gets(server) == [""]
    assert f"waiting for another process that fetches {NAME}" in capsys.readouterr().err


def test_a_download_that_gains_nothing_ends(server: Server) -> None:
    server.breaks = [100] + [0] * 20
    with pytest.raises(
        Failed,
        match=rf"{NAME} broke off at 100 of [\d,]+ bytes .*; run the same command again to go on",
    ):
        fetch_dump(find())
    server.breaks = []
    fetch_dump(file := find())
    assert gets(server)[-1] == "bytes=100-"
    assert Path(file.path).read_bytes() == server.data


def test_a_page_of_the_network_is_no_part_of_a_dump(server: Server) -> None:
    server.pages = 2
    server.breaks = [100]
    fetch_dump(file := find())
    assert Path(file.path).read_bytes() == server.data
    assert gets(server) == ["", "", "", "bytes=100-"]


def test_a_server_without_ranges_that_always_breaks_off_is_given_up(server: Server) -> None:
    """Now early, now late: what it sent again is no progress."""
    server.ranges, server.breaks = False, [100, 200] * 20
    with pytest.raises(Failed, match="broke off at"):
        fetch_dump(find())
    assert len(gets(server)) == 2 + dumps.TRIES


def test_a_dump_whose_size_nobody_tells_is_not_fetched(server: Server) -> None:
    server.tells_size = False
    with pytest.raises(Failed, match="does not tell its size"):
        find()


def test_two_versions_are_never_mixed(server: Server) -> None:
    server.breaks = [100]
    file = find()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "TRIES", 0)
        server.breaks = [100, 0]
        with pytest.raises(Failed, match="broke off"):
            fetch_dump(file)
    server.data, server.tag = bz2.compress(SMALL * 3), '"two"'
    with pytest.raises(Failed, match="changed while it was fetched"):
        fetch_dump(file)
    fetch_dump(new := find())
    assert new.path != file.path
    assert Path(new.path).read_bytes() == server.data


def test_servers_of_a_mirror_with_other_tags_cost_no_download(server: Server) -> None:
    server.breaks = [100, 0, 0]
    server.others = ['"one"', '"two"', '"two"', '"one"']
    fetch_dump(file := find())
    assert Path(file.path).read_bytes() == server.data
    assert gets(server) == ["", "bytes=100-", "bytes=100-", "bytes=100-"]


def test_without_a_network_what_is_known_is_used(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_dump(file := find())
    server.server_close()
    assert find() == file
    assert (
        "the dump server cannot be reached; wikipedia:de:20260101 is taken to be as it was"
        in capsys.readouterr().err
    )
    with pytest.raises(
        Failed, match=r"cannot be reached .*; check the network, or give the path of a dump at hand"
    ):
        find("wikipedia:de:20260202")


def test_what_there_is_not(server: Server) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"data\.train\[0\]\.source wikipedia:de:20250101: .* is not there; see http.*/dewiki/"
            r" for the dates"
        ),
    ):
        find("wikipedia:de:20250101")
    for name in ("wikipedia:", "wikipedia:DE", "wikipedia:de:yesterday", "wikipedia:de/../x"):
        with pytest.raises(
            WrongInput, match="write it as wikipedia:LANG or wikipedia:LANG:YYYYMMDD"
        ):
            find(name)
