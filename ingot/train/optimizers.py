"""Optimizers over the masters of a model: which weights decay, fused kernels for float32 masters,
and stochastic rounding for bf16 weights without a float32 copy.

Stochastic rounding rounds an update up or down at random, in proportion to where it lies between
two bf16 numbers, so that updates far smaller than their distance add up instead of being lost
(Gupta et al. 2015, arXiv 1502.02551). The random bits are a hash of (seed, parameter name,
optimizer step, row, column): they do not depend on resuming or on the layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from ingot.config.sections.training import SGD, AdamW, OptimizerSettings
from ingot.models.parameters import shard_slices
from ingot.parallel.masters import Masters

SLICE = 2**20
"""Numbers that are updated at a time, so that what is needed in between stays small."""
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit
_DISCARDED = 16
"""Bits of a float32 that a bf16 does not have."""


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Float32 -> bf16, away from zero where the bits that go are more than 2^16 less `noise`
    (int32, uniform in [0, 2^16)), else towards it.

    What bf16 can hold exactly stays as it is, infinities included.
    """
    return (
        ((values.view(torch.int32) + noise) & (-1 << _DISCARDED))
        .view(torch.float32)
        .to(torch.bfloat16)
    )


@dataclass(frozen=True)
class Noise:
    """The random bits of one parameter. `first_row` and `first_column` say where this rank's part
    of it lies in the whole.
    """

    key: int
    first_row: int = 0
    first_column: int = 0

    def bits(self, step: Tensor, rows: slice, columns: int) -> Tensor:
        """int32 `[rows, columns]` in [0, 2^16), for some rows of this rank's part; `step` is one
        number on the device.
        """
        there = step.device
        row = torch.arange(
            self.first_row + rows.start, self.first_row + rows.stop, device=there, dtype=torch.int32
        )
        column = torch.arange(
            self.first_column, self.first_column + columns, device=there, dtype=torch.int32
        )
        row = _mix_(_mix_(row * _GOLDEN + self.key) + step.to(torch.int32) * _GOLDEN)
        column = _mix_(column * _GOLDEN - self.key)
        return _mix_(row[:, None] + column).bitwise_and_(2**_DISCARDED - 1)


def _mix_(bits: Tensor) -> Tensor:
    """In place: every bit of the result hangs on every bit of the input (the finaliser of
    MurmurHash3, with constants of less bias).
    """
    for shift, factor in ((16, _MIX1), (15, _MIX2)):
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= factor
    bits ^= (bits >> 16) & (2**16 - 1)
    return bits


class Stochastic(optim.Optimizer):
    """What AdamW and SGD have in common here. State is float32; a step with `found_inf` 1 changes
    neither weights nor state.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        masters: Masters,
        seed: int,
    ) -> None:
        super().__init__(groups, defaults)
        self._noise: dict[Tensor, Noise] = {
            master.tensor: _noise_of(seed, master.name, master.parameter) for master in masters
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        for name in ("step", *self.moments(group)):
            if name not in state:
                state[name] = torch.zeros(
                    () if name == "step" else weight.shape,
                    dtype=torch.float32,
                    device=weight.device,
                )
        skipped = (
            torch.zeros((), device=weight.device)
            if self.found_inf is None
            else self.found_inf.to(weight.device)
        )
        moments = [_as_matrix(state[name]) for name in self.moments(group)]
        weights, gradient, count = _as_matrix(weight), _as_matrix(weight.grad), state["step"] + 1  # type: ignore[arg-type]
        for rows in _slices(weights):
            new = self.rule(
                group,
                count,
                weights[rows].float(),
                gradient[rows],
                [moment[rows] for moment in moments],
            )
            rounded = round_to_bf16(new[0], self._noise[weight].bits(count, rows, weights.shape[1]))
            for old, value in zip((weights, *moments), (rounded, *new[1:]), strict=True):
                old[rows] = torch.where(skipped != 0, old[rows], value)
        state["step"] += 1 - skipped

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state that has the shape of the weights."""
        raise NotImplementedError

    def rule(
        self,
        group: dict[str, Any],
        count: Tensor,
        weight: Tensor,
        gradient: Tensor,
        moments: list[Tensor],
    ) -> list[Tensor]:
        """New weights, not yet rounded, and new moments, all float32; nothing is changed. `count`
        is the number of this step, from 1.
        """
        raise NotImplementedError


class StochasticAdamW(Stochastic):
    """The formula of `torch.optim.AdamW`."""

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def rule(
        self,
        group: dict[str, Any],
        count: Tensor,
        weight: Tensor,
        gradient: Tensor,
        moments: list[Tensor],
    ) -> list[Tensor]:
        first, second = group["betas"]
        mean = moments[0].lerp(gradient, 1 - first)
        square = (moments[1] * second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**count)).sqrt_().add_(group["eps"])
        weight = weight.mul_(1 - group["lr"] * group["weight_decay"])
        return [weight.sub_(mean / root * (group["lr"] / (1 - first**count))), mean, square]


class StochasticSGD(Stochastic):
    """The formula of `torch.optim.SGD`."""

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def rule(
        self,
        group: dict[str, Any],
        count: Tensor,
        weight: Tensor,
        gradient: Tensor,
        moments: list[Tensor],
    ) -> list[Tensor]:
        move = gradient + group["weight_decay"] * weight
        kept = [move := moment * group["momentum"] + move for moment in moments]
        return [weight - group["lr"] * move, *kept]


def _noise_of(seed: int, name: str, parameter: Tensor) -> Noise:
    key = int.from_bytes(
        hashlib.sha256(f"{seed}/rounding/{name}".encode()).digest()[:4], "little", signed=True
    )
    first = [part.start for part in shard_slices(parameter)]
    # A vector is one row.
    return Noise(key, 0, *first) if len(first) == 1 else Noise(key, *first[:2])


def _as_matrix(tensor: Tensor) -> Tensor:
    """`[rows, columns]`, sharing memory."""
    return (
        tensor.view(1, -1)
        if tensor.ndim < 2
        else tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))
    )


def _slices(matrix: Tensor) -> Iterator[slice]:
    rows, columns = matrix.shape
    size = max(1, SLICE // max(1, columns))
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def make_optimizer(settings: OptimizerSettings, masters: Masters, seed: int = 0) -> optim.Optimizer:
    """The optimizer that the settings name as their implementation. Matrices decay, vectors (norms,
    biases) do not.
    """
    trained = [master.tensor for master in masters]
    matrices = [tensor for tensor in trained if tensor.ndim >= 2]
    vectors = [tensor for tensor in trained if tensor.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.matrix_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A stage whose layers are all kept as they are has one empty group.
    groups = [group for group in groups if group["params"]] or groups[:1]
    optimizer: optim.Optimizer = settings.load_implementation()(settings, groups, masters, seed)
    return optimizer


def adamw(
    settings: AdamW, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused, so that a non-finite step can be skipped on the device. Masters that are bf16 are
    rounded stochastically, by `seed`.
    """
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    if masters.stochastic:
        return StochasticAdamW(groups, {"lr": lr, "betas": betas, "eps": eps}, masters, seed)
    return optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sgd(
    settings: SGD, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused, and rounded, as `adamw` is."""
    lr, momentum = settings.lr, settings.momentum
    if masters.stochastic:
        return StochasticSGD(groups, {"lr": lr, "momentum": momentum}, masters, seed)
    return optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
