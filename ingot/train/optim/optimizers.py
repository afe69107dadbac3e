"""Optimizers over the masters of a model: weight decay groups, fused kernels for float32 masters,
and stochastic rounding for bf16 weights without a float32 copy.

Stochastic rounding rounds an update up or down at random, with probabilities given by its distance
from the two neighbouring bf16 values, so that updates far smaller than their spacing accumulate
instead of vanishing (Gupta et al. 2015, arXiv 1502.02551). The random bits are a hash of (seed,
parameter name, optimizer step, row, column), so they depend neither on resuming nor on the layout.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, optim

from ingot.base.errors import WrongInput
from ingot.config.sections.loop import Average
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import SGD, AdamSettings, OptimizerSettings, ParameterGroup
from ingot.models.hf.tensor_names import LORA_B
from ingot.models.parameters import shard_slices
from ingot.parallel.masters import Masters
from ingot.train.optim.averaging import keep_average
from ingot.train.optim.eager import EagerAdamW, EagerOptimizer, EagerSGD

FUSED = "_step_supports_amp_scaling"
"""What torch sets on an optimizer that leaves out a step where its `found_inf` is 1."""
SLICE = 2**20
"""Elements updated at a time, which bounds the size of temporaries."""
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit
_DISCARDED = 16
"""Low bits of a float32 that bf16 drops."""


def round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 to bf16: away from zero if the dropped 16 bits plus `noise` (int32, uniform in
    [0, 2^16)) reach 2^16, else towards zero.

    Values that bf16 represents exactly are unchanged, infinities included.
    """
    return (
        ((values.view(torch.int32) + noise) & (-1 << _DISCARDED))
        .view(torch.float32)
        .to(torch.bfloat16)
    )


@dataclass(frozen=True)
class Noise:
    """The random bits of one parameter. `first_row` and `first_column` are the offset of this
    rank's shard in the whole parameter.

    widths: where a row is a matrix, line by line, the length of a line here and in the whole.
    """

    key: int
    first_row: int = 0
    first_column: int = 0
    widths: tuple[int, int] = (1, 1)

    def bits(self, step: Tensor, rows: slice, columns: int) -> Tensor:
        """int32 `[rows, columns]` in [0, 2^16) for a slice of rows of this rank's shard; `step` is
        a scalar on the device.
        """
        there = step.device
        row = torch.arange(
            self.first_row + rows.start, self.first_row + rows.stop, device=there, dtype=torch.int32
        )
        here, whole = self.widths
        column = torch.arange(columns, device=there, dtype=torch.int32)
        column = self.first_column + column // here * whole + column % here
        row = _mix_(_mix_(row * _GOLDEN + self.key) + step.to(torch.int32) * _GOLDEN)
        column = _mix_(column * _GOLDEN - self.key)
        return _mix_(row[:, None] + column).bitwise_and_(2**_DISCARDED - 1)


def _mix_(bits: Tensor) -> Tensor:
    """Hash in place so that each output bit depends on every input bit (MurmurHash3's finaliser
    with constants of lower bias).
    """
    for shift, factor in ((16, _MIX1), (15, _MIX2)):
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= factor
    bits ^= (bits >> 16) & (2**16 - 1)
    return bits


class Stochastic(EagerOptimizer):
    """The base of the AdamW and SGD variants with stochastic rounding. State is float32; a step
    with `found_inf` 1 changes neither weights nor state.
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
            master.tensor: noise_of(seed, master.name, master.parameter) for master in masters
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
        """Names of the state tensors that have the shape of the weights."""
        raise NotImplementedError

    def rule(
        self,
        group: dict[str, Any],
        count: Tensor,
        weight: Tensor,
        gradient: Tensor,
        moments: list[Tensor],
    ) -> list[Tensor]:
        """The new weights, not yet rounded, and the new moments, all float32; the inputs are not
        changed. `count` is the number of this step, from 1.
        """
        raise NotImplementedError


class StochasticAdamW(Stochastic):
    """The update rule of `torch.optim.AdamW`."""

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
    """The update rule of `torch.optim.SGD`."""

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


def noise_of(seed: int, name: str, parameter: Tensor) -> Noise:
    key = int.from_bytes(
        hashlib.sha256(f"{seed}/rounding/{name}".encode()).digest()[:4], "little", signed=True
    )
    parts = shard_slices(parameter)
    first = [part.start for part in parts]
    if len(parts) == 3:  # an expert's matrix counts as one row
        width, here = parameter.shape[2], parts[2].stop - parts[2].start
        return Noise(key, first[0], first[1] * width + first[2], (max(here, 1), width))
    # A vector counts as one row.
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


def make_optimizer(
    settings: OptimizerSettings,
    masters: Masters,
    seed: int = 0,
    average: Average | None = None,
    lora: Lora | None = None,
) -> optim.Optimizer:
    """Make the optimizer that the settings name, and let it keep an average of the weights if one
    is asked for. Weight decay applies to matrices, not to vectors (norms, biases), unless a group
    of the settings says otherwise; a ratio of LoRA+ multiplies what a group says of rates.

    Raises:
        WrongInput: the optimizer cannot leave out a step.
    """
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    ratio = None if lora is None else lora.plus_ratio
    for master in masters:
        named = group_of(settings, master.name)
        # The biases of a stack of experts are two-dimensional.
        matrix = master.tensor.ndim >= 2 and not master.name.endswith("bias")
        decay = settings.matrix_decay if matrix else 0.0
        if named is not None and named.weight_decay is not None:
            decay = named.weight_decay
        factor = 1.0 if named is None else named.lr_factor
        if ratio is not None and (master.tensor.ndim == 1 or master.name.endswith(LORA_B)):
            factor *= ratio
        group = groups.setdefault((factor, decay), {"params": [], "weight_decay": decay})
        if factor != 1.0:
            group |= {"lr_factor": factor, "lr": settings.lr * factor}
        group["params"].append(master.tensor)
    # A pipeline stage whose layers are all frozen gets one empty group.
    made = list(groups.values()) or [{"params": [], "weight_decay": settings.matrix_decay}]
    optimizer: optim.Optimizer = settings.load_implementation()(settings, made, masters, seed)
    _check_leaves_out(settings, optimizer)
    if average is not None and average.kind == "ema":
        keep_average(optimizer, masters, average.decay)
    return optimizer


def _check_leaves_out(settings: OptimizerSettings, optimizer: optim.Optimizer) -> None:
    """Raises WrongInput if an optimizer would take steps that are to be left out: it neither has
    `found_inf` nor is one of torch's that heed it, the fused ones.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise WrongInput(
            f"train.optimizer.kind {settings.kind} made a {type(optimizer).__name__}, which is no"
            " torch.optim.Optimizer"
        )
    if not (hasattr(optimizer, "found_inf") or getattr(optimizer, FUSED, False)):
        raise WrongInput(
            f"train.optimizer.kind {settings.kind} made a {type(optimizer).__name__} without"
            " found_inf, which would take steps that are not finite; use one of torch's with"
            " fused=True, or a class with an attribute found_inf that changes nothing where it is 1"
        )


def group_of(settings: OptimizerSettings, name: str) -> ParameterGroup | None:
    """The group of the settings that a parameter belongs to; None for the optimizer's own knobs."""
    groups: Sequence[ParameterGroup] = getattr(settings, "groups", ())
    return next((one for one in groups if fnmatchcase(name, one.match)), None)


def check_groups(settings: OptimizerSettings, names: Sequence[str]) -> None:
    """Raises WrongInput if a group of the settings is that of none of the trained parameters."""
    used = [group_of(settings, name) for name in names]
    for number, group in enumerate(getattr(settings, "groups", ())):
        if not any(group is one for one in used):
            taken = any(fnmatchcase(name, group.match) for name in names)
            near = difflib.get_close_matches(group.match, names, n=3, cutoff=0.0)
            why = (
                "only parameters of groups before it; change their order"
                if taken
                else f"no trained parameter; near are {', '.join(near)}"
            )
            raise WrongInput(f"train.optimizer.groups.{number}.match {group.match} matches {why}")


def adamw(
    settings: AdamSettings, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused AdamW, so that a non-finite step can be skipped on the device. bf16 masters are rounded
    stochastically, seeded with `seed`.
    """
    lr, betas, eps = settings.lr, settings.betas, settings.eps
    if masters.stochastic:
        return StochasticAdamW(groups, {"lr": lr, "betas": betas, "eps": eps}, masters, seed)
    return EagerAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sgd(
    settings: SGD, groups: list[dict[str, Any]], masters: Masters, seed: int
) -> optim.Optimizer:
    """Fused SGD; bf16 masters are rounded stochastically as in `adamw`."""
    lr, momentum = settings.lr, settings.momentum
    if masters.stochastic:
        return StochasticSGD(groups, {"lr": lr, "momentum": momentum}, masters, seed)
    return EagerSGD(groups, lr=lr, momentum=momentum, fused=True)
