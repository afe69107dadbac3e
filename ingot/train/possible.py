"""Whether this recipe can save memory, and compute in the formats, as it asks to: on this device,
with this kind of model.
"""

from __future__ import annotations

import torch

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan, Degrees
from ingot.models.device import Compute, resolve_compute
from ingot.models.kinds import Kind
from ingot.parallel.float8 import check_float8
from ingot.parallel.recompute import check_runs


def computing_type(recipe: Recipe, device: torch.device) -> Compute:
    """The format of matrix products. Raises WrongInput where weights are of another."""
    knobs = recipe.precision
    asked = "bf16" if knobs.compute == "auto" and knobs.master == "stochastic" else knobs.compute
    compute = resolve_compute(asked, device)
    if knobs.master == "stochastic" and compute != "bf16":
        raise WrongInput(
            "precision.master stochastic holds weights in bf16, and precision.compute is"
            f" {compute}; set compute to bf16, or master to fp32"
        )
    return compute


def check_memory(recipe: Recipe, kind: Kind, degrees: Degrees) -> None:
    """Raises WrongInput where activations or weights cannot be kept, or layers not be compiled, as
    asked.
    """
    memory = recipe.memory
    if recipe.train.compile and degrees.tensor > 1:
        raise WrongInput(
            f"train.compile gives wrong types of gradients where parallel.tensor, {degrees.tensor},"
            " shares matrices (torch 2.13); set train.compile to false, or parallel.tensor to 1"
        )
    check_runs(kind, memory.recompute)
    if memory.offload.weights and degrees.shard == 1:
        raise WrongInput(
            "memory.offload.weights keeps a rank's share of sharded weights on the host, and"
            " parallel.shard is 1; set shard to 2 or more, or take memory.offload.optimizer=1.0"
        )


def check_formats(
    recipe: Recipe,
    kind: Kind,
    batch: BatchPlan,
    degrees: Degrees,
    compute: Compute,
    device: torch.device,
) -> None:
    """Raises WrongInput where float8 is asked for and cannot be had."""
    if recipe.precision.float8 == "none":
        return
    sides = 2 if recipe.documents == "preference" else 1
    tokens = {
        "data.seq_len": recipe.data.seq_len,
        **({"data.target_len": recipe.data.target_len} if kind == "seq2seq" else {}),
    }
    lengths = {
        knob: sides * batch.micro_batch * length // degrees.context
        for knob, length in tokens.items()
    }
    check_float8(
        recipe.precision.float8,
        device,
        compute,
        adapted=recipe.model.lora is not None,
        lengths=lengths,
    )
