"""Data sets of the hub, by the real client against a hub of the tests, and of a folder that is laid
out like one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.find import source_stamps
from tests.data.small import recipe, sentences
from tests.data.sources.hub_server import Server
from tests.data.test_ingest import documents
from tests.lazy import require

require("datasets", reason="datasets is not installed")

CARD = b"""---
configs:
- {config_name: de, data_files: "de/*.jsonl"}
- config_name: en
  data_files: [{split: train, path: "en/train-*.jsonl"}, {split: test, path: en/test.jsonl}]
---
"""
# Its clients take the hub's address when they are imported, so whatever speaks to the tests' hub is
# another process.
SCRIPT = """
import json, sys
from ingot.base.errors import IngotError
from ingot.config.load import load_recipe
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw, read_table
from ingot.data.sources.find import source_stamps

def do(name, source):
    recipe = load_recipe((), [f"name={name}", f"output={sys.argv[1]}", "data.train=" + json.dumps([source]), "tokenizer.source=train",
                              "model.source=preset:llama-3m", "data.engine.workers=1"], environ={}, dotenv=None)
    if name == "elsewhere":
        import datasets
        return datasets.load_dataset("org/set", "en", split="train")["text"][:1]
    if name == "stamps":
        return source_stamps(recipe)["train"]
    ingest(recipe)
    raw = open_raw(recipe)
    parts = [part for made in raw.splits["train"] for part in made.parts]
    rows = [row for part in parts for group in range(len(part.groups)) for row in read_table(raw.folder / part.path, group).to_pylist()]
    return {"texts": [[row["doc_id"], row["text"]] for row in rows], "bad": raw.splits["train"][0].bad}

if __name__ == "__main__":
    for name, source in json.loads(sys.argv[2]):
        try:
            print(json.dumps(do(name, source)), flush=True)
        except IngotError as error:
            print(json.dumps({"error": str(error)}), flush=True)
"""


def lines(*texts: str | None) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def hub() -> Iterator[Server]:
    server = Server(
        "org/set",
        {
            "README.md": CARD,
            "de/a.jsonl": lines("eins"),
            "en/train-0.jsonl": lines("one", None, "three"),
            "en/train-1.jsonl": lines(*sentences(2500)),
            "en/test.jsonl": lines("a test"),
        },
    )
    yield server
    server.server_close()


def do(
    root: Path, hub: Server, *tasks: tuple[str, dict[str, Any]], **more: str
) -> tuple[list[Any], str]:
    (root / "script.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(root / "hf"),
        "XDG_CACHE_HOME": str(root / "cache"),
        "PYTHONPATH": str(Path.cwd()),
        **more,
    }
    command = [sys.executable, str(root / "script.py"), str(root / "runs"), json.dumps(tasks)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.drawn("sets of a hub")
def test_subsets_and_splits_of_the_hub(tmp_path: Path, hub: Server) -> None:
    english, german, no_subset, no_split, nothing, no_column, stamps = do(
        tmp_path,
        hub,
        ("en", {"source": "hf:org/set:en", "weight": 2.0}),
        ("de", {"source": "hf:org/set:de"}),
        ("x", {"source": "hf:org/set:fr"}),
        ("x", {"source": "hf:org/set:en", "split": "dev"}),
        ("x", {"source": "hf:org/none"}),
        ("x", {"source": "hf:org/set:de", "text": "body"}),
        ("stamps", {"source": "hf:org/set:en", "split": "test"}),
    )[0]
    first = [["org/set/en/train-00000:1", "one"], ["org/set/en/train-00000:3", "three"]]
    assert english == {
        "texts": (
            first
            + [
                [f"org/set/en/train-00001:{row}", text]
                for row, text in enumerate(sentences(2500), start=1)
            ]
        ),
        "bad": {"null `text`": 1},
    }
    assert german["texts"] == [["org/set/de/train-00000:1", "eins"]]
    assert (
        "hf:org/set:fr cannot be used: BuilderConfig 'fr' not found. Available: ['de', 'en']"
        in no_subset["error"]
    )
    assert "Bad split: dev. Available splits: ['train', 'test']" in no_split["error"]
    assert nothing["error"].startswith(
        "data.train[0].source hf:org/none is no data set on the hub; check the name"
    )
    assert "hf:org/set:de has no column `body`; it has text" in no_column["error"]
    assert [(stamp["revision"], stamp["share"], stamp["shares"]) for stamp in stamps] == [
        (hub.commit, 0, 1)
    ]


@pytest.mark.drawn("sets of a hub")
def test_the_commit_is_the_stamp_and_a_hub_out_of_reach_is_not_waited_for(
    tmp_path: Path, hub: Server
) -> None:
    task = ("stamps", {"source": "hf:org/set:de"})
    seen = do(tmp_path, hub, task)[0]
    assert [stamp["revision"] for stamp in seen[0]] == [hub.commit]
    hub.server_close()
    known, unknown = (found := do(tmp_path, hub, task, ("stamps", {"source": "hf:org/other"})))[0]
    assert known == seen[0]
    assert "the hub cannot be reached; hf:org/set:de is taken to be as it was" in found[1]
    assert "hf:org/other cannot be reached" in unknown["error"]


@pytest.mark.drawn("sets of a hub")
def test_a_busy_hub_is_no_older_version_and_no_mistake_in_the_recipe(
    tmp_path: Path, hub: Server
) -> None:
    """The library takes what somebody loaded before, of whatever version, for what it cannot get;
    and calls what it cannot get not there.
    """
    assert do(tmp_path, hub, ("elsewhere", {"source": "hf:org/set:en"}))[0] == [["one"]]
    hub.files["en/train-0.jsonl"] = lines("newer")
    hub.busy = True
    (found,) = do(tmp_path, hub, ("en", {"source": "hf:org/set:en"}))[0]
    assert "data.train[0].source hf:org/set:en cannot be reached" in found["error"]


@pytest.mark.drawn("sets of a hub")
def test_a_set_that_the_library_prepared_is_read_without_a_network(
    tmp_path: Path, hub: Server
) -> None:
    """In one piece: in which shards of the hub its rows were is not in the cache."""
    english, test = {"source": "hf:org/set:en"}, {"source": "hf:org/set:en", "split": "test"}
    do(tmp_path, hub, ("elsewhere", english), ("stamps", english), ("stamps", test))
    whole, shards = do(tmp_path, hub, ("test", test), ("en", english), HF_HUB_OFFLINE="1")[0]
    assert whole["texts"] == [["org/set/en/test-00000:1", "a test"]]
    assert "hf:org/set:en cannot be reached" in shards["error"]
    assert "give the folder that its save_to_disk writes" in shards["error"]
    hub.files["en/test.jsonl"] = lines("newer")
    do(tmp_path, hub, ("stamps", test))
    (older,) = do(tmp_path, hub, ("newer", test), HF_HUB_OFFLINE="1")[0]
    assert "hf:org/set:en cannot be reached" in older["error"]


def test_a_folder_laid_out_like_a_set(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "en").mkdir(parents=True)
    (folder / "README.md").write_bytes(CARD)
    for name, texts in (("train-0", ["one", "two"]), ("test", ["three"])):
        (folder / "en" / f"{name}.jsonl").write_bytes(lines(*texts))
    (folder / "de").mkdir()
    (folder / "de" / "a.jsonl").write_bytes(lines("vier"))
    small = recipe(
        tmp_path,
        f"hf:{folder}:en",
        data__validation=[{"source": f"hf:{folder}:en", "split": "test"}],
    )
    ingest(small)
    assert documents(small.folder.raw) == {
        "set/en/train-00000:1": "one",
        "set/en/train-00000:2": "two",
    }
    assert documents(small.folder.raw, "validation") == {"set/en/test-00000:1": "three"}
    open_raw(small)
    before = source_stamps(small)
    (folder / "en" / "test.jsonl").write_bytes(lines("three", "five"))
    assert source_stamps(small) != before


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(WrongInput, match=r"pip install 'ingot\[datasets\]'"):
        ingest(recipe(tmp_path, f"hf:{tmp_path}"))
