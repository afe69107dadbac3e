"""Continued pretraining of real weights on real text starts at the loss that transformers computes
on the same tokens.
"""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import open_rows
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.native.head import IGNORE
from ingot.train.trainer import train
from tests import tolerances
from tests.small import small_recipe

pytestmark = [pytest.mark.xdist_group("smollm2"), pytest.mark.timeout(900)]


def first_batch(recipe: Recipe) -> Batch:
    """The rows of the first step, all in one batch."""
    rows = open_rows(recipe.folder.columns, "train", recipe.data.seq_len, pad_last=False)
    order = SampleOrder(rows.sizes, recipe.seed, rows.weights)
    size = recipe.train.global_batch
    return next(fixed_batches(rows, order.rows(0, size).tolist(), size))


def reference_loss(model: torch.nn.Module, batch: Batch) -> float:
    """Each document of each row by itself through transformers; mean over all targets."""
    total, count = 0.0, 0
    for row in range(batch.tokens.shape[0]):
        for segment in batch.segments[row].unique():
            here = batch.segments[row] == segment
            labels = batch.labels[row, here]
            with torch.no_grad():
                logits = model(batch.tokens[row, here][None]).logits[0].double()
            target = labels != IGNORE
            total -= float(logits.log_softmax(-1)[target].gather(1, labels[target][:, None]).sum())
            count += int(target.sum())
    return total / count


@pytest.mark.slow
def test_the_first_loss_is_that_of_transformers(
    smollm2: Path, test_data: Path, tmp_path: Path
) -> None:
    with gzip.open(test_data / "debian_docs/en_prog.jsonl.gz", "rb") as lines:
        (tmp_path / "docs.jsonl").write_bytes(b"".join(itertools.islice(lines, 40)))
    recipe = small_recipe(
        tmp_path,
        data__train=[{"source": str(tmp_path / "docs.jsonl")}],
        data__seq_len=128,
        model__source=str(smollm2),
        model__config=None,
        tokenizer__source=None,
        tokenizer__vocab_size=None,
        train__steps=2,
        train__optimizer__lr=1e-5,
    )
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    losses = [line["train/loss"] for line in read_lines(recipe.folder.metrics)]
    assert losses[0] == pytest.approx(
        reference_loss(model, first_batch(recipe)), rel=tolerances.REAL_LOSS
    )
    assert losses[1] != losses[0]
