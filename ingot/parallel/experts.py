"""Expert parallelism: the ranks of a group each hold a share of a layer's experts, and rows travel
to the experts that were chosen for them and back (Lepikhin et al. 2021).

An expert gets the rows of all ranks in the order of the ranks. What it makes of them, and its
gradient, therefore have the bits of one process that holds the rows of all ranks in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ingot.models.parameters import local_tensor


@dataclass(frozen=True)
class Route:
    """How the rows of one call travel. Rows arrive by (source, expert), and are computed by
    (expert, source).
    """

    group: ProcessGroup
    sent: list[int]
    """The number of rows for each rank."""
    arriving: list[int]
    """The number of rows from each rank."""
    order: Tensor
    """int64 `[S']`: of each computed row, its place among those that arrive."""
    back: Tensor
    """int64 `[S']`: of each row that arrives, its place among the computed ones."""


class RankExchange:
    """The exchange of one layer's rows among the ranks of `group`, in whose order they hold equal
    parts of the experts. Every rank must call it equally often, also with no rows.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._route = group, None

    _route: Route | None

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """rows `[S, D]`, sorted by expert, counts int64 `[N]` -> the rows of all ranks for this
        rank's experts `[S', D]`, sorted by expert and then by source rank, and their counts int64
        `[N / ranks]`. Waits for the device: the host must know how much is sent.
        """
        here = counts.view(dist.get_world_size(self._group), -1)  # [W, N / W]
        there = torch.empty_like(here)
        dist.all_to_all_single(there, here.contiguous(), group=self._group)
        sent, arriving = self.travelling(here, there, len(rows))
        order = order_by_expert(there, sum(arriving))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        self._route = Route(self._group, sent, arriving, order, back)
        return _moved(rows, self._route, True), there.sum(0)

    def travelling(self, here: Tensor, there: Tensor, rows: int) -> tuple[list[int], list[int]]:
        """Rows for each rank and from each rank; `here` and `there`: the counts of this rank's
        `rows` rows and of those that arrive, int64 `[W, N / W]` by rank and expert.
        """
        sent, arriving = torch.stack((here, there)).sum(-1).tolist()
        if sum(sent) != rows:
            raise ValueError(f"{rows} rows, but their experts' counts add up to {sum(sent)}")
        return sent, arriving

    def combine(self, rows: Tensor) -> Tensor:
        """rows `[S', D]`, computed from those of the last `dispatch` -> `[S, D]`, in the order that
        `dispatch` was given.
        """
        assert self._route is not None, "combine before dispatch"
        route, self._route = self._route, None
        return _moved(rows, route, False)

    def to_local(self, weights: Tensor) -> Tensor:
        """This rank's experts of a stacked parameter, as a plain tensor."""
        return local_tensor(weights)


def order_by_expert(counts: Tensor, total: int) -> Tensor:
    """The places of rows sorted by (expert, source) among rows sorted by (source, expert), int64
    `[total]`; counts `[sources, experts]`.
    """
    begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).T.flatten()
    sizes = counts.T.flatten()
    moved = begins - (sizes.cumsum(0) - sizes)
    return torch.arange(total, device=counts.device) + moved.repeat_interleave(
        sizes, output_size=total
    )


def _moved(rows: Tensor, route: Route, outward: bool) -> Tensor:
    out: Tensor = _Moved.apply(rows, route, outward)  # type: ignore[no-untyped-call]
    return out


class _Moved(torch.autograd.Function):
    """Rows to their experts (`outward`), or back from them; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, outward: bool) -> Tensor:
        ctx.route, ctx.outward = route, outward
        return _to_experts(rows, route) if outward else _from_experts(rows, route)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        move = _from_experts if ctx.outward else _to_experts
        return move(gradient, ctx.route), None, None


def _to_experts(rows: Tensor, route: Route) -> Tensor:
    arrived = rows.new_empty(len(route.order), *rows.shape[1:])
    dist.all_to_all_single(
        arrived, rows.contiguous(), route.arriving, route.sent, group=route.group
    )
    return arrived.index_select(0, route.order)


def _from_experts(rows: Tensor, route: Route) -> Tensor:
    returned = rows.new_empty(sum(route.sent), *rows.shape[1:])
    by_source = rows.index_select(0, route.back)
    dist.all_to_all_single(returned, by_source, route.sent, route.arriving, group=route.group)
    return returned
