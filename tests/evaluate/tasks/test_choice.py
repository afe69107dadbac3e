"""Multiple choice against lm-evaluation-harness on the same items, and what of a record is
refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import ChoiceTask, HellaSwagTask
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import check, measure
from ingot.evaluate.tasks.choice import ChoiceItem, OpenChoiceTask, open_choice, score_item
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.lm_eval_harness import evaluated, likelihoods, local_hellaswag
from tests.evaluate.small_models import hellaswag_lines, subject_in, with_model, write_lines
from tests.models.tiny import make_reference
from tests.ranks import run_ranks
from tests.small import small_recipe

QUESTIONS: list[dict[str, Any]] = [
    {"question": "the copper", "choices": ["melts slowly", "rings", "für"], "answer": 1},
    {"question": "a bright mould ", "choices": ["cools", "rings true and true"], "answer": "B"},
    {"question": "ingot", "choices": ["melts", "金 🔥"], "answer": "melts"},
]


def assert_as_theirs(measured: TaskResult, results: dict[str, Any], name: str) -> None:
    """Item by item: log-likelihoods, and which choice is right; then the two figures."""
    theirs = likelihoods(results, name)
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    assert len(measured.examples) == len(theirs)
    for example, sums, sample in zip(measured.examples, theirs, samples, strict=True):
        assert example["log_likelihoods"] == pytest.approx(
            sums, rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32
        )
        assert (example["correct"], example["correct_norm"]) == (
            bool(sample["acc"]),
            bool(sample["acc_norm"]),
        )
    figures = results["results"][name]
    assert measured.metrics["hellaswag/accuracy"].value == pytest.approx(
        figures["acc,none"], rel=tolerances.EXACT
    )
    assert measured.metrics["hellaswag/accuracy_norm"].value == pytest.approx(
        figures["acc_norm,none"], rel=tolerances.EXACT
    )


def hellaswag(model: Path, items: Path, recipe: Recipe, **knobs: Any) -> TaskResult:
    with running_mesh() as mesh:
        return measure(
            HellaSwagTask(kind="hellaswag", source=str(items), **knobs),
            subject_in(model, recipe, mesh),
        )


@pytest.mark.drawn
@pytest.mark.parametrize("bos", [False, True])
def test_hellaswag_is_the_harness_own(
    bos: bool, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On items of our own with all its marks; with a tokenizer that puts BOS before a text and one
    that does not.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    recipe = with_model(root)
    folder = recipe.folder.model
    if not bos:
        about = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(
            json.dumps({**about, "post_processor": None}), encoding="utf-8"
        )
    assert load_tokenizer(folder).adds_bos == bos
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(24))
    ours = hellaswag(folder, items, recipe)
    results = evaluated(folder, local_hellaswag(tmp_path / "tasks", items), "local_hellaswag")
    assert_as_theirs(ours, results, "local_hellaswag")
    assert 0 < ours.metrics["hellaswag/accuracy"].value < 1
    assert [example["chosen"] for example in ours.examples] != [
        example["chosen_norm"] for example in ours.examples
    ]


@pytest.mark.drawn("HellaSwag")
def test_hellaswag_on_its_own_items(
    test_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ten of the validation split, with GPT-2's tokenizer and random weights."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, items = tmp_path / "model", tmp_path / "items.jsonl"
    make_reference(
        folder, vocab_size=50257, max_position_embeddings=256, hidden_size=32, intermediate_size=48
    )
    for file in (test_data / "tokenizers/hf_gpt2").iterdir():
        shutil.copy(file, folder / file.name)
    with (test_data / "hellaswag/hellaswag_val.jsonl").open(encoding="utf-8") as lines:
        items.write_text(
            "".join(line for line, _ in zip(lines, range(10), strict=False)), encoding="utf-8"
        )
    results = evaluated(folder, local_hellaswag(tmp_path / "tasks", items), "local_hellaswag")
    assert_as_theirs(hellaswag(folder, items, small_recipe(tmp_path)), results, "local_hellaswag")


@pytest.mark.slow
def test_hellaswag_of_a_trained_model(
    smollm2: Path, test_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fifty items under SmolLM2."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    items = tmp_path / "items.jsonl"
    with (test_data / "hellaswag/hellaswag_val.jsonl").open(encoding="utf-8") as lines:
        items.write_text(
            "".join(line for line, _ in zip(lines, range(50), strict=False)), encoding="utf-8"
        )
    results = evaluated(smollm2, local_hellaswag(tmp_path / "tasks", items), "local_hellaswag")
    assert_as_theirs(hellaswag(smollm2, items, small_recipe(tmp_path)), results, "local_hellaswag")


def rank_hellaswag(model: Path, items: Path, recipe: Recipe) -> TaskResult:
    return hellaswag(model, items, recipe)


def test_every_split_of_the_work_gives_the_same_to_the_last_bit(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(7))
    alone = hellaswag(recipe.folder.model, items, recipe)
    assert run_ranks(2, rank_hellaswag, recipe.folder.model, items, recipe) == [alone, alone]
    for micro_batch in (1, 5):
        other = hellaswag(
            recipe.folder.model, items, with_model(root, evaluate__micro_batch=micro_batch)
        )
        for one, two in zip(alone.examples, other.examples, strict=True):
            assert two["log_likelihoods"] == pytest.approx(
                one["log_likelihoods"], rel=tolerances.NLL_FP32
            )


def test_limit_takes_the_first_and_is_another_set(root: Path, tmp_path: Path) -> None:
    """So are items of which an answer was mended."""
    recipe, (first, *rest) = with_model(root), hellaswag_lines(9)
    items = write_lines(tmp_path / "items.jsonl", [first, *rest])
    all_of_them, some = (
        hellaswag(recipe.folder.model, items, recipe),
        hellaswag(recipe.folder.model, items, recipe, limit=4),
    )
    other = {**first, "label": (int(first["label"]) + 1) % len(first["endings"])}
    again = write_lines(tmp_path / "again.jsonl", [other, *rest])
    mended = hellaswag(recipe.folder.model, again, recipe)
    assert [example["context"] for example in some.examples] == [
        example["context"] for example in all_of_them.examples[:4]
    ]
    prints = {
        measured.metrics["hellaswag/accuracy"].set_fingerprint
        for measured in (all_of_them, some, mended)
    }
    assert len(prints) == 3
    assert some.metrics["hellaswag/accuracy"].n == 4


def choices(
    recipe: Recipe, records: list[dict[str, Any]], path: Path, **knobs: Any
) -> OpenChoiceTask:
    source = path if path.exists() else write_lines(path, records)
    with running_mesh() as mesh:
        return open_choice(
            ChoiceTask(kind="choice", source=str(source), **knobs),
            subject_in(recipe.folder.model, recipe, mesh).info,
        )


def test_an_answer_is_a_number_a_letter_or_a_text(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    assert [item.answer for item in choices(recipe, QUESTIONS, tmp_path / "a.jsonl").items] == [
        1,
        1,
        0,
    ]
    odd = [
        {"question": "x", "choices": ["B", "A"], "answer": "A"},
        {"question": "x", "choices": ["1", "0"], "answer": "1"},
        {"question": "x", "choices": ["u", "v"], "answer": "1"},
        {"question": "x", "choices": ["u", "v"], "answer": "b"},
    ]
    assert [item.answer for item in choices(recipe, odd, tmp_path / "b.jsonl").items] == [
        1,
        0,
        1,
        1,
    ]


def test_a_table_of_texts_and_other_names(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    path = tmp_path / "items.csv"
    path.write_text('q,options,answer\nthe copper,"[""melts"", ""rings""]",1\n', encoding="utf-8")
    found = choices(recipe, [], path, columns={"question": "q", "choices": "options"})
    assert found.items == [ChoiceItem("items.csv:2", "the copper", ["melts", "rings"], 1)]


def test_measured_over_all_choices(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    source = write_lines(tmp_path / "items.jsonl", QUESTIONS)
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        measured = measure(ChoiceTask(kind="choice", name="mine", source=str(source)), subject)
    assert set(measured.metrics) == {"mine/accuracy", "mine/accuracy_norm"}
    assert {f"mine/{name}" for name in ChoiceTask.metric_names} == set(measured.metrics)
    assert [len(example["log_likelihoods"]) for example in measured.examples] == [3, 2, 2]
    share = np.mean([example["correct"] for example in measured.examples])
    assert measured.metrics["mine/accuracy"].value == pytest.approx(share)
    assert (measured.metrics["mine/accuracy"].direction, measured.metrics["mine/accuracy"].n) == (
        "higher",
        3,
    )


def test_the_first_of_equals_is_chosen_and_length_counts_in_characters() -> None:
    item = ChoiceItem("x:1", "c", ["aaaa", "äö", "aaaa"], 2)
    assert score_item(item, [-4.0, -4.0, -4.0])["chosen"] == 0
    assert score_item(item, [-4.0, -4.0, -4.0])["chosen_norm"] == 0
    assert score_item(item, [-5.0, -2.6, -4.9]) | {
        "chosen": 1,
        "chosen_norm": 2,
        "correct": False,
        "correct_norm": True,
    } == score_item(item, [-5.0, -2.6, -4.9])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answer": "C"}, "`answer` 'C' is none of its 2 choices"),
        ({"answer": 2}, "`answer` 2 is none"),
        ({"answer": True}, "`answer` True is none"),
        ({"choices": ["one"]}, "two or more texts"),
        ({"choices": ["a", ""]}, "none empty"),
        ({"choices": "a, b"}, "write it as JSON"),
        ({"question": " "}, "`question` is empty"),
        ({"question": 3}, "`question` is int, not text"),
        ({"question": "ingot " * 200}, "128 positions"),
    ],
)
def test_an_item_that_cannot_be_scored_is_named(
    root: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    record = {"question": "x", "choices": ["a", "b"], "answer": 0, **change}
    with pytest.raises(WrongInput) as error:
        choices(with_model(root), [QUESTIONS[0], record], tmp_path / "items.jsonl")
    assert "items.jsonl:2" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": ""}, "the test split has none"),
        ({"label": "4"}, "not one of 4 endings"),
        ({"endings": ["a", "[step]", "b", "c"]}, "empty ending"),
        ({"endings": "a"}, "must be a list of texts"),
        ({"ctx_a": "ingot " * 200}, "128 positions"),
    ],
)
def test_a_hellaswag_item_that_cannot_be_scored_is_named(
    root: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    recipe = with_model(root)
    items = write_lines(tmp_path / "items.jsonl", [{**hellaswag_lines(1)[0], **change}])
    with running_mesh() as mesh, pytest.raises(WrongInput, match=words) as error:
        check(
            HellaSwagTask(kind="hellaswag", source=str(items)),
            subject_in(recipe.folder.model, recipe, mesh),
        )
    assert "items.jsonl:1" in str(error.value)


def test_numbers_that_are_not_finite_are_no_accuracy(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    items = write_lines(tmp_path / "items.jsonl", hellaswag_lines(2))
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        subject.decoder.model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(Failed, match="not finite"):
            measure(HellaSwagTask(kind="hellaswag", source=str(items)), subject)
