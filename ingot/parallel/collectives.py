"""Differentiable collectives. Which one is right depends on how the ranks use the result, since
that decides how gradients are combined.

A group of None means a single rank: the tensor is returned unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_forward(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-reduce `x` over a group; the gradient passes through unchanged.

    For partial results whose sum every rank uses in the same way, so that each rank already has the
    whole gradient.
    """
    return x if group is None else _sum(x, group, True, False)


def sum_backward(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Identity forward for an `x` that is equal on all ranks; the gradient is all-reduced.

    For a value that every rank uses in its own way, so that each has a part of the gradient.
    """
    return x if group is None else _sum(x, group, False, True)


def sum_both(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-reduce `x` over a group, and its gradient too.

    For ranks that each compute a loss of their own from the sum: x is in the losses of all of them.
    If they all compute the same loss, scale it by 1 / group size so that it counts once.
    """
    return x if group is None else _sum(x, group, True, True)


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all, `[W, ...]` -> `[W, ...]` for a group of W ranks: row j is sent to rank j, and row
    i of the result was received from rank i.
    """
    out: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """All-gather tensors of one shape. Carries no gradient."""
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
        # What came from rank i returns to it: an all-to-all is its own inverse.
        return _exchanged(gradient, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    arrived = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(arrived, x.contiguous(), group=group)
    return arrived
