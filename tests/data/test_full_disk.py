"""A disk that really is full: said in one line, nothing half-written kept, and with space again it
goes on.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.data.cleaning.documents import read_documents
from ingot.data.columns.manifest import read_prepared
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from tests.data.small import recipe, sentences, write_jsonl


def mount(folder: Path, options: str) -> bool:
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount(folder, "size=64k"):
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_ingest(tiny_disk: Path, tmp_path: Path) -> None:
    noise = [f"{number * 7919**9 % 10**31:x} {text}" for number, text in enumerate(sentences(3000))]
    small = recipe(tiny_disk, write_jsonl(tmp_path / "a.jsonl", noise))
    with pytest.raises(
        Failed,
        match=(
            r"disk full while writing .*train-00000.parquet; make space and run the same command"
            r" again"
        ),
    ):
        ingest(small)
    with pytest.raises(WrongInput, match="no ingested documents"):
        list(read_documents(small, "train"))
    assert mount(tiny_disk, "remount,size=16m")
    assert ingest(small).result.startswith("3,000 documents")


@pytest.mark.parametrize("workers", [1, 2])
def test_prepare(
    tiny_disk: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.data.raw.store.GROUP_BYTES", 50_000)
    monkeypatch.setattr("ingot.data.raw.ranges.SMALLEST_BYTES", 100_000)
    small = recipe(
        tiny_disk, write_jsonl(tmp_path / "a.jsonl", sentences(2000)), data__engine__workers=workers
    )
    ingest(small)
    with pytest.raises(Failed, match=r"disk full while writing .*tokens-0000\d"):
        prepare(small)
    with pytest.raises(WrongInput, match="no prepared data"):
        read_prepared(small.folder.columns)
    assert not list(small.folder.columns.glob(".*")), "nothing half-written is left"
    assert mount(tiny_disk, "remount,size=16m")
    prepare(small)
    assert read_prepared(small.folder.columns).total("train", "documents") > 1000
