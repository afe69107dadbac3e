"""What a model writes against transformers' own greedy and beam search; scores against rouge-score
called directly.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import RougeTask
from ingot.config.sections.reward_task import RewardTask
from ingot.data.cleaning.documents import read_documents
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.subject import EvalModelInfo, TaskResult
from ingot.evaluate.tasks import check, measure
from ingot.evaluate.tasks.reward import open_reward
from ingot.evaluate.tasks.rouge import first_line, open_rouge, scorer
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.chats.chat import tool
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.small_models import subject_in, with_model, write_lines
from tests.evaluate.small_runs import prepared, recipe_of, records
from tests.ranks import run_ranks

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recipe]:
    found: dict[str, Recipe] = {}

    def of(documents: str) -> Recipe:
        if documents not in found:
            found[documents] = prepared(tmp_path_factory.mktemp(documents), documents)
        return found[documents]

    return of


def measured(recipe: Recipe, **knobs: Any) -> TaskResult:
    with running_mesh() as mesh:
        return measure(
            RougeTask(kind="rouge", **{"max_tokens": 8, **knobs}),
            subject_in(recipe.folder.model, recipe, mesh),
        )


def assert_scores(found: TaskResult, *, stemmer: bool = True) -> None:
    """Each example's scores are the package's own, and the metrics are their means."""

    from rouge_score.rouge_scorer import RougeScorer

    package = RougeScorer(list(NAMES), use_stemmer=stemmer)
    for example in found.examples:
        theirs = package.score(example["reference"], example["prediction"])
        assert {name: example[name] for name in NAMES} == {
            name: theirs[name].fmeasure for name in NAMES
        }
    for name in NAMES:
        metric = found.metrics[f"rouge/{name}"]
        assert metric.value == pytest.approx(
            sum(example[name] for example in found.examples) / len(found.examples),
            rel=tolerances.EXACT,
        )
        assert (metric.direction, metric.n) == ("higher", len(found.examples))


@pytest.mark.drawn
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_pairs_as_transformers_writes_them(beams: int, made: Callable[[str], Recipe]) -> None:
    from transformers import AutoModelForSeq2SeqLM

    recipe = made("pair")
    tokenizer, reference = (
        load_tokenizer(recipe.folder.model),
        AutoModelForSeq2SeqLM.from_pretrained(recipe.folder.model),
    )
    found = measured(recipe, beams=beams)
    pairs = [json.loads(document.text) for document in read_documents(recipe, "validation")]
    assert [(example["source"], example["reference"]) for example in found.examples] == [
        (pair["source"], pair["target"]) for pair in pairs
    ]
    for example in found.examples:
        ids = tokenizer.encode_framed("short: " + example["source"])[-48:]
        assert len(ids) < 48, "nothing is cut in this test"
        written = reference.generate(
            torch.tensor([ids]), max_new_tokens=8, num_beams=beams, do_sample=False
        )
        assert example["prediction"] == tokenizer.decode(written[0].numpy())
    assert len({example["prediction"] for example in found.examples}) > 1
    assert_scores(found)


@torch.no_grad()
def test_chats_are_answered_after_their_template(made: Callable[[str], Recipe]) -> None:
    from transformers import AutoModelForCausalLM

    recipe = made("chat")
    tokenizer, reference = (
        load_tokenizer(recipe.folder.model),
        AutoModelForCausalLM.from_pretrained(recipe.folder.model),
    )
    found = measured(recipe, limit=5)
    chats = [
        json.loads(document.text)["messages"] for document in read_documents(recipe, "validation")
    ][:5]
    for example, messages in zip(found.examples, chats, strict=True):
        assert (example["source"], example["reference"]) == (
            messages[-2]["content"],
            messages[-1]["content"],
        )
        ids = torch.tensor([tokenizer.encode_chat(messages[:-1])])
        written = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
        # A character whose last bytes were not written any more is none.
        assert example["prediction"] == tokenizer.decode(written[0, ids.shape[1] :].numpy()).rstrip(
            "\ufffd"
        )
    assert_scores(found)


def test_chats_are_asked_with_their_tools(tmp_path: Path) -> None:
    """As a server asks, or answers would be measured on other prompts than it gets."""
    functions = [tool({"name": "ingot"})]
    write_lines(tmp_path / "chat.jsonl", [{**one, "tools": functions} for one in records("chat")])
    recipe = recipe_of(tmp_path, "chat", tokenizer__template="hermes", data__seq_len=256)
    ingest(recipe)
    prepare(recipe)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    info = EvalModelInfo(recipe, "decoder", tokenizer, 512, "it")
    reward = RewardTask.model_validate({"kind": "reward", "rewards": [{"kind": "exact"}]})
    opened = open_rouge(RougeTask(kind="rouge"), info, 2), open_reward(reward, info, 2)
    asked = [[item.prompt for item in one.items] for one in opened]
    chats = itertools.islice(read_documents(recipe, "validation"), 2)
    served = [
        tokenizer.encode_chat(json.loads(document.text)["messages"][:-1], functions)
        for document in chats
    ]
    assert asked == [served, served]


def test_no_answer_is_compared_with_one_that_is_not_to_be_learned(tmp_path: Path) -> None:
    wrong = [
        {"role": "user", "content": "so?"},
        {"role": "assistant", "content": "no", "weight": 0},
    ]
    chats = [{"messages": [*one["messages"], *wrong]} for one in records("chat")]
    write_lines(tmp_path / "chat.jsonl", chats)
    recipe = recipe_of(tmp_path, "chat", data__seq_len=256)
    ingest(recipe)
    prepare(recipe)
    info = EvalModelInfo(recipe, "decoder", load_tokenizer(recipe.folder.tokenizer), 512, "it")
    reward = RewardTask.model_validate({"kind": "reward", "rewards": [{"kind": "exact"}]})
    documents = itertools.islice(read_documents(recipe, "validation"), 2)
    answers = [json.loads(document.text)["messages"][-3]["content"] for document in documents]
    assert [item.reference for item in open_reward(reward, info, 2).items] == answers
    with pytest.raises(WrongInput, match="does not end with an answer to something that is"):
        open_rouge(RougeTask(kind="rouge"), info, 2)


@pytest.mark.drawn
@pytest.mark.parametrize("documents", ["pair", "chat"])
def test_two_ranks_write_what_one_does(documents: str, made: Callable[[str], Recipe]) -> None:
    recipe = made(documents)
    alone = measured(recipe)
    assert run_ranks(2, measured, recipe) == [alone, alone]
    assert (
        measured(
            recipe_of(recipe.folder.root.parent.parent, documents, evaluate__micro_batch=1)
        ).examples
        == alone.examples
    )


def test_records_of_its_own_and_words_that_are_not_stemmed(root: Path, tmp_path: Path) -> None:
    recipe = with_model(root)
    lines = [
        {"body": "\n copper melts\nthe ingot", "subject": "copper melting"},
        {"body": "a b", "subject": "c"},
    ]
    source = write_lines(tmp_path / "mails.jsonl", lines)
    knobs = {"source": str(source), "columns": {"source": "body", "target": "subject"}}
    stemmed, plain = measured(recipe, **knobs), measured(recipe, **knobs, stemmer=False)
    assert [example["id"] for example in stemmed.examples] == ["mails.jsonl:1", "mails.jsonl:2"]
    assert stemmed.baselines["rouge/rouge1/first_line"] == pytest.approx(1 / 2)
    assert plain.baselines["rouge/rouge1/first_line"] == pytest.approx(1 / 4)
    assert_scores(plain, stemmer=False)
    assert (
        stemmed.metrics["rouge/rouge1"].set_fingerprint
        != plain.metrics["rouge/rouge1"].set_fingerprint
    )


def test_the_first_line_is_the_first_that_says_something() -> None:
    assert first_line("\n  \n  copper \nmelts") == "copper"
    assert first_line(" \n") == ""


def test_sentences_of_lsum_are_lines() -> None:
    """The same words in other lines: the longest common subsequence of the whole text suffers, that
    of the sentences does not.
    """
    found = scorer(stemmer=True)("copper melts\nmould cools", "mould cools\ncopper melts")
    assert found["rougeLsum"] == 1.0
    assert found["rougeL"] == 0.5


def test_without_the_package_the_way_to_get_it_is_told(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    recipe = with_model(root)
    source = write_lines(tmp_path / "pairs.jsonl", [{"source": "a", "target": "b"}])
    with running_mesh() as mesh, pytest.raises(WrongInput, match=r"pip install 'ingot\[rouge\]'"):
        check(
            RougeTask(kind="rouge", source=str(source)),
            subject_in(recipe.folder.model, recipe, mesh),
        )


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({}, "text documents have no text to write"),
        ({"beams": 2}, "beams 2 is for a seq2seq"),
        ({"max_tokens": 200}, "exceeds the 128 positions"),
        ({"columns": {"body": "x"}}, "columns renames body"),
    ],
)
def test_what_cannot_be_written_is_refused(
    root: Path, tmp_path: Path, knobs: dict[str, Any], words: str
) -> None:
    recipe = with_model(root)
    source = (
        {"source": str(write_lines(tmp_path / "pairs.jsonl", [{"source": "a", "target": "b"}]))}
        if knobs
        else {}
    )
    with running_mesh() as mesh, pytest.raises(WrongInput, match=words):
        check(
            RougeTask(kind="rouge", **source, **knobs),
            subject_in(recipe.folder.model, recipe, mesh),
        )


@pytest.mark.parametrize("documents", ["pair", "chat"])
def test_numbers_that_are_not_finite_are_no_text(
    documents: str, made: Callable[[str], Recipe]
) -> None:
    recipe = made(documents)
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        next(subject.model.parameters()).data.fill_(float("nan"))
        with pytest.raises(Failed, match="not finite"):
            measure(RougeTask(kind="rouge", max_tokens=4), subject)
