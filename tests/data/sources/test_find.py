"""Which files a source means, what they are called, how their format is told."""

from __future__ import annotations

import gzip
import os
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ingot.base.errors import WrongInput
from ingot.config.doors import Door
from ingot.config.sections.data import SourceSettings
from ingot.data.ingest import ingest
from ingot.data.sources.find import (
    describe_change,
    find_source,
    source_files,
    source_stamps,
    stamps_of,
)
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.local_files import STDLIB
from ingot.data.sources.source_file import SourceFile, name_with_ending
from tests.data.small import recipe
from tests.data.test_ingest import documents
from tests.loopback import Loopback


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "deep/c.txt",
        "deep/d.CSV",
        "deep/e.tsv.zst",
        "f.json",
        "g.parquet",
        "h.ndjson",
        ".hidden.txt",
        ".git/x.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    return folder


def names(source: str, **knobs: Any) -> list[str]:
    return [file.name for file in find_source(SourceSettings(source=source, **knobs))]


def test_a_folder_is_walked_in_order_without_hidden_files(corpus: Path) -> None:
    files = find_source(SourceSettings(source=str(corpus)))
    assert [(file.name, file.format) for file in files] == [
        ("a.jsonl.gz", "jsonl"),
        ("b.jsonl", "jsonl"),
        ("deep/c.txt", "text"),
        ("deep/d.CSV", "csv"),
        ("deep/e.tsv.zst", "tsv"),
        ("f.json", "json"),
        ("g.parquet", "parquet"),
        ("h.ndjson", "jsonl"),
    ]


def test_what_is_hidden_is_read_where_it_is_named(corpus: Path) -> None:
    assert names(f"{corpus}/.hidden.txt") == [".hidden.txt"]
    assert names(f"{corpus}/.git") == ["x.txt"]
    assert "x.txt" not in names(f"{corpus}/**")


def test_what_changed_of_a_source_is_named(corpus: Path) -> None:
    source = SourceSettings(source=f"{corpus}/**/*")
    files = find_source(source)
    assert describe_change(source, *stamps_of(files), "source") is None
    turned = describe_change(source, *stamps_of(files[::-1]), "source")
    assert turned == "its files are in another order"
    assert describe_change(source, *stamps_of(files[1:]), "source") == f"{files[0].path} is new"


def test_a_file_has_the_same_name_however_it_is_found(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(str(corpus / "b.jsonl")) == names(str(corpus / "b*")) == ["b.jsonl"]
    assert names(str(corpus / "deep")) == ["c.txt", "d.CSV", "e.tsv.zst"]
    assert (
        names(str(corpus / "*" / "c.txt")) == names(str(corpus / "**" / "c.txt")) == ["deep/c.txt"]
    )
    monkeypatch.chdir(corpus)
    assert (
        names("b.jsonl")
        == names("./b.jsonl")
        == names("b*.jsonl")
        == names(f"file://{corpus}/b.jsonl")
        == ["b.jsonl"]
    )
    assert (
        names("deep/")
        == names("./deep")
        == names("../corpus/deep/*")
        == ["c.txt", "d.CSV", "e.tsv.zst"]
    )


def test_a_given_format_wins(corpus: Path) -> None:
    assert {
        file.format for file in find_source(SourceSettings(source=str(corpus), format="text"))
    } == {"text"}


def test_object_storage() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/found/data/a.jsonl": b"x", "/found/data/deep/b.jsonl": b"xy"})
    try:
        assert names("memory://found/data") == ["a.jsonl", "deep/b.jsonl"]
        assert (
            names("memory://found/data/a.jsonl")
            == names("memory://found/data/*.jsonl")
            == ["a.jsonl"]
        )
        assert [
            file.bytes for file in find_source(SourceSettings(source="memory://found/data"))
        ] == [1, 2]
    finally:
        memory.rm("/found", recursive=True)


def test_equal_names_in_two_sources_are_told_apart(tmp_path: Path) -> None:
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("x")
    found = source_files(
        recipe(
            tmp_path,
            tmp_path / "one",
            tmp_path / "two",
            data__validation=[{"source": str(tmp_path / "three")}],
        )
    )
    first, *others = (file.name for every in found.values() for files in every for file in files)
    assert first == "a.txt"
    assert all(re.fullmatch(r"a\.txt~[0-9a-f]{8}", name) for name in others)
    assert len(set(others)) == 2


def test_a_file_has_its_name_whatever_other_sources_there_are(tmp_path: Path) -> None:
    """Else another source, or one README, swaps what is held out for what is trained on."""
    for path in ("wiki/train/0.txt", "news/train/0.txt", "news/train/1.txt", "web/train/0.txt"):
        for root in ("here", "there"):
            (tmp_path / root / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / path).write_text(path)

    def names_of(*sources: str) -> list[list[str]]:
        found = source_files(recipe(tmp_path, *(tmp_path / source for source in sources)))
        return [[file.name for file in files] for files in found["train"]]

    wiki, news = names_of("here/wiki/train", "here/news/train")
    assert news[1] == "1.txt", "only what clashes is renamed"
    assert names_of("here/wiki/train", "here/web/train", "here/news/train")[::2] == [wiki, news]
    assert names_of("there/wiki/train", "there/news/train") == [wiki, news], "moved"
    both = names_of("here/wiki/train", "here/news/train", "there/news/train", "here/news/train")
    assert len({name for names in both for name in names}) == 7


def test_excluded_files_are_left_out(corpus: Path) -> None:
    given = str(corpus)
    assert names(given, exclude=["deep/*", "*.json"]) == [
        "a.jsonl.gz",
        "b.jsonl",
        "g.parquet",
        "h.ndjson",
    ]
    assert "deep/c.txt" in names(given, exclude=["c.txt", "dee"]), "patterns are of whole names"
    assert not [name for name in names(STDLIB, exclude=["*/json/*"]) if "/json/" in name]
    with pytest.raises(WrongInput, match=r"exclude=\['\*'\] leaves none of its 8 files"):
        names(given, exclude=["*"])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("c.txt", "*/c.txt would match"),
        ("deep", "deep/* would match"),
        ("dee", "*dee* would match"),
        ("CORPUS/deep/c.txt", "deep/c.txt would match"),
        ("*.xml", "remove it"),
        (".git/*", "hidden files are never read: remove it"),
    ],
)
def test_a_pattern_that_leaves_nothing_out_is_refused(
    pattern: str, near: str, corpus: Path
) -> None:
    exclude = ["b.jsonl", pattern.replace("CORPUS", str(corpus))]
    given = SourceSettings(source=str(corpus), exclude=exclude)
    with pytest.raises(
        WrongInput,
        match=rf"no file is named so \(a\.jsonl\.gz, b\.jsonl, \.\.\.\); {re.escape(near)}",
    ):
        find_source(given, "data.train[0].source", tell=print)
    assert find_source(given), "of what was read before, as far as it is still there"


def test_a_name_with_brackets_is_left_out_by_a_pattern_for_it(tmp_path: Path) -> None:
    (tmp_path / "x[1].txt").write_text("x")
    given = SourceSettings(source=str(tmp_path), exclude=["x[1].txt"])
    with pytest.raises(WrongInput, match=r"; x\[\[\]1\]\.txt would match"):
        find_source(given, "data.train[0].source", tell=print)


def test_of_what_others_name_a_pattern_without_a_file_is_told() -> None:
    told: list[str] = []
    find_source(SourceSettings(source=STDLIB, exclude=["*.xml"]), tell=told.append)
    assert len(told) == 1
    assert "exclude has *.xml, and no file is named so" in told[0]


class Nothing(SourceKind):
    """A source that finds no file."""

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        return []


def test_a_source_without_a_file_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Door("source", {"nothing": f"{__name__}:Nothing"})
    monkeypatch.setattr("ingot.data.sources.find.SOURCES", door)
    with pytest.raises(WrongInput, match="source nothing:3 has no file; name another"):
        names("nothing:3")


def test_the_standard_library() -> None:
    files = find_source(SourceSettings(source=STDLIB))
    found = [file.name for file in files]
    assert found == sorted(found)
    assert "stdlib/json/decoder.py" in found
    assert all(
        name.startswith("stdlib/") and name.endswith(".py") and "site-packages" not in name
        for name in found
    )
    assert len(found) > 300
    assert all("mtime_ns" not in file.stamp for file in files), (
        "another installation of the same interpreter is the same source"
    )


class _Web(BaseHTTPRequestHandler):
    """A file in any format at any address that begins with its name."""

    def do_HEAD(self) -> None:
        lines = b'{"text": "one"}\n{"text": "two"}\n'
        data = gzip.compress(lines) if ".gz" in self.path.lower() else lines
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_GET = do_HEAD

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("a.jsonl?sig=secret", "a.jsonl"),
        ("deep/a.jsonl.GZ?X-Amz-Signature=secret&part=1", "a.jsonl.GZ"),
        ("get?file=a.jsonl", "get"),
        ("get?file=a.jsonl.gz", "get"),
    ],
)
def test_a_web_address_is_read_as_the_file_that_it_names(
    tmp_path: Path, address: str, name: str
) -> None:
    """Its query, often a signature, is no part of the file's name."""
    web = Loopback(_Web)
    small = recipe(tmp_path, f"{web.address}/{address}")
    ingest(small)
    web.server_close()
    assert documents(small.folder.raw) == {f"{name}:1": "one", f"{name}:2": "two"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("https://h/get?version=1.2&file=a.jsonl&token=b.gz.c", "a.jsonl"),
        ("https://h/a.jsonl?next=b.gz", "https://h/a.jsonl"),
        ("https://h/get?token=b.c", "https://h/get"),
        ("a?b.csv", "a?b.csv"),
    ],
)
def test_how_a_file_is_read_is_told_by_one_name(path: str, name: str) -> None:
    assert name_with_ending(path) == name


def test_stamps_tell_a_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    small = recipe(tmp_path, tmp_path / "a.txt")
    before = source_stamps(small)
    assert source_stamps(small) == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert source_stamps(small) != before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "nowhere/*.jsonl",
            (
                r"data.train\[0\].source nowhere/\*.jsonl: no such file; check the path \(relative"
                r" ones start at"
            ),
        ),
        (
            "parquet:x",
            (
                "parquet:x is no source that this version reads; give a path, a folder, a glob,"
                " hf:, wikipedia:, bigquery:, megatron: or builtin:stdlib"
            ),
        ),
        ("builtin:nothing", "builtin:nothing is not built in"),
        ("memory://nowhere/x", "no such file; check the address, and that it answers"),
        (
            "http://127.0.0.1:9/x.jsonl",
            r"no such file \(Cannot connect to host 127\.0\.0\.1:9 .*\); check the address",
        ),
    ],
)
def test_nothing_there(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        source_files(recipe(tmp_path, source))


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(WrongInput, match="no file is in this folder"):
        source_files(recipe(tmp_path, tmp_path / "empty"))
