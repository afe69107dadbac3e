"""Weights bit for bit: what a model would be exported as, against what lies in a folder, tensor by
tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ingot.models.adapters.lora import fold, lora_layers
from ingot.models.hf.folder import stored_tensors
from ingot.models.kinds import Model, exported_weights

FOLDED_FP32 = 2.0**-20
"""What a weight that an adapter was folded into may differ by, as a share of its tensor's largest:
that sum is taken in another order by another device. Beside it one step of the export type is let
pass, and told; it is nothing where the run was trained on this kind of device.
"""
NAMED = 3


@dataclass(frozen=True)
class Compared:
    """Stored tensors against those of a model."""

    tensors: int
    weights: int
    products: int
    """How many of the tensors are matrices."""
    wrong: list[str]
    """What differs, in words."""
    folded: int
    """Weights of folded-in layers whose last bit differs."""

    @property
    def told(self) -> str:
        """The first of what differs."""
        more = f"; and {len(self.wrong) - NAMED:,} more" if len(self.wrong) > NAMED else ""
        return "; ".join(self.wrong[:NAMED]) + more


@torch.no_grad()
def compare_weights(model: Model, folder: Path, dtype: torch.dtype) -> Compared:
    """Fold a model's adapter into its weights, in place, and compare all of them, rounded to
    `dtype`, with those in `folder`.
    """
    adapted = {f"{name}.weight" for name in lora_layers(model)}
    fold(model)
    wanted = dict(exported_weights(model))
    wrong, folded, seen = list[str](), 0, set[str]()
    for name, stored in stored_tensors(folder):
        seen.add(name)
        if name not in wanted:
            wrong.append(f"{name} is not part of the model")
        elif stored.dtype != dtype or stored.shape != wanted[name].shape:
            wrong.append(
                f"{name} is {_form(stored)}, {list(wanted[name].shape)} of {_plain(dtype)} is"
                " wanted"
            )
        elif count := int((_bits(stored) != _bits(wanted[name].to(dtype))).sum()):
            if name in adapted and _one_step(stored, wanted[name], dtype):
                folded += count
            else:
                wrong.append(_differing(name, stored, wanted[name].to(dtype), count))
    wrong += [f"{name} is missing" for name in wanted if name not in seen]
    return Compared(
        len(seen),
        sum(tensor.numel() for tensor in wanted.values()),
        sum(tensor.ndim > 1 for tensor in wanted.values()),
        wrong,
        folded,
    )


@torch.no_grad()
def round_weights(model: Model, dtype: torch.dtype) -> None:
    """Give every exported tensor of a model without an adapter the values that it has when it is
    exported, in place.
    """
    for _, tensor in exported_weights(model):
        tensor.copy_(tensor.to(dtype))


def differing(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], which: Collection[str]
) -> list[str]:
    """Which of the tensors named are not the same bit for bit."""
    return [
        name
        for name in which
        if one[name].shape != other[name].shape
        or bool((_bits(one[name]) != _bits(other[name])).any())
    ]


def _bits(tensor: Tensor) -> Tensor:
    """As whole numbers: 0.0 is not -0.0 here, and what is not a number equals itself."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    )


def _one_step(stored: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    gap = (stored.float() - wanted.float()).abs()
    return bool(
        (gap <= torch.finfo(dtype).eps * wanted.abs() + FOLDED_FP32 * wanted.abs().max()).all()
    )


def _differing(name: str, stored: Tensor, wanted: Tensor, count: int) -> str:
    gap = (stored.double() - wanted.double()).abs().nan_to_num(nan=torch.inf).flatten()
    at = int(gap.argmax())
    return (
        f"{name} differs in {count:,} of {gap.numel():,} weights, most"
        f" {float(stored.flatten()[at]):.6g} for {float(wanted.flatten()[at]):.6g}"
    )


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {_plain(tensor.dtype)}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
