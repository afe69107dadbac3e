from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.markers import entry_of, problems, read_marker, write_marker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.bin").write_bytes(b"0123456789")
    (tmp_path / "b.bin").write_bytes(b"x" * 1000)
    write_marker(tmp_path, "COMMIT.json", {"step": 3}, [entry_of(tmp_path, name) for name in ("inner/a.bin", "b.bin")])
    return tmp_path


def test_a_marker_comes_back_as_it_was_written_and_vouches_for_its_files(folder: Path) -> None:
    marker = read_marker(folder, "COMMIT.json")
    assert marker is not None
    assert marker["step"] == 3
    assert [entry["path"] for entry in marker["files"]] == ["inner/a.bin", "b.bin"]
    assert problems(folder, marker, checksums=True) == []


def test_a_truncated_a_missing_and_a_changed_file_are_named(folder: Path) -> None:
    marker = read_marker(folder, "COMMIT.json")
    assert marker is not None
    (folder / "b.bin").write_bytes(b"x" * 999)
    assert problems(folder, marker, checksums=False) == [f"{folder}/b.bin has 999 bytes, 1000 were written"]
    (folder / "b.bin").unlink()
    assert problems(folder, marker, checksums=False) == [f"{folder}/b.bin is missing"]
    (folder / "b.bin").write_bytes(b"x" * 1000)
    (folder / "inner" / "a.bin").write_bytes(b"012345678X")
    assert problems(folder, marker, checksums=False) == []
    assert problems(folder, marker, checksums=True) == [f"{folder}/inner/a.bin does not match its checksum"]


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "files": [', "[]", "3", "\udcff"])
def test_what_is_not_whole_is_no_marker(tmp_path: Path, text: str) -> None:
    (tmp_path / "M.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_marker(tmp_path, "M.json") is None


def test_no_folder_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path / "none", "M.json") is None
    (tmp_path / "file").write_text("")
    assert read_marker(tmp_path / "file", "M.json") is None


def test_a_newer_marker_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "M.json").write_text(json.dumps({"schema": 99}))
    with pytest.raises(WrongInput, match=r"schema 99, newer.*upgrade"):
        read_marker(tmp_path, "M.json")
