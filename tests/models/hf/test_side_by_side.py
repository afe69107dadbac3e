"""Masked texts side by side in a row: each sees itself alone, so that the loss is that of a row for
each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.models.types import SIDE_BY_SIDE
from ingot.data.batches.masking import Masking
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.batches.samples import RowArrays, Samples
from ingot.models.hf.config import read_hf_config
from ingot.models.hf.loading import init_hf_model
from ingot.models.spec import resolve_model_spec
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.objectives.ways import BERT, prepare_way, recipe_of, write_all

WAY = "mlm-packed"
DISTILBERT = {
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("packed")
    write_all(made)
    prepare_way(made, WAY)
    return made


def opened(root: Path, pack: str) -> Samples:
    recipe = recipe_of(root, WAY)
    masking = Masking.of(recipe, load_tokenizer(recipe.folder.tokenizer))
    rows = open_rows(recipe.folder.columns, "train", 48, pack=pack, pad_last=False, hiding=masking)
    assert isinstance(rows, Samples)
    return rows


def loss(model: Any, made: RowArrays) -> tuple[float, int]:
    tokens, labels, positions, segments = map(torch.from_numpy, made)
    with torch.no_grad():
        values = model(tokens, positions, segments, labels, CrossEntropy().token)
    return float(values.double().sum()), int((labels != IGNORE).sum())


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_the_loss_of_texts_side_by_side_is_that_of_a_row_for_each(kind: str, root: Path) -> None:
    """All training texts with the masks of held-out ones, which depend on the texts alone."""
    packed, alone = opened(root, "best_fit"), opened(root, "none")
    assert len(packed) < 0.8 * len(alone)
    values = {**BERT, **DISTILBERT, "model_type": kind, "pad_token_id": 2, "bos_token_id": 0}
    if kind != "distilbert":
        values = {name: value for name, value in values.items() if name not in DISTILBERT}
    # Weights so large that a text beside another one counts.
    values |= {"max_position_embeddings": 80, "initializer_range": 0.5}
    config = read_hf_config(values, "masked", "here")
    torch.manual_seed(0)
    model = init_hf_model(config, 0, torch.device("cpu")).eval()
    wanted = loss(model, alone.fields(range(len(alone))))
    object.__setattr__(model.config, "side_by_side", True)
    made = packed.fields(range(len(packed)))
    assert made.segments.max() > 2
    assert made.tokens.shape[1] == 48
    found = loss(model, made)
    assert found[1] == wanted[1] > 300
    assert found[0] / found[1] == pytest.approx(wanted[0] / wanted[1], abs=tolerances.LOGITS_FP32)
    again = loss(model, alone.fields(range(len(alone))))
    assert again[0] == pytest.approx(wanted[0], rel=tolerances.LOGITS_FP32), "padded rows too"


def test_pieces_of_a_row_are_masked_apart_and_all_texts_are_there(root: Path) -> None:
    packed, alone = opened(root, "best_fit"), opened(root, "none")
    assert packed.left_out == alone.left_out == 0

    def texts(rows: Samples) -> list[tuple[int, ...]]:
        made = rows.fields(range(len(rows)))
        whole = np.where(made.labels != IGNORE, made.labels, made.tokens)
        return sorted(
            tuple(row[of == number].tolist())
            for row, of in zip(whole, made.segments, strict=True)
            for number in range(1, of.max() + 1)
        )

    assert texts(packed) == texts(alone)
    hiding = packed._hiding
    assert hiding is not None
    body = np.arange(10, 40)
    labels = {tuple(hiding.sample(body, 3, number)[1].tolist()) for number in range(3)}
    assert len(labels) == 3


def test_encoders_that_cannot_keep_texts_apart_are_refused(root: Path) -> None:
    tokenizer = load_tokenizer(recipe_of(root, WAY).folder.tokenizer)
    recipe = recipe_of(root, WAY, model__config={"model_type": "mpnet"})
    with pytest.raises(WrongInput, match=r"`mpnet` cannot keep several texts of a row apart"):
        resolve_model_spec(recipe, tokenizer.vocab_size, tokenizer.ids_for_model)
    with pytest.raises(WrongInput, match=r"data.pack best_fit is not for objective.kind span"):
        recipe_of(root, "span_corruption", data__pack="best_fit")
