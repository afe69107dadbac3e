"""Sources behind web addresses, by the real client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.ingest import ingest
from ingot.data.sources.find import find_source
from ingot.data.sources.records import read_records
from tests.data.small import recipe, sentences
from tests.lazy import require
from tests.loopback import Loopback

require("aiohttp", reason="aiohttp is not installed")


class Web(Loopback):
    """Serves `data`; after a request for a part of it, what `then` does has happened."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.data, self.version, self.cut = lines("old"), 1, 0
        self.codes: Iterator[int] = repeat(200)
        self.then: Callable[[], None] = lambda: None

    def write(self, data: bytes) -> None:
        self.data, self.version = data, self.version + 1


class _Handler(BaseHTTPRequestHandler):
    server: Web

    def do_HEAD(self) -> None:
        data, code = self.server.data, next(self.server.codes)
        if "Range" in self.headers:
            data = data[: len(data) - self.server.cut]
        self.send_response(206 if "Range" in self.headers else code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{self.server.version}"')
        self.end_headers()
        if self.command == "GET":
            if "Range" in self.headers:
                self.server.then()
            self.wfile.write(data)

    do_GET = do_HEAD

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def lines(word: str) -> bytes:
    return b"".join(json.dumps({"text": f"{word} {row}"}).encode() + b"\n" for row in range(9))


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.server_close()


@pytest.mark.parametrize("bad", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, web: Web, bad: bool
) -> None:
    """Also where its halves do not fit together: that is no bad record, which on_bad would skip,
    or which the user would be told to mend.
    """
    if bad:
        web.data = lines("old") + b'{"text": "ol'
    web.then = lambda: web.write(lines("new"))
    for on_bad in ("stop", "skip"):
        small = recipe(tmp_path, f"{web.address}/a.jsonl", data__on_bad=on_bad)
        with pytest.raises(Failed, match=r"a\.jsonl changed while it was read; .* download it"):
            ingest(small)
    web.then = lambda: None
    assert ingest(small).result.startswith("9 documents")


def test_items_of_a_file_that_changes_are_refused(web: Web) -> None:
    source = f"{web.address}/validation.jsonl"
    assert len(read_records(source, "source", ["text"])) == 9
    web.then = lambda: web.write(lines("new"))
    with pytest.raises(Failed, match="changed while it was read"):
        read_records(source, "source", ["text"])
    assert len(read_records(source, "source", ["text"], limit=3)) == 3  # its end was not reached


@pytest.mark.parametrize("on_bad", ["skip", "skip_files"])
def test_a_table_that_ends_early_is_no_damaged_one(tmp_path: Path, web: Web, on_bad: str) -> None:
    """Of a damaged one the rest may be left out."""
    file = BytesIO()
    pq.write_table(pa.table({"text": sentences(30)}), file)
    web.data, web.cut = file.getvalue(), 100
    small = recipe(tmp_path, f"{web.address}/a.parquet", data__on_bad=on_bad)
    with pytest.raises(Failed, match=r"a\.parquet broke off \(it ended after"):
        ingest(small)


def test_a_server_that_is_busy_is_not_taken_for_one_without_the_file(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.base.remote.web.PAUSES_S", ())
    source = SourceSettings(source=f"{web.address}/a.jsonl")
    web.codes = repeat(404)
    with pytest.raises(WrongInput, match=r"no such file \(404, .*; check the address, and that it"):
        find_source(source)
    for absent in range(5):
        web.codes = chain(repeat(404, absent), repeat(503))
        with pytest.raises(Failed, match=r"is busy or breaks off \(503, .*; run the same command"):
            find_source(source)
