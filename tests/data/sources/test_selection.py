"""Which files of a folder are read: those of the split that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
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
    "texts": ["wiki.train.txt", "wiki.test.txt", "README.md"],
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


def test_texts_of_which_one_is_of_no_split_are_all_read_and_it_is_told(tmp_path: Path) -> None:
    source = folder(tmp_path, ["train.py", "test/a.py", "main.py"])
    told: list[str] = []
    assert len(find_source(SourceSettings(source=source), "data.train[0].source", tell=told.append))
    (line,) = told
    assert "all of its 3 files are read, as main.py is named after no split" in line
    assert "(names show test as test/a.py, train as train.py)" in line


@pytest.mark.parametrize("split", ["train", "validation"])
def test_what_is_held_out_is_the_validation_split_unless_another_is_asked_for(
    split: str, tmp_path: Path
) -> None:
    """A run folder writes out every knob, so that `train` is what nobody has set."""
    knob = "data.validation[0].source"
    source = folder(tmp_path / "set", ["train.jsonl", "dev.jsonl", "test.jsonl"])
    assert names(source, split, knob) == ["dev.jsonl"]
    assert names(source, "test", knob) == ["test.jsonl"]
    (tmp_path / "set" / "dev.jsonl").unlink()
    with pytest.raises(WrongInput, match=r"no file of split=validation .*`split` of this source"):
        names(source, split, knob)
    assert names(folder(tmp_path / "one", ["held.jsonl"]), split, knob) == ["held.jsonl"]


def test_what_changed_of_what_is_held_out_is_told_by_its_own_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "set" / "train.jsonl", TEXTS[:8])
    write_jsonl(tmp_path / "set" / "dev.jsonl", TEXTS[8:])
    source = str(tmp_path / "set")
    small = recipe(tmp_path, source, data__validation=[{"source": source}])
    ingest(small)
    assert list(documents(small.folder.raw, "validation").values()) == TEXTS[8:]
    open_raw(small, unchanged=True)
    write_jsonl(tmp_path / "set" / "dev.jsonl", TEXTS[9:])
    with pytest.raises(WrongInput, match=r"data\.validation\[0\] .*dev\.jsonl has .* bytes"):
        open_raw(small, unchanged=True)


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
