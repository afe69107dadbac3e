"""Averages of the weights (`train.average`): an exponentially decaying mean, kept beside the
optimizer's state and therefore sharded, saved and resumed with it, or the mean of checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.base.errors import Failed
from ingot.base.markers import problems
from ingot.checkpoints.reader import StoredTensors, WholeWeights
from ingot.checkpoints.state import MODEL, OPTIMIZER
from ingot.checkpoints.store import committed, is_due, step_folder
from ingot.config.sections.loop import Average
from ingot.parallel.masters import Master, Masters

AVERAGE, COUNT = "average", "average_step"
"""Keys of the optimizer's state: the mean of a parameter, float32, and how many steps are in it."""
YOUNG = 10
"""A mean of few steps forgets faster, or it would be little but the first weights for long: of n
steps it keeps at most the share (n + 1) / (n + YOUNG).
"""


def keep_average(optimizer: Optimizer, masters: Masters, decay: float) -> None:
    """Move the mean on after each of the optimizer's steps; one that was not taken (`found_inf` 1)
    leaves it alone. It begins with the weights after the first step; that of a weight whose layer
    was left out until now, with its first gradient.
    """

    @torch.no_grad()
    def after_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shares: dict[torch.device, Tensor] = {}
        for master in _averaged(optimizer, masters):
            state, now = optimizer.state[master.tensor], master.tensor.detach().float()
            here = now.device
            skipped = getattr(optimizer, "found_inf", None)
            taken = 1.0 if skipped is None else 1 - skipped.to(here)
            if here not in shares:
                young = (YOUNG - 1) / (state[COUNT] + YOUNG)
                shares[here] = young.clamp(min=1 - decay) * taken
            state[AVERAGE].lerp_(now, shares[here])
            state[COUNT] += taken

    optimizer.register_step_post_hook(after_step)


def _averaged(optimizer: Optimizer, masters: Masters) -> list[Master]:
    """The masters that have a mean, which begins here. One that the optimizer has not seen yet gets
    none: torch would take it for state that it made itself.
    """
    seen = [
        master
        for master in masters
        if optimizer.state.get(master.tensor) or master.tensor.grad is not None
    ]
    # All on a device have one count, since they share what is computed of it.
    counts = {
        master.tensor.device: state[COUNT]
        for master in seen
        if COUNT in (state := optimizer.state[master.tensor])
    }
    for master in seen:
        state, here = optimizer.state[master.tensor], master.tensor.device
        if AVERAGE not in state:
            state[AVERAGE] = master.tensor.detach().float().clone()
            state[COUNT] = counts[here].clone() if here in counts else torch.zeros((), device=here)
    return seen


def drop_average(optimizer: Optimizer) -> None:
    """Forget the mean that a checkpoint brought: without `train.average` it would stand still."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(COUNT, None)


@contextlib.contextmanager
def average_in_place(masters: Masters, optimizer: Optimizer) -> Iterator[None]:
    """Inside the block the model has the mean in place of its weights; a copy of those takes the
    memory of the gradients, which are gone between steps.
    """
    own: dict[Tensor, Tensor] = {
        master.tensor: master.tensor.detach().clone()
        for master in masters
        if AVERAGE in optimizer.state.get(master.tensor, {})
    }

    def give(values: dict[Tensor, Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
        masters.publish()

    give({tensor: optimizer.state[tensor][AVERAGE] for tensor in own})
    try:
        yield
    finally:
        give(own)


class NamedWeights(Protocol):
    """Whole weights by parameter name."""

    def __getitem__(self, name: str) -> Tensor: ...


class AveragedWeights(StoredTensors):
    """The decaying mean in a checkpoint, by parameter name; what no gradient trains has none and is
    as it is.
    """

    def __getitem__(self, name: str) -> Tensor:
        mean = f"{OPTIMIZER}{name}.{AVERAGE}"
        return super().__getitem__(mean if mean in self.names else MODEL + name)


class MeanOfWeights:
    """The mean of the weights of several checkpoints, one tensor at a time."""

    def __init__(self, folders: Collection[Path]) -> None:
        self._stored = [WholeWeights(folder) for folder in folders]

    def __getitem__(self, name: str) -> Tensor:
        first, *others = self._stored
        total = first[name].to(torch.float64)
        for one in others:
            total += one[name]
        return (total / len(self._stored)).float()


def averaged_steps(average: Average | None, checkpoints: Path, step: int) -> list[int]:
    """The checkpoints that the exported weights of `step` are made of, the newest first: its own
    and those before it that were due. What a signal had made is none, or the export would depend on
    whether training was interrupted.
    """
    if average is None or not average.export or average.kind == "ema":
        return [step]
    before = [
        found.step
        for found in committed(checkpoints)
        if found.step == step or (found.step < step and is_due(found.commit))
    ]
    return before[: average.checkpoints]


def stored_average(average: Average, checkpoints: Path, step: int) -> NamedWeights:
    """The average that is exported after `step`, from the checkpoints.

    Raises:
        Failed: another node wrote a part of them to its own disk.
    """
    if average.kind == "ema":
        return AveragedWeights(step_folder(checkpoints, step))
    steps = averaged_steps(average, checkpoints, step)
    for found in committed(checkpoints):
        if found.step in steps and (
            missing := problems(found.folder, found.commit, checksums=False)
        ):
            raise Failed(
                f"{found.folder}, a checkpoint of train.average, is not whole here"
                f" ({missing[0]}); set checkpoint.upload, or let all nodes share a disk"
            )
    return MeanOfWeights([step_folder(checkpoints, one) for one in steps])


@torch.no_grad()
def load_average(masters: Masters, stored: NamedWeights) -> None:
    """Give a model that is whole on this rank its average."""
    for master in masters:
        master.tensor.copy_(stored[master.name])
    for name, buffer in masters.buffers.items():
        buffer.copy_(stored[name])
    masters.publish()
