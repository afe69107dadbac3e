"""`prepare` makes the same files on every engine, however the work is cut, deduplication
included.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.load import dump_recipe
from ingot.data.columns.manifest import read_prepared
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from tests.data.engines.places import BEAM, SPARK, needs_beam, needs_spark
from tests.data.small import everything, recipe, sentences, write_jsonl
from tests.data.test_prepare_examples import records


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Documents with doubles of every kind, over several sources: each of them is a task of its own
    in every stage.
    """
    folder = tmp_path_factory.mktemp("source")
    texts = sentences(240)
    doubles = [text.upper() for text in texts[::7]] + [
        text.replace("copper", "copper  ") for text in texts[::11]
    ]
    nearly = [text + " One sentence more than the other one has." for text in texts[::5]]
    every = texts + doubles + nearly
    return [write_jsonl(folder / f"{number}.jsonl", every[number::6]) for number in range(6)]


CLEAN = {
    "data__clean": {
        "exact": True,
        "fuzzy": {"similarity": 0.7},
        "normalize": "nfc",
        "min_chars": 20,
    }
}


@pytest.fixture(scope="module")
def reference(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one process on this machine makes."""
    made = recipe(tmp_path_factory.mktemp("local"), *sources, **CLEAN)
    ingest(made)
    prepare(made)
    prepared = read_prepared(made.folder.columns)
    kept = sum(prepared.total(split, "documents") for split in prepared.splits)
    assert 100 < kept < 240 + 35 + 22 + 48, "some documents are doubles, most are not"
    return everything(made.folder.columns)


PREFERENCES = {
    "objective__kind": "dpo",
    "tokenizer__template": "chatml",
    "tokenizer__vocab_size": 400,
    "data__seq_len": 96,
    "data__clean": {"exact": True, "fuzzy": {"similarity": 0.9}, "normalize": "nfc"},
}


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Preferences with doubles, over several sources."""
    folder, every = (
        tmp_path_factory.mktemp("preferences"),
        records("preference", 80) + records("preference", 20, change=str.upper),
    )
    for number in range(4):
        (folder / f"{number}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in every[number::4]), encoding="utf-8"
        )
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def reference_of_preferences(
    preferences: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    made = recipe(tmp_path_factory.mktemp("local"), *preferences, **PREFERENCES)
    ingest(made)
    prepare(made)
    prepared = read_prepared(made.folder.columns)
    assert prepared.documents == "preference"
    assert 40 < sum(prepared.total(split, "documents") for split in prepared.splits) <= 80, (
        "the doubles are gone"
    )
    return everything(made.folder.columns)


@pytest.mark.slow  # the fast suite has one small equality for each engine, below
@needs_spark
def test_spark_makes_the_same_preferences(
    preferences: list[Path], tmp_path: Path, reference_of_preferences: dict[str, str]
) -> None:
    made = recipe(
        tmp_path,
        *preferences,
        data__engine__workers=None,
        data__engine={"kind": "spark", "master": "local[2]", "conf": SPARK},
        **PREFERENCES,
    )
    ingest(made)
    prepare(made)
    assert everything(made.folder.columns) == reference_of_preferences


@pytest.mark.slow
@needs_beam
def test_beam_makes_the_same_preferences(
    preferences: list[Path], tmp_path: Path, reference_of_preferences: dict[str, str]
) -> None:
    made = recipe(
        tmp_path,
        *preferences,
        data__engine__workers=None,
        data__engine={"kind": "beam", "python": str(BEAM)},
        **PREFERENCES,
    )
    ingest(made)
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_recipe(made), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ingot", "prepare", str(written)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert everything(made.folder.columns) == reference_of_preferences


@pytest.mark.drawn("another engine, the same files")
@needs_spark
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_spark_makes_the_same_files(
    sources: list[Path], tmp_path: Path, reference: dict[str, str], partitions: int
) -> None:
    engine = {"kind": "spark", "master": "local[2]", "partitions": partitions, "conf": SPARK}
    made = recipe(tmp_path, *sources, data__engine__workers=None, data__engine=engine, **CLEAN)
    ingest(made)
    prepare(made)
    assert everything(made.folder.columns) == reference


@pytest.mark.drawn("another engine, the same files")
@needs_beam
@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_beam_makes_the_same_files(
    sources: list[Path], tmp_path: Path, reference: dict[str, str], partitions: int
) -> None:
    engine = {"kind": "beam", "partitions": partitions, "python": str(BEAM)}
    made = recipe(tmp_path, *sources, data__engine__workers=None, data__engine=engine, **CLEAN)
    ingest(made)
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_recipe(made), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ingot", "prepare", str(written)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert everything(made.folder.columns) == reference


def test_beam_without_its_environment_says_how_to_get_it(
    sources: list[Path], tmp_path: Path
) -> None:
    made = recipe(tmp_path, *sources, data__engine__workers=None, data__engine={"kind": "beam"})
    ingest(made)
    with pytest.raises(WrongInput, match="make beam"):
        prepare(made)
