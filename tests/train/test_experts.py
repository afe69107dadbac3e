"""Whole runs of a mixture whose experts ranks share: begun in one layout and resumed in others,
evaluated, sampled from and exported, they are the run of one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.storage import write_atomic
from ingot.config.models.experts import CORRECTION
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.train.trainer import train
from tests import tolerances
from tests.objectives.test_every_way import distance, logged
from tests.parallel.proving import MODELS
from tests.patience import PATIENCE_S
from tests.ranks import run_ranks
from tests.small import copy_of, small_recipe
from tests.train.stopping import train_until

STEPS = 3
CHAIN: tuple[dict[str, int], ...] = ({"shard": 2, "expert": 2}, {}, {"replicate": 2, "expert": 2})
"""Each layout resumes what the one before it left."""


def recipe_in(root: Path, layout: dict[str, int], model: str = "qwen3_moe", **knobs: Any) -> Recipe:
    folder = root / "mixture"
    folder.mkdir(exist_ok=True)
    # Each rank writes it, while others may already read it.
    write_atomic(folder / "config.json", json.dumps({**MODELS[model], "vocab_size": 320}))
    given = {
        "model__source": str(folder),
        "model__config": None,
        "model__init": "random",
        "train__steps": STEPS * len(CHAIN),
        "train__micro_batch": 1,
        "train__clip_norm": 0.5,
        "train__optimizer": "{kind: adamw, lr: 0.002, eps: 1.0e-3}",
        "train__evaluate_every": STEPS,
        "train__sample_every": STEPS,
        "evaluate__prompts": "[the ingot]",
        "evaluate__sample_tokens": 4,
        "checkpoint__every": STEPS,
        "precision__export": "fp32",
        **{f"parallel__{axis}": degree for axis, degree in layout.items()},
    }
    return small_recipe(root, **given | knobs)


def part_of(root: str, layout: dict[str, int], until: int, knobs: dict[str, Any]) -> None:
    with running_mesh():
        recipe = recipe_in(Path(root), layout, **knobs)
        if until < recipe.train.steps:  # type: ignore[operator]
            train_until(until, recipe)
        else:
            train(recipe)


LOAD = [f"experts/layer{layer}_{what}" for layer in (1, 2, 3) for what in ("max", "entropy")]
LOSSES = {"train__experts__aux_loss": 0.1, "train__experts__z_loss": 0.01}
BIAS = {"train__experts__bias_rate": 0.01, "model": "glm4_moe"}


def chained(root: Path, chain: tuple[dict[str, int], ...], **knobs: Any) -> Recipe:
    for number, layout in enumerate(chain, 1):
        world = 2 if layout else 1
        until = STEPS * (number if number < len(chain) else len(CHAIN))
        run_ranks(world, part_of, str(root), layout, until, knobs, timeout_s=PATIENCE_S)
    return recipe_in(root, {}, **knobs)


@pytest.mark.drawn
@pytest.mark.parametrize("by", ["losses", "bias", "minimax"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_run_goes_on_in_any_layout(
    compute: str, by: str, prepared_root: Path, tmp_path: Path
) -> None:
    one, other = (copy_of(prepared_root, tmp_path / each) for each in ("one", "other"))
    balance: dict[str, Any] = LOSSES if by == "losses" else BIAS
    if by == "minimax":
        balance = balance | {"model": "minimax_m2"}
    found = chained(one, CHAIN, precision__compute=compute, **balance)
    wanted = chained(other, ({},), precision__compute=compute, **balance)
    narrow = compute == "bf16"
    loss_bound = tolerances.BF16_LOSS if narrow else tolerances.SPLIT_LOSS
    weights_bound = tolerances.BF16_LOSS if narrow else tolerances.SPLIT_WEIGHTS
    assert len(logged(found)) == STEPS * len(CHAIN)
    assert bool(logged(found, "experts/layer0_max")) == (by == "minimax"), "the others' is dense"
    losses = ("experts/aux_loss", "experts/z_loss") if by == "losses" else ()
    for key in ("train/loss", "train/grad_norm", *losses, *LOAD):
        assert len(logged(found, key)) == STEPS * len(CHAIN)
        if narrow and key.endswith("_max"):
            continue  # a count of a few tokens: rounding sends one of them to another expert
        assert logged(found, key) == pytest.approx(logged(wanted, key), rel=loss_bound)
    weights = [load_file(recipe.folder.model / "model.safetensors") for recipe in (found, wanted)]
    sparse = 4 if by == "minimax" else 3
    assert sum(".experts." in name for name in weights[0]) == sparse * 4 * 3, (
        "as the files have them"
    )
    assert distance(*weights) < weights_bound


@pytest.mark.parametrize(
    "average", [None, *(pytest.param(one, marks=pytest.mark.drawn) for one in ("ema", "last"))]
)
def test_the_bias_that_balances_goes_on_where_it_was(
    average: str | None, prepared_root: Path, tmp_path: Path
) -> None:
    """Resumed, a run has the bits of one that was never stopped; its export holds the bias in
    float32 whatever the type of the rest, an average's too.
    """
    knobs: dict[str, Any] = {**BIAS, "precision__export": "bf16"}
    if average is not None:
        knobs |= {"train__average": f"{{kind: {average}}}", "checkpoint__keep": 5}
    exported = []
    for name, stops in (("one", (4, 9)), ("other", (9,))):
        root = copy_of(prepared_root, tmp_path / name)
        for until in stops:
            part_of(str(root), {}, until, knobs)
        exported.append(load_file(recipe_in(root, {}, **knobs).folder.model / "model.safetensors"))
    found, wanted = exported
    assert found.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(found[tensor], value), tensor
    biases = {name: value for name, value in found.items() if name.endswith(CORRECTION)}
    assert len(biases) == 3, "of four layers the first is dense"
    for name, bias in biases.items():
        assert bias.dtype == torch.float32
        assert found[name.replace(CORRECTION, "weight")].dtype == torch.bfloat16
        assert bias.any()
        if average != "last":
            torch.testing.assert_close(bias, (bias / 0.01).round() * 0.01)  # whole steps


def test_a_mixture_from_random_weights_is_warned_of(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless something balances it; the warning says what could."""
    train(recipe_in(root, {}, train__steps=1))
    warning = "warning: nothing balances the load of experts"
    said = capsys.readouterr().err
    assert warning in said
    assert "train.experts.aux_loss" in said
    train(recipe_in(root, {}, train__steps=1, train__experts__aux_loss=0.001), fresh=True)
    assert warning not in capsys.readouterr().err
