"""Made-up rows stand for prepared ones: the same shapes, ids that the model has, documents kept
apart; and each way of training steps on them.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.models import source as model_source
from ingot.config.models.presets import preset
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.micro_batch.trial import made_up_rows, made_up_setup, open_trial, with_made_up_rows
from ingot.train.setup import make_setup
from tests import tolerances
from tests.ranks import run_ranks
from tests.small import TINY_MODEL, small_recipe

ALONE = Mesh(Ranks(), torch.device("cpu"))
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
BERT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WAYS: dict[str, dict[str, Any]] = {
    "texts": {},
    "padded texts": {"data__pack": "none"},
    "lora": {"model__lora": "{rank: 2}"},
    "chats": {"objective__kind": "sft"},
    "preferences": {"objective__kind": "dpo"},
    "rated": {"objective__kind": "kto"},
    "pairs": {"objective__kind": "seq2seq", "model__source": "preset:t5-mini", "model__config": T5},
    "labelled": {
        "objective__kind": "classify",
        "objective__labels": "[bad, fair, good]",
        "model__source": "preset:bert-mini",
        "model__config": BERT,
    },
    "masked": {
        "objective__kind": "mlm",
        "model__source": "preset:bert-mini",
        "model__config": BERT,
    },
    "spans": {
        "objective__kind": "span_corruption",
        "model__source": "preset:t5-mini",
        "model__config": T5,
    },
}


def batches(rows: Rows | Samples, micro_batch: int = 3, total: int = 8) -> list[Any]:
    with contextlib.closing(
        Loader(rows, SampleOrder(rows.sizes, 0, rows.weights), BatchPlan(total, micro_batch, 1), 0)
    ) as loader:
        return loader.step(5)


def test_packed_rows_are_full_and_keep_documents_apart(tmp_path: Path) -> None:
    made = batches(made_up_rows(small_recipe(tmp_path), 50))
    assert [tuple(batch.tokens.shape) for batch in made] == [(3, 32)] * 3
    first = made[0]
    assert int(first.tokens.max()) < 50
    assert first.segments[0].tolist() == [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8
    assert first.positions[0].tolist() == [*range(8)] * 4
    ends = [7, 15, 23, 31]
    assert (first.labels[:, ends] == -100).all()
    inner = [place for place in range(31) if place not in ends]
    assert torch.equal(first.labels[:, inner], first.tokens[:, [place + 1 for place in inner]])
    dead = made[-1].rows < 0
    assert dead.tolist() == [False, False, True]
    assert (made[-1].labels[dead] == -100).all()


def test_the_same_rows_are_the_same_and_others_are_others(tmp_path: Path) -> None:
    rows = made_up_rows(small_recipe(tmp_path), 50)
    assert isinstance(rows, Rows)
    assert np.array_equal(rows.batch([3, 4]).tokens, rows.batch([3, 4]).tokens)
    assert not np.array_equal(rows.batch([3, 4]).tokens, rows.batch([5, 6]).tokens)


@pytest.mark.parametrize("way", ["preferences", "rated", "pairs", "labelled", "masked"])
def test_samples_have_the_shapes_of_their_kind(way: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, data__target_len=16, **WAYS[way])
    first, *_, last = batches(made_up_rows(recipe, 50))
    sides = 2 if way in ("preferences", "rated") else 1
    assert first.tokens.shape == first.segments.shape == (3 * sides, 32)
    assert (
        tuple(first.labels.shape)
        == {
            **{"preferences": (6, 32), "rated": (6, 32), "masked": (3, 32)},
            **{"pairs": (3, 16), "labelled": (3,)},
        }[way]
    )
    targets = first.labels[first.labels != -100]
    assert 0 <= int(targets.min()) <= int(targets.max()) < (3 if way == "labelled" else 50)
    assert (last.labels[-sides:] == -100).all()
    assert not last.segments[-sides:].any()


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_training_steps_without_data(way: str, tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, **WAYS[way])
    before = torch.get_rng_state()
    with running_mesh(recipe.parallel) as mesh:
        setup = made_up_setup(recipe, mesh)
        with open_trial(setup, mesh, quick=True) as trial, trial.step_function(setup.batch) as take:
            outcomes = [take(step) for step in range(2)]
    assert all(
        math.isfinite(float(outcome.loss))
        and float(outcome.loss) > 0
        and not float(outcome.skipped)
        for outcome in outcomes
    )
    assert torch.equal(before, torch.get_rng_state())
    assert not list(tmp_path.iterdir())


def first_losses(root: Path, knobs: dict[str, Any]) -> list[float]:
    recipe = small_recipe(root, **knobs)
    with running_mesh(recipe.parallel) as mesh:
        setup = made_up_setup(recipe, mesh)
        with open_trial(setup, mesh) as trial, trial.step_function(setup.batch) as take:
            return [float(take(step).loss) for step in range(2)]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "layout",
    [{}, {"parallel__shard": 2}, {"parallel__tensor": 2}, {"parallel__pipeline": 2}],
    ids=["replicate", "shard", "tensor", "pipeline"],
)
def test_a_trial_on_two_ranks_takes_the_steps_of_one(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    alone = first_losses(tmp_path, {})
    for losses in run_ranks(2, first_losses, tmp_path, layout):
        assert losses == pytest.approx(alone, abs=tolerances.SPLIT_LOSS)


def test_the_vocabulary_is_that_which_will_be(tmp_path: Path) -> None:
    """A tokenizer that will be trained, one that was prepared, and a model of its own."""
    assert (
        made_up_setup(
            small_recipe(tmp_path, tokenizer__vocab_size=777), ALONE
        ).model_spec.config.vocab_size
        == 777
    )


def test_a_prepared_run_keeps_its_tokenizer(root: Path) -> None:
    recipe = small_recipe(root, tokenizer__vocab_size=900)
    setup = made_up_setup(recipe, ALONE)
    assert setup.model_spec.config.vocab_size == setup.tokenizer.vocab_size == 320
    real = make_setup(small_recipe(root), ALONE)
    made = with_made_up_rows(real)
    assert made.model_spec == real.model_spec
    assert made.rows.fingerprint == "made up"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"data.seq_len 4096 exceeds the model's"):
        made_up_setup(
            small_recipe(
                tmp_path,
                data__seq_len=4096,
                model__config={**TINY_MODEL, "max_position_embeddings": 64},
            ),
            ALONE,
        )


def test_of_a_model_on_the_hub_only_the_configuration_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset("llama-3m")), encoding="utf-8")
    asked = []
    monkeypatch.setattr(
        model_source, "fetch_config", lambda *model: asked.append(model) or tmp_path
    )
    monkeypatch.setattr(model_source, "fetch_model", lambda *model: pytest.fail("weights"))
    recipe = small_recipe(tmp_path, model__source="hf:a/b", model__config=None)
    recipe = recipe.model_copy(
        update={"tokenizer": recipe.tokenizer.model_copy(update={"source": None})}
    )
    assert made_up_setup(recipe, ALONE).model_spec.random
    assert asked == [("a/b", None)]
