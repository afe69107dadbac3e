from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.events import append_line, flush_lines, read_lines, record_event


def test_an_event_carries_both_clocks_and_what_was_told(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    record_event(path, "save", attempt=2, rank=1, step=30, seconds=0.5, cause="every 10", bytes=7)
    (event,) = read_lines(path)
    assert {
        key: event[key] for key in ("kind", "attempt", "rank", "step", "seconds", "cause", "bytes")
    } == {
        "kind": "save",
        "attempt": 2,
        "rank": 1,
        "step": 30,
        "seconds": 0.5,
        "cause": "every 10",
        "bytes": 7,
    }
    assert event["t_wall"] > 1.6e9
    assert event["t_mono"] >= 0


def test_a_torn_line_is_left_out_and_swallows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"n": 1})
    with path.open("ab") as stream:
        stream.write(b'{"n": 2, "te')
    assert [line["n"] for line in read_lines(path)] == [1]
    append_line(path, {"n": 3})
    assert [line["n"] for line in read_lines(path)] == [1, 3]


def test_flushing_lines_flushes_the_file_and_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    flush_lines(tmp_path / "lines.jsonl")
    assert flushed == []
    append_line(tmp_path / "lines.jsonl", {"n": 1})
    flush_lines(tmp_path / "lines.jsonl")
    assert flushed == [str(tmp_path / "lines.jsonl"), str(tmp_path)]


def test_lines_that_are_not_json_objects_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n\xff\xfe\n[1]\n\n3\nnull\n{"n": 2}\n')
    assert [line["n"] for line in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "none")) == []


def _write_many(path: Path, writer: int) -> None:
    for number in range(200):
        append_line(path, {"writer": writer, "number": number, "text": "x" * 500})


def test_lines_of_several_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, writer)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 600
    for writer in range(3):
        assert [line["number"] for line in lines if line["writer"] == writer] == list(range(200))


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongInput, match="in the way"):
        record_event(tmp_path / "file" / "events.jsonl", "start")
