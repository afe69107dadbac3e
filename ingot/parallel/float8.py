"""Matrix products of the layers in float8 (Micikevicius et al. 2022, arXiv 2209.05433) by torchao;
weights stay as they are, and so do their names.

Each operand is scaled anew for each product, by its largest number: one scale a matrix
(`tensorwise`) or one a row (`rowwise`).
Head and embeddings stay out: their products are the ones that lose most.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.shape import FLOAT8_MULTIPLE, check_float8_fits
from ingot.models.device import Compute, device_name, has_float8
from ingot.parallel.shard import layers

Float8 = Literal["tensorwise", "rowwise"]
EMULATED = False
"""Round to float8 and multiply in the wider type; only tests do, on devices that have no such
products.
"""


def check_float8(
    kind: Float8, device: torch.device, compute: Compute, *, adapted: bool, lengths: dict[str, int]
) -> None:
    """Whether this machine and recipe can train in float8. `lengths`: tokens of a micro-batch on
    one rank, by the knob that says so.

    Raises:
        WrongInput: a device without such products, an adapter, another type of computation, torchao
            missing, or odd lengths.
    """
    if importlib.util.find_spec("torchao") is None:
        raise WrongInput(
            f"precision.float8 {kind} needs torchao; run `pip install ingot[float8]`, or set"
            " precision.float8 to none"
        )
    check_float8_fits(kind, {}, adapted)
    if EMULATED:
        return
    if not has_float8(device):
        raise WrongInput(
            f"precision.float8 {kind} needs a GPU of compute capability 8.9 or more (Ada, Hopper"
            f" and newer), this is {device_name(device)}; set precision.float8 to none"
        )
    if compute != "bf16":
        raise WrongInput(
            f"precision.float8 {kind} goes with precision.compute bf16, not {compute}; set one of"
            " the two"
        )
    check_float8_fits(kind, lengths, adapted)


def use_float8(model: nn.Module, kind: Float8, *, tensor: int = 1, loud: bool = True) -> None:
    """Let the linear layers of the layers of a model (on `meta`), or of a stage of it, compute in
    float8, in place.

    Those whose sides, cut over `tensor` ranks, are no multiples of 16 stay as they are, which is
    printed if `loud`.

    Raises:
        WrongInput: that is all of them.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(kind), emulate=EMULATED)
    left: dict[tuple[int, int], str] = {}
    taken, multiple = 0, FLOAT8_MULTIPLE * tensor

    def fits(module: nn.Module, name: str) -> bool:
        nonlocal taken
        assert isinstance(module, nn.Linear)
        shape = (module.out_features, module.in_features)
        if any(size % multiple for size in shape):
            left[shape] = name
            return False
        taken += 1
        return True

    for layer in layers(model):
        convert_to_float8_training(layer, config=config, module_filter_fn=fits)
    odd = ", ".join(f"{name} {list(shape)}" for shape, name in left.items())
    if not taken:
        raise WrongInput(
            f"precision.float8 {kind} wants matrices whose sides are multiples of {multiple}, this"
            f" model has none ({odd}); set precision.float8 to none"
        )
    if left and loud:
        say(f"float8: sides that are no multiples of {multiple} stay in the wider type: {odd}")
