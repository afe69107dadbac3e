"""How far what the ranks of a layout have seen is from one process, and whether each holds but its
share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.config.shape import Degrees
from ingot.verify.measured import Measured, Piece

SLACK = 0.02
"""What a rank may hold beyond its share: sizes that do not divide."""
NOISE = 1e-6
"""Relative difference of all weights up to which a step is not the first that differs."""
INFINITE = float("inf")


@dataclass(frozen=True)
class Difference:
    """The largest differences of any rank and step."""

    loss: float
    """Nats."""
    norm: float
    """Of the gradient, relative."""
    weights: float
    """Relative, in norm over all updated weights."""
    share: float
    """The most that a rank holds of all weights, where 1 is all."""
    share_bound: float
    where: str
    """`step 2: model.norm.weight differs most, by 1.2e-03 of its norm`."""


def compare(
    found: Sequence[Measured], alone: Measured, degrees: Degrees, virtual: int
) -> Difference:
    """The ranks of a layout with one process; `virtual` counts the stages of a rank."""
    loss = max(_far(a, b) for one in found for a, b in zip(one.losses, alone.losses, strict=True))
    norm = max(_far(a, b) / b for one in found for a, b in zip(one.norms, alone.norms, strict=True))
    whole = [{name: piece.values for name, piece in weights.items()} for weights in alone.weights]
    steps = [
        _squares([one.weights[step] for one in found], weights)
        for step, weights in enumerate(whole)
    ]
    totals = [
        (sum(squares.values()) / _square(weights.values())) ** 0.5
        for squares, weights in zip(steps, whole, strict=True)
    ]
    share = max(sum(one.holds.values()) for one in found) / sum(alone.holds.values())
    return Difference(
        loss,
        norm,
        max(totals),
        share,
        share_bound(alone, degrees, virtual),
        _where(steps, totals, whole),
    )


def _far(one: float, other: float) -> float:
    """Their distance; what is no number is infinitely far."""
    return abs(one - other) if one == one else INFINITE


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _squares(found: Sequence[Mapping[str, Piece]], alone: Mapping[str, Tensor]) -> dict[str, float]:
    """The square of each parameter's distance, each of its numbers taken from the rank where it is
    farthest off.

    Infinite for a parameter of another name or shape, and for one of which a number is on no rank.
    """
    squares = {name: INFINITE for pieces in found for name in pieces if name not in alone}
    for name, tensor in alone.items():
        farthest = torch.full(tensor.shape, -1.0, dtype=torch.float64)
        for piece in (pieces[name] for pieces in found if name in pieces):
            if piece.shape != tensor.shape:
                return {**squares, name: INFINITE}
            distance = (
                (piece.values - tensor[piece.box]).double().abs().nan_to_num(INFINITE, INFINITE)
            )
            farthest[piece.box] = torch.maximum(farthest[piece.box], distance)
        squares[name] = float(farthest.square().sum()) if bool((farthest >= 0).all()) else INFINITE
    return squares


def _where(
    steps: Sequence[Mapping[str, float]],
    totals: Sequence[float],
    whole: Sequence[Mapping[str, Tensor]],
) -> str:
    """The first step that differs, and the parameter that differs most in it."""
    step = next(
        (number for number, total in enumerate(totals) if not total <= NOISE), len(totals) - 1
    )
    name = max(steps[step], key=lambda key: steps[step][key])
    if steps[step][name] == INFINITE:
        return (
            f"step {step + 1}: {name} is not the same tensor: its name, its shape, a part that no"
            " rank has, or a value that is no number"
        )
    own = _square([whole[step][name]]) ** 0.5
    return (
        f"step {step + 1}: {name} differs most, by {steps[step][name] ** 0.5 / max(own, 1e-30):.1e}"
        " of its norm"
    )


def share_bound(alone: Measured, degrees: Degrees, virtual: int) -> float:
    """The largest share of all numbers that a rank may hold.

    Vectors and the small matrices of adapters may be whole on every rank of `tensor`; of a pipeline
    a rank has its part of the layers, and an end (with several stages a rank perhaps both).
    """
    shards = degrees.shard * (degrees.context if degrees.shard > 1 else 1)
    shapes = {name: piece.shape for name, piece in alone.weights[-1].items()}
    layers, ends = 0.0, list[float]()
    for name, count in alone.holds.items():
        cut = "lora_" not in name and len(shapes.get(name, (1, 1))) > 1
        mine = count / (degrees.tensor if cut else 1)
        if ".layers." in name:
            layers += mine
        else:
            ends.append(mine)
    outer = sum(ends) if degrees.pipeline == 1 or virtual > 1 else max(ends)
    return min(
        1.0, (layers / degrees.pipeline + outer) / shards / sum(alone.holds.values()) + SLACK
    )
