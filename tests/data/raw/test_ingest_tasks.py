"""Ingesting in several processes: the same folder for any number of them, and what they find told
as one process tells it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ingot.base.errors import WrongInput
from ingot.config.load import dump_recipe
from ingot.data import ingest as ingest_module
from ingot.data.ingest import ingest
from ingot.data.raw import ingest_tasks as blocks
from ingot.data.raw.store import open_raw
from ingot.data.splits import chosen
from tests.data.small import everything, recipe, sentences, write_jsonl
from tests.data.test_ingest import documents
from tests.patience import PATIENCE_S


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 20 kB, and processes for the smallest input."""
    monkeypatch.setattr(blocks, "SMALLEST_BYTES", 20_000)
    monkeypatch.setattr(ingest_module, "ALONE_BYTES", 0)


def mixed(root: Path) -> list[Path]:
    """Two sources: a large file with some bad lines, and a folder of small files."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in sentences(1500)]
    for number in range(0, 1500, 97):
        lines[number] = "{broken" if number % 2 else '{"text": null}'
    (root / "large.jsonl").write_text("\n".join(lines))
    for number, text in enumerate(sentences(300, 5000)):
        (root / "many").mkdir(exist_ok=True)
        (root / "many" / f"{number:03d}.txt").write_text(text)
    return [root / "large.jsonl", root / "many"]


@pytest.mark.usefixtures("small_blocks")
def test_the_same_folder_for_any_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = mixed(tmp_path)
    found, told = {}, {}
    for workers in (1, 3):
        small = recipe(tmp_path, *sources, data__engine__workers=workers)
        found[workers] = (ingest(small), everything(small.folder.raw))
        lines = capsys.readouterr().err.splitlines()
        # A slow machine shows how far the work is, and when is chance.
        told[workers] = [line for line in lines if not line.startswith("ingest ")]
    assert told[1], "bad lines are named"
    assert found[1] == found[3]
    assert told[1] == told[3]
    assert len(found[1][1]) > 5, "several parts"
    assert not list(small.folder.data.glob(".*"))


@pytest.mark.usefixtures("small_blocks")
def test_blocks_keep_lines_and_order(tmp_path: Path) -> None:
    sources = mixed(tmp_path)
    small = recipe(tmp_path, *sources, data__engine__workers=2)
    ingest(small)
    lines = (tmp_path / "large.jsonl").read_text().split("\n")
    expected = {
        f"large.jsonl:{row}": json.loads(line)["text"]
        for row, line in enumerate(lines, start=1)
        if line[0:8] == '{"text":' and "null" not in line
    }
    expected |= {
        path.name + ":1": path.read_text() for path in sorted((tmp_path / "many").iterdir())
    }
    assert list(documents(small.folder.raw).items()) == list(expected.items())
    first = open_raw(small).splits["train"][0]
    assert first.bad == {"null `text`": 8, "broken JSON": 8}
    assert [int(example.split(":")[1]) for example in first.examples] == [
        row for row in range(1, 1501) if (row - 1) % 97 == 0
    ]


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_record_in_a_later_block_stops_all(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sentences(1500))
    with path.open("a") as stream:
        stream.write('{"other": 1}\n')
    small = recipe(tmp_path, path, data__on_bad="stop", data__engine__workers=2)
    with pytest.raises(
        WrongInput,
        match=r"a\.jsonl:1501: no `text` \(keys: other\); mend it, or set data\.on_bad=skip",
    ):
        ingest(small)
    assert not list(small.folder.data.iterdir()), "nothing half-written is left"


@pytest.mark.usefixtures("small_blocks")
def test_no_text_in_any_block(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"title": "x", "note": "' + "x" * 900 + '"}\n' * 90)
    (tmp_path / "b.jsonl").write_text(
        "\n".join(json.dumps({"title": "x" * 900}) for _ in range(90))
    )
    for name, keys in (("a.jsonl", "title, note"), ("b.jsonl", "title")):
        with pytest.raises(WrongInput, match=f"{name} has no column `text`; it has {keys}"):
            ingest(recipe(tmp_path, tmp_path / name, data__engine__workers=2))


def test_a_share_of_a_source(tmp_path: Path) -> None:
    first, second = (
        write_jsonl(tmp_path / "a.jsonl", sentences(400)),
        write_jsonl(tmp_path / "b.jsonl", sentences(50, 400)),
    )
    small = recipe(tmp_path, {"source": str(first), "fraction": 0.25}, second)
    ingest(small)
    found = documents(small.folder.raw)
    assert {doc_id for doc_id in found if doc_id.startswith("a.")} == {
        f"a.jsonl:{row}" for row in range(1, 401) if chosen(f"a.jsonl:{row}", "source", 0.25)
    }
    assert 60 < len(found) - 50 < 140
    assert sum(doc_id.startswith("b.") for doc_id in found) == 50
    with pytest.raises(
        WrongInput, match=r"was made from train\[0\] .*a.jsonl \{'fraction': 0.25\}"
    ):
        open_raw(recipe(tmp_path, first, second))
    with pytest.raises(
        WrongInput, match=r"b\.jsonl: fraction=0\.0001 leaves none of its 50 documents; raise it"
    ):
        ingest(recipe(tmp_path, first, {"source": str(second), "fraction": 0.0001}))


SCRIPT = """
import sys
from ingot.config.load import load_recipe
from ingot.data.raw import ingest_tasks as blocks
from ingot.data.raw import store as raw
from ingot.data import ingest as ingest_module

if __name__ == "__main__":
    blocks.SMALLEST_BYTES, ingest_module.ALONE_BYTES = 50_000, 0
    print("start", flush=True)
    ingest_module.ingest(load_recipe([sys.argv[1]], environ={}, dotenv=None))
"""


@pytest.mark.drawn("a kill while data is made")
def test_killed_and_run_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", sentences(20_000))
    small = recipe(tmp_path, path, data__engine__workers=2)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(small))
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    until = time.monotonic() + PATIENCE_S
    while (
        not list(small.folder.data.glob(".raw.*/.tasks/*/*.parquet")) and time.monotonic() < until
    ):
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive
    assert list(small.folder.data.glob(".raw.*/.tasks/*/*.parquet")), "it was killed in the middle"
    with pytest.raises(WrongInput, match="no ingested documents"):
        open_raw(small)
    assert (
        subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(Path.cwd())}, check=False
        ).returncode
        == 0
    )
    assert list(documents(small.folder.raw).values()) == sentences(20_000)
    assert not list(small.folder.data.glob(".*"))
