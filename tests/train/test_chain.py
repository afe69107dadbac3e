"""A run goes on from the model of another one, which is named by its run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.pipeline.steps import step_named
from ingot.train.trainer import train
from tests.small import small_recipe


def continued(root: Path, first: Recipe, **knobs: Any) -> Recipe:
    """A recipe that begins with the model and the tokenizer of another one's run."""
    return small_recipe(
        root,
        name="more",
        model__source=str(first.folder.root),
        model__config=None,
        tokenizer__source=None,
        tokenizer__vocab_size=None,
        **knobs,
    )


def test_a_run_folder_is_a_source_of_weights_and_tokenizer(root: Path) -> None:
    first = small_recipe(root, precision__export="fp32")
    train(first)
    second = continued(
        root, first, train__optimizer__lr=1e-12, train__steps=1, precision__export="fp32"
    )
    ingest(second)
    prepare(second)
    train(second)
    before, after = (
        load_file(recipe.folder.model / "model.safetensors") for recipe in (first, second)
    )
    assert all(torch.allclose(after[name], before[name], atol=1e-9) for name in before)
    tokenizers = [
        (recipe.folder.model / "tokenizer.json").read_bytes() for recipe in (first, second)
    ]
    assert tokenizers[0] == tokenizers[1]
    lineage = json.loads((second.folder.model / "ingot.json").read_text())
    assert lineage["base"]["source"] == str(first.folder.root)
    # What the first run writes beside its model does not make the second one train again.
    assert step_named("train").folders(second) == [str(first.folder.model)]


def test_a_run_that_has_no_model_yet_is_named(root: Path) -> None:
    first = small_recipe(root)
    second = continued(root, first)
    ingest(second)
    with pytest.raises(WrongInput, match="small has no tokenizer"):
        prepare(second)
