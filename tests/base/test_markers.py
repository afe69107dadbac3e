from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from ingot.base import markers
from ingot.base.errors import WrongInput
from ingot.base.markers import (
    FileEntry,
    canonical_json,
    entry_of,
    fingerprint,
    problems,
    read_marker,
    write_marker,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.bin").write_bytes(b"0123456789")
    (tmp_path / "b.bin").write_bytes(b"x" * 1000)
    write_marker(
        tmp_path,
        "COMMIT.json",
        {"step": 3},
        [entry_of(tmp_path, name) for name in ("inner/a.bin", "b.bin")],
    )
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
    assert problems(folder, marker, checksums=False) == [
        f"{folder}/b.bin has 999 bytes, 1000 were written"
    ]
    (folder / "b.bin").unlink()
    assert problems(folder, marker, checksums=False) == [f"{folder}/b.bin is missing"]
    (folder / "b.bin").write_bytes(b"x" * 1000)
    (folder / "inner" / "a.bin").write_bytes(b"012345678X")
    assert problems(folder, marker, checksums=False) == []
    assert problems(folder, marker, checksums=True) == [
        f"{folder}/inner/a.bin does not match its checksum"
    ]


def test_no_bit_of_a_marker_changes_unseen(tmp_path: Path) -> None:
    about = {
        "step": 3,
        "time": 1.7e9 + 0.30000000000000004,
        "name": "Zürich",
        "none": None,
        "inner": {"a": [1, 2.5, True]},
        7: "number",
        "share": 0.1 + 0.2,
    }
    written = write_marker(tmp_path, "M.json", about, [FileEntry("a", 3, "0" * 64)])
    assert read_marker(tmp_path, "M.json") == written
    content = (tmp_path / "M.json").read_bytes()
    for offset in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[offset] ^= 1 << bit
            (tmp_path / "M.json").write_bytes(flipped)
            assert read_marker(tmp_path, "M.json") is None, (
                f"bit {bit} of byte {offset}: {flipped[max(offset - 20, 0) : offset + 20]!r}"
            )
    for length in range(len(content)):
        (tmp_path / "M.json").write_bytes(content[:length])
        assert read_marker(tmp_path, "M.json") is None, f"the first {length} bytes"


def test_a_marker_without_a_checksum_of_its_own_is_damaged(folder: Path) -> None:
    marker = read_marker(folder, "COMMIT.json")
    assert marker is not None
    del marker["checksum"]
    (folder / "COMMIT.json").write_text(json.dumps(marker, indent=1) + "\n")
    assert read_marker(folder, "COMMIT.json") is None


def test_what_is_made_of_a_marker_has_a_checksum_of_its_own(folder: Path) -> None:
    marker = read_marker(folder, "COMMIT.json")
    assert marker is not None
    again = write_marker(
        folder,
        "COMMIT.json",
        {**{key: value for key, value in marker.items() if key != "files"}, "step": 4},
        [],
    )
    assert again["checksum"] != marker["checksum"]
    assert read_marker(folder, "COMMIT.json") == again


def test_files_are_verified_beside_each_other_and_told_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number}.bin" for number in range(6)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    marker = {"files": [asdict(entry_of(tmp_path, name)) for name in names]}
    together, hashing = threading.Barrier(2, timeout=20), markers.sha256_file

    def met(path: Path) -> str:
        together.wait()  # never comes back where files are read one after the other
        return hashing(path)

    monkeypatch.setattr(markers, "usable_cores", lambda: 2)
    monkeypatch.setattr(markers, "sha256_file", met)
    for name in ("1.bin", "4.bin"):
        (tmp_path / name).write_bytes(b"other")
    assert problems(tmp_path, marker, checksums=True) == [
        f"{tmp_path}/{name} does not match its checksum" for name in ("1.bin", "4.bin")
    ]


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk with a bad sector."""
    marker = read_marker(folder, "COMMIT.json")
    assert marker is not None
    monkeypatch.setattr(
        markers, "sha256_file", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    assert (
        problems(folder, marker, checksums=True)[0]
        == f"{folder}/inner/a.bin cannot be read (Input/output error)"
    )


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "files": [', "[]", "3", "\udcff"])
def test_what_is_not_whole_is_no_marker(tmp_path: Path, text: str) -> None:
    (tmp_path / "M.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_marker(tmp_path, "M.json") is None


def test_no_folder_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path / "none", "M.json") is None
    (tmp_path / "file").write_text("")
    assert read_marker(tmp_path / "file", "M.json") is None


def test_a_newer_marker_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(markers, "SCHEMA", 99)
        write_marker(tmp_path, "M.json", {}, [])
    with pytest.raises(WrongInput, match=r"schema 99, newer.*upgrade"):
        read_marker(tmp_path, "M.json")


def test_equal_values_have_equal_fingerprints_whatever_their_order_and_process() -> None:
    value = {"b": [1, 2.5, None, True], "a": {"ü": "x", "y": 1}}
    same = {"a": {"y": 1, "ü": "x"}, "b": [1, 2.5, None, True]}
    assert fingerprint(value) == fingerprint(same)
    code = f"from ingot.base.markers import fingerprint; print(fingerprint({value!r}))"
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip() == fingerprint(value)
    assert len(fingerprint(value)) == 16


@pytest.mark.parametrize(
    ("one", "other"), [([1, 2], [2, 1]), (1, "1"), ({"a": None}, {}), ("a", "A"), (0.1, 0.2)]
)
def test_other_values_have_other_fingerprints(one: object, other: object) -> None:
    assert fingerprint(one) != fingerprint(other)


def test_nan_has_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": float("nan")})
