"""Classifiers that are read at a text's EOS: a tokenizer of ours puts one there, another one that
puts none is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.serve.native.model import load
from ingot.serve.predict import PredictOptions, predict_locally
from ingot.tokenizers.bpe import train_bpe
from ingot.train.trainer import train
from tests.small import small_recipe

TEXTS = {"cold": "the mould cools slowly", "hot": "the bright copper melts"}
SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}


def labelled(root: Path, tokenizer: dict[str, Any]) -> Recipe:
    lines = [json.dumps({"text": text, "label": name}) for name, text in TEXTS.items()] * 20
    (root / "texts.jsonl").write_text("\n".join(lines))
    recipe = small_recipe(
        root,
        objective={"kind": "classify", "labels": [*TEXTS]},
        model__source="preset:t5-mini",
        model__config={**SIZES, "num_decoder_layers": 1},
        data__train=[{"source": str(root / "texts.jsonl")}],
        tokenizer=tokenizer,
        train__steps=2,
    )
    ingest(recipe)
    prepare(recipe)
    return recipe


def test_a_tokenizer_that_is_learnt_ends_the_texts_to_classify(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, {"source": "train", "vocab_size": 280})
    train(recipe)
    assert any("train/loss" in line for line in read_lines(recipe.folder.metrics))
    loaded = load(recipe.folder.model)
    assert loaded.encode("copper")[-1] == loaded.tokenizer.special.eos
    assert predict_locally(loaded, "copper", PredictOptions())[1]


def test_one_that_ends_none_is_refused_where_the_model_is_read_there(tmp_path: Path) -> None:
    train_bpe([*TEXTS.values()], 280).save(tmp_path / "own")
    with pytest.raises(WrongInput, match="reads the class of a text at its EOS, and this token"):
        train(labelled(tmp_path, {"source": str(tmp_path / "own")}))
