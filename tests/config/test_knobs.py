from __future__ import annotations

import pytest
import yaml

from ingot.base.errors import WrongInput
from ingot.config.knobs import (
    ELSEWHERE,
    all_knobs,
    changed_values,
    find_knob,
    kinds_of,
    nearest_knob,
)
from ingot.config.load import dump_recipe, load_recipe
from ingot.config.recipe import Recipe
from ingot.config.shipped import shipped


def test_every_knob_says_what_it_is() -> None:
    for knob in all_knobs():
        assert len(knob.doc) > 10, knob.path
        assert knob.doc[0] in "`$" or knob.doc[0].isupper(), knob.path
        assert knob.doc.endswith("."), knob.path
        assert knob.type, knob.path
        assert "<" not in knob.default, knob.path


def test_paths_are_unique_and_each_is_found_again() -> None:
    paths = [knob.path for knob in all_knobs()]
    assert len(set(paths)) == len(paths)
    for knob in all_knobs():
        assert knob in find_knob(knob.path)
        assert knob in find_knob(knob.plain)


def test_the_list_has_every_knob_of_a_dumped_recipe() -> None:
    values = yaml.safe_load(
        dump_recipe(Recipe.model_validate({"name": "a", "data": {"train": [{"source": "x"}]}}))
    )
    known = {knob.plain for knob in all_knobs()}

    def names(value: object, path: str) -> set[str]:
        if isinstance(value, list):
            return {name for item in value for name in names(item, path)}
        if isinstance(value, dict):
            return {
                name
                for key, item in value.items()
                for name in {f"{path}{key}", *names(item, f"{path}{key}.")}
            }
        return set()

    assert names(values, "") <= known


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("train.optimizer[adamw].lr", "number", "0.0003"),
        ("train.optimizer[sgd].lr", "number", "0.1"),
        ("train.optimizer[adamw].betas", "[number, number]", "[0.9, 0.95]"),
        ("name", "text", "required"),
        ("train.steps", "integer | null", "null"),
        ("track.tensorboard", "true | false", "true"),
        ("data.train", "list of section", "required"),
        ("data.train[].weight", "number", "1.0"),
        ("data.validation[share].fraction", "number", "required"),
        ("precision.compute", "auto | fp32 | bf16", "auto"),
        ("model.config", "mapping", "{}"),
        ("train.optimizer", "section", "{kind: adamw}"),
        ("evaluate.tasks", "list of section", "[]"),
        ("gate[metric].metric", "text | list of text | null", "null"),
    ],
)
def test_types_and_defaults_read_as_in_a_recipe(path: str, kind: str, default: str) -> None:
    found = {knob.path: knob for knob in all_knobs()}
    if path not in found:
        path = path.replace("[share]", "")
    assert (found[path].type, found[path].default) == (kind, default)


def test_a_knob_of_several_kinds_is_found_in_each() -> None:
    assert {knob.path for knob in find_knob("train.optimizer.lr")} == {
        "train.optimizer[adamw].lr",
        "train.optimizer[sgd].lr",
        "train.optimizer[muon].lr",
    }
    assert kinds_of("train.optimizer.lr") == ["adamw", "sgd", "muon"]
    assert kinds_of("train.optimizer.eps") == ["adamw", "muon"]
    assert kinds_of("train.steps") == []
    assert kinds_of("data.train.weight") == []


@pytest.mark.parametrize(
    ("wrong", "within", "right"),
    [
        ("train.stepz", "train", "train.steps"),
        ("lr", "", "train.optimizer.lr"),
        ("train.lr", "train", "train.optimizer.lr"),
        ("trian", "", "train"),
        ("data.seqlen", "data", "data.seq_len"),
        ("microbatch", "", "evaluate.micro_batch"),
        ("train.warmup", "train", "train.schedule.warmup"),
        ("data.train.wieght", "data.train", "data.train.weight"),
        ("learning_rate", "", "train.optimizer.lr"),
        ("train.num_train_epochs", "train", "train.epochs"),
    ],
)
def test_the_nearest_knob_is_the_one_that_was_meant(wrong: str, within: str, right: str) -> None:
    assert nearest_knob(wrong, within) == right


def test_what_others_call_a_knob_is_no_knob_and_means_one() -> None:
    paths = {knob.plain for knob in all_knobs()}
    last = {path.rsplit(".", 1)[-1] for path in paths}
    assert set(ELSEWHERE.values()) <= paths
    assert not set(ELSEWHERE) & last


def test_an_unknown_knob_to_explain_names_the_nearest() -> None:
    with pytest.raises(
        WrongInput, match=r"no knob is called `train\.stepz`; did you mean `train\.steps`\?"
    ):
        find_knob("train.stepz")


def test_what_is_not_at_its_default_is_the_whole_recipe() -> None:
    """Kinds stay, also where a kind's own values are all at their defaults."""
    for name, each in shipped().items():
        if each.is_place:
            continue
        recipe = load_recipe([each.path], environ={}, dotenv=None)
        changed = changed_values(recipe)
        assert Recipe.model_validate(changed) == recipe, name
        assert len(yaml.safe_dump(changed)) < 0.6 * len(dump_recipe(recipe)), name
    values = {"name": "a", "data": {"train": [{"source": "x"}]}}
    assert changed_values(Recipe.model_validate(values)) == values
    kind = {**values, "objective": {"kind": "sft"}, "model": {"lora": {}}}
    kind["evaluate"] = {"tasks": [{"kind": "loss"}]}
    changed = changed_values(Recipe.model_validate(kind))
    assert changed.pop("evaluate") == kind.pop("evaluate")
    assert changed == {**kind, "model": {"lora": {"kind": "lora"}}}
