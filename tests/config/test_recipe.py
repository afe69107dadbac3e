from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from ingot.config.identity import changes, training_identity
from ingot.config.recipe import Recipe
from ingot.config.sections.measured import is_measured


def recipe(**sections: object) -> Recipe:
    return Recipe.model_validate({"name": "a", "data": {"train": [{"source": "x"}]}, **sections})


def test_a_recipe_knows_its_places() -> None:
    assert recipe().folder.root == Path("runs/a")
    assert recipe(output="/o").folder.model == Path("/o/a/model")
    assert recipe(output="/o").registry_path == Path("/o/registry.sqlite")
    assert recipe(registry={"path": "/r.db", "name": "b"}).registry_path == Path("/r.db")
    assert recipe(registry={"name": "b"}).registry_name == "b"
    assert recipe().registry_name == "a"


def test_a_preset_trains_its_tokenizer_and_a_model_with_weights_brings_its_own() -> None:
    assert recipe().trains_tokenizer
    assert not recipe(model={"source": "hf:a/b"}).trains_tokenizer
    assert recipe(model={"source": "hf:a/b"}, tokenizer={"source": "train"}).trains_tokenizer
    assert not recipe(tokenizer={"source": "some/folder"}).trains_tokenizer


def test_a_recipe_cannot_be_changed_once_it_is_checked() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        recipe().train.steps = 3  # type: ignore[misc]


def test_knobs_are_selected_by_their_paths() -> None:
    chosen = recipe(seed=3).select(("seed", "train.optimizer.lr", "data.train"))
    assert chosen["seed"] == 3
    assert chosen["train.optimizer.lr"] == 3e-4
    assert chosen["data.train"][0]["source"] == "x"


def test_what_decides_the_numbers_is_told_apart_from_what_does_not() -> None:
    base = training_identity(recipe())
    same = recipe(
        train={"micro_batch": 2},
        checkpoint={"every": 3},
        track={"every": 1},
        evaluate={"micro_batch": 1},
    )
    assert changes(base, training_identity(same)) == []
    assert changes(base, training_identity(recipe(train={"optimizer": {"lr": 1e-3}}))) == [
        "train.optimizer.lr 0.0003 -> 0.001"
    ]
    assert changes(base, training_identity(recipe(seed=1))) == ["seed 0 -> 1"]
    plain, dora = (
        training_identity(recipe(model={"lora": lora})) for lora in ({}, {"kind": "dora"})
    )
    assert changes(plain, dora) == ["model.lora.kind lora -> dora"]
    early = {"early_stop": {}, "evaluate_every": 5}
    assert changes(
        training_identity(recipe(train=early)),
        training_identity(recipe(train={**early, "evaluate_every": 6})),
    ) == ["train.evaluate_every 5 -> 6"]


@pytest.mark.parametrize(
    ("train", "same"),
    [
        ({}, True),
        ({"start_from": "r", "reset_optimizer": True}, True),
        ({"start_from": "r"}, False),  # at the step of the other run
    ],
)
def test_a_training_that_begins_at_step_0_anyway_may_say_so(
    train: dict[str, object], same: bool
) -> None:
    plain, said = (
        training_identity(recipe(train={**train, **step})) for step in ({}, {"start_step": 0})
    )
    assert changes(plain, said) == ([] if same else ["train.start_step not set -> 0"])
    assert changes(plain, training_identity(recipe(train={**train, "start_step": 1})))


@pytest.mark.parametrize("way", [[], None, {"fraction": 0}, {"fraction": 0.0}])
def test_all_ways_to_hold_nothing_out_are_one(way: object) -> None:
    data = {"train": [{"source": "x"}], "validation": way}
    found = recipe(data=data)
    assert found.data.validation == []
    assert not found.data.holds_out
    assert Recipe.model_validate(found.model_dump(mode="json")) == found, "as the run folder has it"
    assert (found.tasks, found.sources) == ([], ["x"])
    assert [knob for _, knob in found.missing_held_out("evaluate")] == ["evaluate.tasks"]
    assert found.missing_held_out("train") == found.missing_held_out("prepare") == []
    assert recipe().missing_held_out("evaluate") == []


@pytest.mark.parametrize(
    ("section", "values", "says"),
    [
        (
            "data",
            {
                "train": [{"source": "x"}],
                "validation": [{"source": "y"}, {"source": "z", "weight": 3}],
            },
            r"data\.validation\[1\]\.weight 3 has no effect",
        ),
        (
            "data",
            {"train": [{"source": "a"}, {"source": "wikipedia:simple", "split": "test"}]},
            r"data\.train\[1\]\.split test has no effect on wikipedia:simple",
        ),
        (
            "train",
            {"average": {"kind": "last", "export": False}},
            r"train\.average\.export false leaves kind last without effect",
        ),
        ("train", {"skip": {"rollbacks": 9}}, "rollbacks 9 counts how often a training goes back"),
        (
            "evaluate",
            {"tasks": [{"kind": "rouge", "columns": {"target": "y"}}]},
            "columns names those of source, and there is none",
        ),
        (
            "evaluate",
            {"tasks": [{"kind": "rouge", "split": "test"}]},
            "split=test is one of source, and there is none",
        ),
        (
            "objective",
            {"kind": "grpo", "rewards": [{"kind": "length", "timeout": 3}]},
            "timeout 3 is for rewards that a process or thread of their own computes, and length",
        ),
        (
            "objective",
            {"kind": "grpo", "rewards": [{"kind": "exact", "at_once": 9}]},
            "at_once 9 is for rewards",
        ),
        (
            "objective",
            {"kind": "grpo", "rewards": [{"kind": "exact", "retries": 2}]},
            "retries 2 is for rewards",
        ),
        (
            "objective",
            {"kind": "grpo", "rewards": [{"kind": "length", "least": 6, "most": 5}]},
            "least 6 is more than most 5, so that no answer can have the value 1",
        ),
        (
            "objective",
            {
                "kind": "grpo",
                "rewards": [{"kind": "exact", "weight": 0}, {"kind": "numeric", "weight": 0}],
            },
            "rewards all have weight 0",
        ),
        (
            "objective",
            {"kind": "kto", "desirable_weight": 0, "undesirable_weight": 0},
            "desirable_weight and undesirable_weight are both 0",
        ),
        (
            "objective",
            {"kind": "mlm", "mask_replace_prob": 0, "random_replace_prob": 0},
            "mask_replace_prob and random_replace_prob are both 0",
        ),
    ],
    ids=[
        "weight of what is held out",
        "a split of what has none",
        "an average that nobody gets",
        "how often a training that stops goes back",
        "columns of no source",
        "a split of no source",
        "time of what is at once",
        "how many of what is one by one",
        "another try of what does not fail",
        "a length that none has",
        "rewards that do not count",
        "answers that do not count",
        "tokens that are not hidden",
    ],
)
def test_what_would_have_no_effect_is_refused(
    section: str, values: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        recipe(**{section: values})


def test_what_has_some_effect_is_not_refused() -> None:
    rewards = [
        {"kind": "length", "least": 5, "most": 5},
        {"kind": "exact", "weight": 0},  # which is logged beside the others
        {"kind": "python", "function": "a:b", "retries": 2},
    ]
    assert recipe(objective={"kind": "grpo", "rewards": rewards})
    assert recipe(objective={"kind": "kto", "undesirable_weight": 0})


@pytest.mark.parametrize("span", [(5, 2), (5, 5)])
def test_a_range_to_skip_ends_after_it_begins(span: tuple[int, int]) -> None:
    """Else the order of training refuses it, once `prepare` has tokenised everything."""
    with pytest.raises(ValueError, match=rf"data\.skip\n.*\[5, {span[1]}\]: the first is less"):
        recipe(data={"train": [{"source": "x"}], "skip": [(0, 1), span]})


def test_what_needs_held_out_documents_says_that_there_are_none() -> None:
    data = {"train": [{"source": "x"}], "validation": [], "clean": {"contamination": {}}}
    tasks = [{"kind": "hellaswag"}, {"kind": "rouge"}, {"kind": "loss"}]
    every = {"evaluate_every": 1}

    def missing(verb: str, **sections: object) -> list[str]:
        found = recipe(**{"data": data, "evaluate": {"tasks": tasks}, **sections})
        return [knob for _, knob in found.missing_held_out(verb)]

    assert missing("prepare") == ["data.clean.contamination"]
    assert missing("evaluate") == ["evaluate.tasks.1", "evaluate.tasks.2"]
    assert missing("train", train=every) == ["train.evaluate_every"]
    named = every | {"evaluate_tasks": ["hellaswag", "rouge"]}
    assert missing("train", train=named) == ["evaluate.tasks.1"]
    stopped = missing("train", train=named | {"early_stop": {}}, checkpoint={"best": "loss"})
    assert stopped == ["train.early_stop", "checkpoint.best", "evaluate.tasks.1"]


def test_a_model_is_measured_on_items_of_its_own_without_documents() -> None:
    found = Recipe.model_validate({"name": "a", "evaluate": {"tasks": [{"kind": "hellaswag"}]}})
    assert (found.data.train, found.data.validation) == ([], [])
    assert Recipe.model_validate(found.model_dump(mode="json")) == found
    with pytest.raises(ValidationError, match="data"):
        Recipe.model_validate({"name": "a", "evaluate": {"micro_batch": 2}})
    with pytest.raises(ValidationError, match=r"data\.train has no source"):
        recipe(data={"train": []})


@pytest.mark.parametrize(
    "asked", [{"train": {"sample_every": 2}}, {"evaluate": {"prompts": ["a"]}}]
)
@pytest.mark.parametrize(
    ("objective", "writes"),
    [
        ({"kind": "classify", "labels": ["a", "b"]}, False),
        ({"kind": "mlm"}, False),
        ({"kind": "reward"}, False),
        ({"kind": "span_corruption"}, True),
        ({"kind": "seq2seq"}, True),
        ({"kind": "dpo"}, True),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_only_a_model_that_writes_is_asked_to(
    objective: dict[str, object], writes: bool, asked: dict[str, dict[str, object]]
) -> None:
    """Else its training ends at the first step of `train.sample_every`."""
    if writes:
        assert recipe(objective=objective, **asked)
        return
    (knob,) = (f"{section}.{name}" for section, knobs in asked.items() for name in knobs)
    says = f"{knob} is for models that write, and objective.kind {objective['kind']} trains one"
    with pytest.raises(ValidationError, match=re.escape(says)):
        recipe(objective=objective, **asked)


def test_another_model_that_is_evaluated_may_write() -> None:
    masked, other = {"kind": "mlm"}, {"prompts": ["a"], "model": "other"}
    assert recipe(objective=masked, evaluate=other).evaluate.prompts == ["a"]
    with pytest.raises(ValidationError, match=r"train\.sample_every is for models that write"):
        recipe(objective=masked, evaluate=other, train={"sample_every": 2})


@pytest.mark.parametrize(
    ("objective", "metric", "measured"),
    [
        ("pretrain", "loss/accuracy", False),
        ("pretrain", "loss/perplexity", True),
        ("pretrain", "loss/bits_per_byte/wiki.jsonl", True),
        ("mlm", "loss/bits_per_byte", False),
        ("pretrain", "loss/perplexity/wiki.jsonl", False),
        ("mlm", "loss/perplexity", True),
        ("mlm", "loss/perplexity/wiki.jsonl", False),
        ("dpo", "loss/accuracy/liked.jsonl", True),
        ("dpo", "loss/accuracy", True),
        ("kto", "loss/margin", False),
        ("kto", "loss/accuracy", True),
        ("kto", "loss/accuracy/liked.jsonl", False),
    ],
)
def test_what_is_watched_is_what_the_objectives_documents_give(
    objective: str, metric: str, measured: bool
) -> None:
    """Else the training ends at its first evaluation."""
    for knob, sections in (
        ("train.early_stop.metric", {"train": {"early_stop": {"metric": metric}}}),
        ("checkpoint.best", {"checkpoint": {"best": metric}}),
    ):
        watched = {"evaluate_every": 5, "evaluate_tasks": ["loss"], **sections.get("train", {})}
        given = {**sections, "train": watched, "objective": {"kind": objective}}
        if measured:
            assert recipe(**given)
        else:
            with pytest.raises(ValidationError, match=f"{knob} {metric} is not measured"):
                recipe(**given)


def test_the_names_of_a_tasks_metrics_may_hold_a_slash() -> None:
    rewards = [{"kind": "exact", "name": "a/b"}, {"kind": "numeric"}]
    made = recipe(objective={"kind": "grpo", "rewards": rewards})
    names = ("mean", "a/b", "numeric", "failed")
    assert all(is_measured(f"reward/{name}", made.tasks, made.objective) for name in names)
    assert not is_measured("reward/a", made.tasks, made.objective)
    assert not is_measured("reward/exact", made.tasks, made.objective)
    classes = recipe(objective={"kind": "classify", "labels": ["good/bad", "else"]})
    named = [f"classification/{name}" for name in ("accuracy", "f1", "f1_good/bad", "f1_good")]
    told = [is_measured(name, classes.tasks, classes.objective) for name in named]
    assert told == [True, True, True, False]


def test_rewards_take_no_name_of_the_tasks_metrics_where_each_has_a_metric() -> None:
    """One alone has none; and those of a training that is under way cannot be called otherwise."""
    one = {"kind": "exact", "name": "finished"}
    assert recipe(objective={"kind": "grpo", "rewards": [one]}).tasks
    with pytest.raises(ValidationError, match="or give the task `rewards` of its own, so named"):
        recipe(objective={"kind": "grpo", "rewards": [one, {"kind": "numeric"}]})


@pytest.mark.parametrize(
    ("old", "new"), [("1", 1), (None, "None"), (["a, b"], ["a", "b"]), (0.1, 0.1 + 1e-16)]
)
def test_a_change_shows_what_changed(old: object, new: object) -> None:
    (told,) = changes({"x": old}, {"x": new})
    left, right = told.removeprefix("x ").split(" -> ")
    assert left != right


def test_a_change_is_told_as_a_recipe_has_it() -> None:
    one, other = ({"source": path, "text": "text", "fraction": 1.0} for path in ("a", "b"))
    assert changes({"data.train": {"0": one}}, {"data.train": {"0": one, "1": other}}) == [
        "data.train.1 b added"
    ]
    assert changes({"data.validation": {"0": one}}, {}) == ["data.validation.0 a removed"]
    assert changes({}, {"data.validation": {"0": one}}) == ["data.validation.0 a added"]
    weights = ({"data.train.weight": [1.0]}, {"data.train.weight": [1.0, 1.0]})
    assert changes(*weights) == ["data.train 1 -> 2 sources"]
    assert changes({"data.train.weight": [1.0, 1.0]}, {"data.train.weight": [1.0, 2.0]}) == [
        "data.train.weight [1.0, 1.0] -> [1.0, 2.0]"
    ]
    assert changes({"data": "0e", "x": ["a", True], "y": None}, {"data": "1f", "y": {"k": 1}}) == [
        "the prepared data 0e -> 1f",
        "x [a, true] -> not set",
        "y not set -> {k: 1}",
    ]
    assert changes({"x": None}, {"x": {}}) == ["x not set -> {}"]


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, "The"),
        ({"evaluate": {"prompts": ["class Stack:", "def "]}}, "class Stack:"),
        ({"evaluate": {"prompts": ["x"]}, "serve": {"prompt": ""}}, ""),
        ({"objective": {"kind": "sft"}}, "What can you do?"),
        ({"objective": {"kind": "dpo"}}, "What can you do?"),
        (
            {"objective": {"kind": "seq2seq"}},
            "The council met on Monday and decided to repair the old bridge.",
        ),
    ],
)
def test_what_a_served_model_is_asked_suits_it(more: dict[str, object], asked: str) -> None:
    """It was `def ` for every model, a chat model and a summariser too."""
    assert recipe(**more).first_prompt == asked
