"""Differentiable collectives. Which of them fits depends on how the ranks use the result, since
that decides how gradients must be combined.

A group of None is a rank alone: nothing happens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_forward(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over a group; its gradient is handed on as it is.

    For partial results whose sum every rank goes on with in the same way: each then has the whole
    gradient already.
    """
    return x if group is None else _sum(x, group, True, False)


def sum_backward(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x` itself, the same on all ranks; its gradient is summed over the group.

    For what every rank goes on with in its own way: each then has a part of the gradient.
    """
    return x if group is None else _sum(x, group, False, True)


def sum_both(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over a group; its gradient is summed too.

    For ranks of which each makes its own loss from the sum: x is in the losses of all of them.
    Where they all make the same loss,
    it must be counted once: scale it by 1 over the size of the group.
    """
    return x if group is None else _sum(x, group, True, True)


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[W, ...]` -> `[W, ...]`: row j goes to rank j of the group, row i of the result came from
    rank i. W is the size of the group.
    """
    out: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensor of each rank, all of one shape. No gradient passes."""
    everyone = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(everyone, x.contiguous(), group=group)
    return everyone


def _sum(x: Tensor, group: ProcessGroup, forward: bool, backward: bool) -> Tensor:
    out: Tensor = _Sum.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, forward: bool, backward: bool) -> Tensor:
        ctx.group, ctx.backward_too = group, backward
        return _summed(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _summed(gradient, ctx.group) if ctx.backward_too else gradient, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # What came from rank i goes back to it: the exchange is its own mirror image.
        return _exchanged(gradient, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, x.contiguous(), group=group)
    return arrived
