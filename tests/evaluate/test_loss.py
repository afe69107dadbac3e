"""The loss against transformers' own on the same rows, and the same for every split of the work."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ingot.config.recipe import Recipe
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.columns.column import Column
from ingot.data.columns.manifest import read_prepared
from ingot.evaluate.corpus import document_bytes, open_columns, pairs
from ingot.evaluate.loss import SegmentLosses, gather_segments, row_losses, score_rows
from ingot.models.hf.folder import load_model
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.small_models import with_model
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def validation(recipe: Recipe) -> Rows:
    return open_rows(recipe.folder.columns, "validation", recipe.data.seq_len, pad_last=True)


def held_out(recipe: Recipe) -> list[Column]:
    return open_columns(recipe.folder.columns, read_prepared(recipe.folder.columns), "validation")


def test_equals_the_loss_of_transformers_on_each_document_alone(root: Path) -> None:
    from transformers import AutoModelForCausalLM

    recipe = with_model(root)
    rows = validation(recipe)
    reference = AutoModelForCausalLM.from_pretrained(recipe.folder.model)
    nll, targets = [], []
    for index in range(len(rows)):
        row = rows.row(index)
        for segment in range(1, row.segments.max() + 1):
            tokens, labels = (
                torch.from_numpy(field[row.segments == segment])[None]
                for field in (row.tokens, row.labels)
            )
            with torch.no_grad():
                logits = reference(tokens).logits.double()
            nll.append(
                float(torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"))
            )
            targets.append(int((labels != -100).sum()))
    ours = row_losses(
        load_model(recipe.folder.model, device=CPU), fixed_batches(rows, range(len(rows)), 5)
    )
    assert ours.targets.tolist() == targets
    assert ours.nll == pytest.approx(
        np.array(nll), rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32
    )


def test_equals_the_mean_that_transformers_reports_for_a_plain_batch(root: Path) -> None:
    """Rows of one document each: transformers' own `loss` of a batch."""

    from transformers import AutoModelForCausalLM

    recipe = with_model(root)
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, 300, (3, 21), generator=generator)
    shape = stream[:, 1:].shape
    batch = Batch(
        stream[:, :-1],
        stream[:, 1:],
        torch.arange(20).expand(shape),
        torch.ones(shape, dtype=torch.int64),
    )
    reference = AutoModelForCausalLM.from_pretrained(recipe.folder.model)
    with torch.no_grad():
        expected = float(reference(input_ids=stream, labels=stream).loss)
    ours = row_losses(load_model(recipe.folder.model, device=CPU), [batch])
    assert ours.targets.tolist() == [20, 20, 20]
    assert ours.nll.sum() / ours.targets.sum() == pytest.approx(expected, rel=tolerances.LOSS_FP32)


def test_every_token_but_the_first_of_a_document_is_a_target_once(root: Path) -> None:
    recipe = with_model(root)
    rows, columns = validation(recipe), held_out(recipe)
    lengths = [len(column[record]) for column in columns for record in range(len(column))]
    ours = row_losses(
        load_model(recipe.folder.model, device=CPU), fixed_batches(rows, range(len(rows)), 4)
    )
    assert np.bincount(ours.documents, ours.tokens).tolist() == lengths
    assert np.bincount(ours.documents, ours.targets).tolist() == [length - 1 for length in lengths]


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_the_split_into_batches_does_not_show(micro_batch: int, root: Path) -> None:
    recipe = with_model(root)
    rows, model = validation(recipe), load_model(recipe.folder.model, device=CPU)
    whole = row_losses(model, fixed_batches(rows, range(len(rows)), len(rows)))
    parts = row_losses(model, fixed_batches(rows, range(len(rows)), micro_batch))
    assert_same(parts, whole)
    assert model.training is False


def assert_same(one: SegmentLosses, other: SegmentLosses) -> None:
    assert one.nll == pytest.approx(other.nll, rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32)
    for name in ("targets", "tokens", "ends_document"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


def score_all(recipe: Recipe, count: int) -> SegmentLosses:
    with running_mesh() as mesh:
        rows, model = validation(recipe), load_model(recipe.folder.model, device=mesh.device)
        return gather_segments(score_rows(model, rows, count, 2, "fp32", mesh), mesh)


@pytest.mark.parametrize("count", [1, 7])
def test_ranks_see_together_what_one_process_sees(count: int, root: Path) -> None:
    recipe = with_model(root)
    alone = score_all(recipe, count)
    for together in run_ranks(2, score_all, recipe, count):
        assert_same(together, alone)


def test_the_loss_of_a_model_that_knows_nothing(root: Path) -> None:
    recipe = with_model(root)
    model = load_model(recipe.folder.model, device=CPU)
    assert model.lm_head is not None
    model.lm_head.weight.data.zero_()
    with running_mesh() as mesh:
        found = score_rows(model, validation(recipe), 5, 2, "fp32", mesh)
    assert found.nll.sum() / found.targets.sum() == pytest.approx(
        math.log(model.config.vocab_size), rel=tolerances.LOSS_FP32
    )


def test_pairs_are_the_inputs_and_labels_of_rows(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_model(root)
    rows = validation(recipe)
    expected = []
    for index in range(len(rows)):
        row = rows.row(index)
        expected += [
            pair
            for pair in zip(row.tokens.tolist(), row.labels.tolist(), strict=True)
            if pair[1] != -100
        ]
    for chunk in (7, 2**20):
        monkeypatch.setattr("ingot.evaluate.corpus.CHUNK_TOKENS", chunk)
        found = [
            pair
            for tokens, following in pairs(held_out(recipe))
            for pair in zip(tokens.tolist(), following.tolist(), strict=True)
        ]
        assert found == expected


def test_bytes_of_documents_are_those_of_their_texts(root: Path) -> None:
    from ingot.data.cleaning.documents import read_documents

    recipe = with_model(root)
    texts = [len(document.text.encode()) for document in read_documents(recipe, "validation")]
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    assert document_bytes(held_out(recipe), tokenizer, sum(texts)).tolist() == texts
    assert document_bytes(held_out(recipe), tokenizer, 2 * sum(texts)).tolist() == [
        2 * size for size in texts
    ]
