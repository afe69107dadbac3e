"""Which files of a folder are read: those of the split that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.ingest import ingest
from ingot.data.sources.find import find_source
from ingot.data.sources.records import read_records, whole_records
from tests.data.small import recipe, sentences, write_jsonl
from tests.data.test_ingest import documents

TEXTS = sentences(12)
LAYOUTS = {
    "shards": ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"],
    "files": ["train.jsonl", "test.jsonl", "README.md"],
    "words": ["my_training.0.csv", "eval-2.csv"],
    "folders": ["train/test_1.json", "test/a.json"],
    "texts": ["wiki.train.txt", "wiki.test.txt"],
}
TASK = "evaluate.tasks, mine.source"


def folder(root: Path, files: list[str]) -> str:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return str(root)


def names(source: str, split: str, knob: str = "data.train[0].source") -> list[str]:
    return [file.name for file in find_source(SourceSettings(source=source, split=split), knob)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_of_a_split_are_those_named_after_it(layout: str, tmp_path: Path) -> None:
    train, test, *_ = files = LAYOUTS[layout]
    source = folder(tmp_path, files)
    assert names(source, "train") == [train]
    assert names(source, "test") == [test]
    with pytest.raises(
        WrongInput,
        match=r"split=dev, and no file is named after it, as dev\.jsonl or dev/ .*show test, train",
    ):
        names(source, "dev")


@pytest.mark.parametrize("word", ["validation", "valid", "val", "dev"])
def test_a_split_has_the_words_that_it_has_on_the_hub(word: str, tmp_path: Path) -> None:
    source = folder(tmp_path, [f"{word}.jsonl", "train.jsonl"])
    assert names(source, "validation") == names(source, "dev") == [f"{word}.jsonl"]


@pytest.mark.parametrize(
    "files",
    [
        ["a.jsonl"],
        ["test.jsonl"],
        ["train.jsonl", "more.jsonl"],
        ["train_test.jsonl", "latest.jsonl", "trainer.csv"],
        ["train.py", "tests/test_train.py", "main.py"],
        ["data-00000-of-00002.jsonl", "data-00001-of-00002.jsonl"],
    ],
)
def test_names_that_tell_no_splits_apart_are_all_read(files: list[str], tmp_path: Path) -> None:
    assert len(names(folder(tmp_path, files), "train")) == len(files)
    assert len(names(folder(tmp_path, files), "validation", TASK)) == len(files)


def test_a_split_with_a_name_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["data/train_a-00000-of-00001.jsonl", "data/test_a-00000-of-00001.jsonl"]
    source = folder(tmp_path, files)
    assert names(source, "train_a") == files[:1]
    assert len(names(source, "train")) == 2, "which is neither of them"
    told: list[str] = []
    find_source(SourceSettings(source=source), "data.train[0].source", tell=told.append)
    assert len(told) == 1
    assert "all of its files are read (names show test_a, train_a); set `split`" in told[0]


def test_what_is_held_out_of_a_folder_is_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(tmp_path / "set" / "train.jsonl", TEXTS[:8])
    write_jsonl(tmp_path / "set" / "test.jsonl", TEXTS[8:])
    source = str(tmp_path / "set")
    small = recipe(tmp_path, source, data__validation=[{"source": source, "split": "test"}])
    ingest(small)
    assert list(documents(small.folder.raw).values()) == TEXTS[:8]
    assert list(documents(small.folder.raw, "validation").values()) == TEXTS[8:]
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "named after" in line]
    assert "1 of its 2 files are named after split=train and are read, the others are not" in told


def test_items_of_a_task_are_those_of_its_split(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    source = str(tmp_path)
    (item,) = read_records(source, TASK, ["text"])
    assert item.text("text") == "validation"
    assert len(list(whole_records(source, "data.clean.contamination.against"))) == 2
    (tmp_path / "validation.jsonl").rename(tmp_path / "test.jsonl")
    with pytest.raises(WrongInput, match=r"no file of split=validation \(names show test, train\)"):
        read_records(source, TASK, ["text"])


def test_a_split_of_a_single_file_is_refused_unless_it_is_named_so(tmp_path: Path) -> None:
    folder(tmp_path, ["pairs.jsonl", "test.jsonl"])
    assert names(str(tmp_path / "test.jsonl"), "test") == ["test.jsonl"]
    with pytest.raises(WrongInput, match="split=nonsense, and no file is named after it"):
        names(str(tmp_path / "pairs.jsonl"), "nonsense")
