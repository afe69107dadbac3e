"""Data sets of tuners: which of their rows are read, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.data import ValidationShare
from tests.adopt.stand_ins import LLAMAFACTORY, recipe_of

AXOLOTL = "base_model: org/ash-1b\nsequence_len: 64\n"


@pytest.mark.parametrize(
    ("data", "sources", "note"),
    [
        ("path: json\n    data_files: data/mine.jsonl", [("data/mine.jsonl", "auto")], ""),
        ("path: csv\n    data_files: [a, b.csv]", [("a", "csv"), ("b.csv", "auto")], ""),
        ("path: json\n    data_files: {train: a.jsonl}", [("a.jsonl", "auto")], ""),
        (
            "path: csv\n    split: 'test[:90%]'\n    data_files: {train: a, test: [b, c.csv]}",
            [("b", "csv"), ("c.csv", "auto")],
            "datasets[].split: test[:90%] of b: a share of 0.9",
        ),
        ("path: ./mine\n    data_files: a.jsonl", [("./mine/a.jsonl", "auto")], ""),
        ("path: mine/rows\n    ds_type: json", [("mine/rows", "jsonl")], ""),
        ("path: org/rows-v1.5\n    name: main", [("hf:org/rows-v1.5:main", "auto")], ""),
        (
            "path: org/rows\n    data_files: [a.jsonl, b.jsonl]",
            [("hf:org/rows", "auto")],
            "datasets[].data_files: all files of org/rows are read, not a.jsonl and b.jsonl alone",
        ),
        (
            "path: a.jsonl\n    name: main",
            [("a.jsonl", "auto")],
            "datasets[].name: of a.jsonl, which are files, is not read",
        ),
        (
            "path: a.jsonl\n    field: body",
            [("a.jsonl", "auto")],
            "datasets[].field: of a.jsonl is not read",
        ),
    ],
)
def test_files_of_axolotl_are_those_that_it_reads(
    tmp_path: Path, data: str, sources: list[tuple[str, str]], note: str
) -> None:
    text = f"{AXOLOTL}datasets:\n  - type: chat_template\n    {data}\n"
    recipe, notes = recipe_of(tmp_path, ash_yaml=text)
    assert [(one.source, one.format) for one in recipe.data.train] == sources
    assert note in notes
    assert bool(note) == ("datasets[]" in notes)


def test_a_file_is_read_whatever_its_split_is_called(tmp_path: Path) -> None:
    item = "  - {path: json, type: chat_template, data_files: {FILES}, split: SPLIT}\n"
    train = item.replace("FILES", "test: [a.jsonl, b.jsonl]").replace("SPLIT", "'test[:90%]'")
    held = item.replace("FILES", "dev: c.jsonl").replace("SPLIT", "dev")
    recipe, _ = recipe_of(tmp_path, ash_yaml=f"{AXOLOTL}datasets:\n{train}test_datasets:\n{held}")
    assert isinstance(recipe.data.validation, list)
    sources = [*recipe.data.train, *recipe.data.validation]
    assert [(one.source, one.fraction) for one in sources] == [
        ("a.jsonl", 0.9),
        ("b.jsonl", 0.9),
        ("c.jsonl", 1.0),
    ]
    assert not any("split" in one.model_fields_set for one in sources)


def test_a_format_of_axolotl_without_files_is_refused(tmp_path: Path) -> None:
    text = f"{AXOLOTL}datasets:\n  - path: json\n    type: chat_template\n"
    for more in ("", "    data_files: {test: a.jsonl}\n"):
        with pytest.raises(WrongInput, match=r"ash\.yaml:4: path json has no data_files; add"):
            recipe_of(tmp_path, ash_yaml=text + more)


@pytest.mark.parametrize("data", ["c4", "{path: c4}", "[{path: c4}]"])
def test_texts_of_axolotl_are_a_path_a_mapping_or_a_list(tmp_path: Path, data: str) -> None:
    recipe, _ = recipe_of(tmp_path, ash_yaml=f"{AXOLOTL}pretraining_dataset: {data}\n")
    assert (recipe.objective.kind, recipe.data.train[0].source) == ("pretrain", "hf:c4")


@pytest.mark.parametrize(
    ("split", "read", "note"),
    [
        ("train", ("train", 1.0), ""),
        ("train[:20%]", ("train", 0.2), "train[:20%] of org/rows: a share of 0.2 of train is read"),
        ("train[:1000]", ("train", 1.0), "train[:1000] of org/rows: all of train is read"),
        ("train[90%:]", ("train", 0.1), "train[90%:] of org/rows: a share of 0.1 of train is read"),
        ("train[-40%:-10%]", ("train", 0.3), "of org/rows: a share of 0.3 of train is read"),
        ("train[50%:10%]", ("train", 1.0), "train[50%:10%] of org/rows: all of train is read"),
        ("train+test", ("train", 1.0), "train+test of org/rows: all of train is read"),
    ],
)
def test_rows_of_a_split_are_told(
    tmp_path: Path, split: str, read: tuple[str, float], note: str
) -> None:
    item = f"  - path: org/rows\n    type: chat_template\n    split: {split}\n"
    axolotl = recipe_of(tmp_path, ash_yaml=f"{AXOLOTL}datasets:\n{item}")
    trl = recipe_of(
        tmp_path,
        fir_yaml="model_name_or_path: org/fir-1b\ndataset_name: org/rows\n"
        f"dataset_train_split: {split}\n",
    )
    for recipe, notes in (axolotl, trl):
        (source,) = recipe.data.train
        assert (source.split, source.fraction) == read
        assert note.replace("org/rows", source.source.removeprefix("hf:")) in notes.replace(
            "hf:", ""
        )
        assert bool(note) == ("split" in notes)


@pytest.mark.parametrize(
    ("train", "held_out", "share"),
    [
        ("train[:95%]", "train[95%:]", 0.05),
        ("train[:95%]", "train[-5%:]", 0.05),
        ("train[10%:]", "train[:10%]", 0.1),
        ("train[:90%]", "train[95%:]", None),
        ("train[:1000]", "train[1000:]", None),
        ("train", "train[:10%]", None),
        ("train[:95%]", "test[95%:]", 0.0),
        ("train", "test", 0.0),
    ],
)
def test_no_row_of_a_split_is_trained_and_held_out_unless_it_is_told(
    tmp_path: Path, train: str, held_out: str, share: float | None
) -> None:
    def item(split: str) -> str:
        return f"  - path: org/rows\n    type: chat_template\n    split: {split}\n"

    axolotl = recipe_of(
        tmp_path,
        ash_yaml=f"{AXOLOTL}datasets:\n{item(train)}test_datasets:\n{item(held_out)}",
    )
    trl = recipe_of(
        tmp_path,
        fir_yaml="model_name_or_path: org/fir-1b\ndataset_name: org/rows\n"
        f"dataset_train_split: '{train}'\ndataset_test_split: '{held_out}'\n",
    )
    for recipe, notes in (axolotl, trl):
        (source,), kept = recipe.data.train, recipe.data.validation
        if share:
            assert isinstance(kept, ValidationShare)
            assert (source.split, source.fraction, kept.fraction) == ("train", 1.0, share)
            assert f"{train} and {held_out} of hf:org/rows: a share of {share} is held" in notes
        else:
            assert isinstance(kept, list)
            assert kept[0].split == held_out.partition("[")[0]
        told = f"{held_out} of hf:org/rows: rows that are trained are held out too" in notes
        assert told == (share is None)


def test_a_share_is_held_out_of_all_data_sets_or_of_none(tmp_path: Path) -> None:
    def items(*splits: tuple[str, str]) -> str:
        return "".join(
            f"  - {{path: org/{name}, type: chat_template, split: '{split}'}}\n"
            for name, split in splits
        )

    given = f"{AXOLOTL}micro_batch_size: 1\nnum_epochs: 1\ndatasets:\n{items(('a', 'train[:90%]'), ('b', 'train[:90%]'))}"
    alike = f"{given}test_datasets:\n{items(('a', 'train[90%:]'), ('b', 'train[90%:]'))}"
    recipe, notes = recipe_of(tmp_path, ash_yaml=alike)
    assert recipe.data.validation == ValidationShare(fraction=0.1)
    assert [one.fraction for one in recipe.data.train] == [1.0, 1.0]
    recipe, notes = recipe_of(
        tmp_path, ash_yaml=f"{given}test_datasets:\n{items(('a', 'train[90%:]'))}"
    )
    assert recipe.data.validation != ValidationShare(fraction=0.1)
    assert "test_datasets[].split: train[90%:] of hf:org/a: rows that are trained" in notes


@pytest.mark.parametrize(
    ("types", "chosen", "template", "says"),
    [
        (["alpaca"], "", "alpaca", ""),
        (["alpaca"], "chatml", "alpaca", "chat_template: chatml does not write rows of alpaca"),
        (["alpaca_chat.load_qa"], "", None, ""),
        (["alpaca_chat.load_qa"], "chatml", "chatml", ""),
        (["alpaca", "chat_template"], "", None, "alpaca stands beside others, and one template"),
        (["alpaca", "chat_template"], "chatml", "chatml", "alpaca stands beside others"),
    ],
)
def test_rows_of_axolotl_are_written_as_there_or_it_is_told(
    tmp_path: Path, types: list[str], chosen: str, template: str | None, says: str
) -> None:
    items = "".join(f"  - path: org/rows\n    type: {each}\n" for each in types)
    recipe, notes = recipe_of(
        tmp_path, ash_yaml=f"{AXOLOTL}chat_template: {chosen}\ndatasets:\n{items}"
    )
    assert recipe.tokenizer.template == template
    assert says in notes
    assert bool(says) == ("rows of alpaca there" in notes or "beside others" in notes)
    about = {"alpaca": "has another first sentence", "alpaca_chat.load_qa": "what it writes around"}
    assert about[types[0]] in notes


@pytest.mark.parametrize(
    ("types", "chosen", "template", "says"),
    [
        (["chatml.intel"], "", "chatml", ""),
        (["llama3.icr"], "", "llama3", ""),
        (["llama3.icr"], "chatml", "llama3", "chat_template: chatml does not write rows of llama3"),
        (["chatml.intel", "chat_template.default"], "", None, "chatml stands beside others"),
        (["chatml.intel", "chat_template.default"], "chatml", "chatml", ""),
        (["chatml.intel", "llama3.intel"], "chatml", "chatml", "chatml stands beside others"),
        (["passthrough.default"], "", None, "passthrough.default of org/rows: say by layout"),
        (["{field_prompt: ask}"], "", None, "a type with fields of its own: what it writes around"),
    ],
)
def test_preferences_of_axolotl_are_written_as_there_or_it_is_told(
    tmp_path: Path, types: list[str], chosen: str, template: str | None, says: str
) -> None:
    items = "".join(f"  - path: org/rows\n    type: {each}\n" for each in types)
    recipe, notes = recipe_of(
        tmp_path, ash_yaml=f"{AXOLOTL}rl: dpo\nchat_template: {chosen}\ndatasets:\n{items}"
    )
    assert recipe.tokenizer.template == template
    assert says in notes
    assert bool(says) == ("datasets[]" in notes or "chat_template:" in notes)


def adopted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], more: str = ""
) -> tuple[Any, str]:
    """The first source of a file whose `dataset_info.json` is given, and the notes."""
    monkeypatch.chdir(folder)
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text(json.dumps({"elms": info, "other": info}))
    text = LLAMAFACTORY.replace("stage: dpo", "stage: sft").replace("template: qwen", more)
    recipe, notes = recipe_of(folder, elm_yaml=text)
    return recipe.data.train[0], notes


@pytest.mark.parametrize(
    ("info", "source", "note"),
    [
        ({"file_name": "a.json"}, "data/a.json", ""),
        (
            {"file_name": "a.json", "hf_hub_url": "org/a", "subset": "b"},
            "hf:org/a:b",
            "file_name: of elms: hf_hub_url comes before it",
        ),
        ({"file_name": "a.json", "num_samples": 9}, "data/a.json", "num_samples: of elms is not"),
        ({"hf_hub_url": "org/a", "folder": "b"}, "hf:org/a", "folder: of elms is not read"),
        ({"hf_hub_url": "org/a", "odd": 1}, "hf:org/a", "odd: of elms is not read"),
        ({"ms_hub_url": "org/a"}, "data/elms.json", "dataset: elms reads ms_hub_url; give its"),
        (
            {"file_name": "a.json", "columns": {"images": "pictures"}},
            "data/a.json",
            "columns.images: of elms is not read",
        ),
        (
            {"file_name": "a.json", "tags": {"user_tag": "me"}},
            "data/a.json",
            "tags.user_tag: of elms is not read",
        ),
        ({"file_name": "a.json", "tags": {"user_tag": "user"}}, "data/a.json", ""),
        (
            {"file_name": "a.json", "formatting": "odd"},
            "data/a.json",
            "formatting: odd of elms is not known",
        ),
        (
            {"file_name": "a.json", "split": "train[:9]"},
            "data/a.json",
            "split: train[:9] of data/a.json",
        ),
    ],
)
def test_what_dataset_info_says_is_read_or_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any],
    source: str,
    note: str,
) -> None:
    first, notes = adopted(tmp_path, monkeypatch, info)
    assert first.source == source
    assert note in notes
    assert bool(note) == ("elms" in notes or "a.json" in notes)
    assert "columns: those that dataset_info.json does not name are left out there" in notes
    assert "cutoff_len: what is asked and the answer are cut in proportion there" in notes


def test_a_template_with_a_system_turn_of_its_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, notes = adopted(tmp_path, monkeypatch, {"file_name": "a.json"}, "template: zephyr")
    assert "template: zephyr begins a chat that has no system turn with 'You are Zephyr" in notes


@pytest.mark.parametrize(
    ("given", "told"), [("val_set_size: 0\n", True), ("val_set_size: 0.1\n", False)]
)
def test_rows_that_are_held_out_here_alone_are_told(tmp_path: Path, given: str, told: bool) -> None:
    text = f"{AXOLOTL}{given}datasets:\n  - path: org/rows\n    type: chat_template\n"
    _, notes = recipe_of(tmp_path, ash_yaml=text)
    assert ("data.validation: a hundredth of the documents is held out" in notes) == told
