"""Float8 matrix products in the layers (Micikevicius et al. 2022, arXiv 2209.05433) with torchao;
weights keep their dtype and names.

Each operand is scaled dynamically for each product by its largest magnitude: one scale per matrix
(`tensorwise`) or per row (`rowwise`). Head and embedding are excluded, since their products lose
the most accuracy.
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
"""Round to float8 but multiply in the wider type: used by tests only, on devices without float8
products.
"""


def check_float8(
    kind: Float8, device: torch.device, compute: Compute, *, adapted: bool, lengths: dict[str, int]
) -> None:
    """Check that this machine and recipe can train in float8. `lengths`: tokens of a micro-batch on
    one rank, by the knob that determines them.

    Raises:
        WrongInput: torchao is missing, the device has no float8 products, the recipe has an adapter
            or computes in another dtype than bf16, or a length is not a multiple of 16.
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
    """Convert the linear layers of a model's repeated layers (on `meta`), or of a pipeline stage,
    to float8 products, in place.

    Layers whose dimensions, split over `tensor` ranks, are not multiples of 16 are left unchanged
    and listed if `loud`.

    Raises:
        WrongInput: no layer can be converted.
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
