"""A kind of source that another package brings, found by its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import source_stamps
from tests.data.small import everything, recipe
from tests.data.test_ingest import documents

CODE = """
from ingot.base.progress import say
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import SourceFile


class Numbers(SourceKind):
    yields_records = True

    def find(self, source, knob):
        count = int(source.source.partition(":")[2])
        return [
            SourceFile(source.source, f"numbers-{n}", "records", {"path": source.source, "shard": n})
            for n in range(count)
        ]

    def fetch(self, file):
        say(f"fetching {file.name}")

    def read(self, file, extractor):
        for row in range(1, 6):
            record = {"body": f"number {file.stamp['shard']}-{row}" if row != 3 else None}
            yield extractor.extract(row, record)
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    about = site / "extra_numbers-1.0.dist-info"
    about.mkdir(parents=True)
    (site / "extra_numbers.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-numbers\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[ingot.plugins]\nsource.numbers = extra_numbers:Numbers\n"
    )
    monkeypatch.syspath_prepend(str(site))


def test_its_records_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = recipe(tmp_path, {"source": "numbers:3", "text": "body"})
    ingest(small)
    assert "fetching numbers-2" in capsys.readouterr().err
    source = open_raw(small, unchanged=True).splits["train"][0]
    assert (source.files, source.documents, source.bad) == (3, 12, {"null `body`": 3})
    assert documents(small.folder.raw)["numbers-1:4"] == "number 1-4"
    first = everything(small.folder.raw)
    ingest(small)
    assert everything(small.folder.raw) == first
    assert [stamp["shard"] for stamp in source_stamps(small)["train"]] == [0, 1, 2]


def test_an_unknown_kind_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"hf:, wikipedia:, bigquery:, megatron:, numbers: or"):
        ingest(recipe(tmp_path, {"source": "number:3"}))
    with pytest.raises(WrongInput, match="builtin:stdlib is"):
        ingest(recipe(tmp_path, {"source": "builtin:other"}))
