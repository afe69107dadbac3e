"""Faults that trainers have had, each planted in the ranks of one case: the project's own code,
changed in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ingot.data.batches.loader import Batch
from ingot.models.parameters import local_tensor
from ingot.objectives import forward
from ingot.parallel import apply, masters
from ingot.parallel import rows as sharing
from ingot.parallel import tensor as vocabulary
from ingot.parallel.masters import Masters
from ingot.train import step
from ingot.verify.layout.recipe import SmallRun
from ingot.verify.layout.steps import RankResult, UnevenLoader, train_rank


def measure_with(shrunk: SmallRun, fault: str) -> RankResult:
    with FAULTS[fault]():
        return train_rank(shrunk)


def divided_twice() -> AbstractContextManager[Any]:
    """Summed gradients are averaged over the ranks that have other rows, once more than they should
    be.
    """
    collect = Masters.collect

    def wrong(self: Masters) -> None:
        collect(self)
        torch._foreach_div_(self.gradients, float(self.mesh.replicas.world))

    return patch.object(Masters, "collect", wrong)


def averages_taken_for_sums() -> AbstractContextManager[Any]:
    """DDP leaves averages; the factor that makes them sums is forgotten."""
    return patch.object(step, "sum_factor", lambda *given: 1.0)


def averaging_shards() -> AbstractContextManager[Any]:
    """FSDP averages as it does unless told otherwise."""
    return patch.multiple(
        FSDPModule,
        set_force_sum_reduction_for_comms=lambda self, on: None,
        set_gradient_divide_factor=lambda self, factor: None,
    )


def norm_of_this_rank() -> AbstractContextManager[Any]:
    """The norm counts what is here, not what the other ranks hold."""
    return patch.object(masters, "_sharded_axes", lambda parameter: ())


def norm_without_the_last_group() -> AbstractContextManager[Any]:
    """Of a parameter that is cut twice, the norm adds up along one axis only."""
    cut_along = masters._sharded_axes
    return patch.object(masters, "_sharded_axes", lambda parameter: cut_along(parameter)[:-1])


def partial_taken_for_whole() -> AbstractContextManager[Any]:
    """A rank's part of the sum (of a norm's weight, under sequence parallelism) is taken for the
    sum.
    """
    whole = masters._full_gradient

    def wrong(parameter: Any) -> Tensor:
        grad = parameter.grad
        if (
            isinstance(grad, DTensor)
            and grad.placements != parameter.placements
            and local_tensor(grad).shape == local_tensor(parameter).shape
        ):
            return DTensor.from_local(
                local_tensor(grad), parameter.device_mesh, parameter.placements, run_check=False
            )
        return whole(parameter)

    return patch.object(masters, "_full_gradient", wrong)


def twins_apart() -> AbstractContextManager[Any]:
    """The two copies of a tied embedding, at the ends of a pipeline, each keep their own
    gradient.
    """
    collect = Masters.collect

    def wrong(self: Masters) -> None:
        shared, self._shared = self._shared, frozenset()
        collect(self)
        self._shared = shared

    return patch.object(Masters, "collect", wrong)


def positions_anew() -> AbstractContextManager[Any]:
    """A rank numbers the tokens of its part of a row from 0."""
    cut = forward.shard_batch

    def wrong(batch: Batch, share: Any) -> Batch:
        mine = cut(batch, share)
        return replace(
            mine,
            positions=torch.arange(mine.positions.shape[1]).expand_as(mine.positions).contiguous(),
        )

    return patch.object(forward, "shard_batch", wrong)


def segments_whole() -> AbstractContextManager[Any]:
    """Ranks that share rows forget that a row holds several documents."""
    cut = forward.shard_batch
    return patch.object(
        forward,
        "shard_batch",
        lambda batch, share: replace(
            mine := cut(batch, share), segments=torch.ones_like(mine.segments)
        ),
    )


def rows_counted_twice() -> AbstractContextManager[Any]:
    """Ranks that share rows each train on the first part."""
    share = sharing.split_rows
    return patch.object(
        sharing,
        "split_rows",
        lambda tensor, rank, world, fill, **more: share(tensor, 0, world, fill, **more),
    )


def one_rank_s_vocabulary() -> AbstractContextManager[Any]:
    """The normaliser of the softmax is made from this rank's share of the vocabulary."""
    return patch.object(
        vocabulary.VocabParallelView, "_logsumexp", lambda self, logits: logits.logsumexp(dim=-1)
    )


def nothing_sharded() -> AbstractContextManager[Any]:
    """Every rank keeps all weights: the numbers are right, and nothing is saved."""
    return patch.object(apply, "_is_sharded", lambda *given: False)


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    fault.__name__: fault
    for fault in (
        divided_twice,
        averages_taken_for_sums,
        averaging_shards,
        norm_of_this_rank,
        norm_without_the_last_group,
        partial_taken_for_whole,
        twins_apart,
        positions_anew,
        segments_whole,
        rows_counted_twice,
        one_rank_s_vocabulary,
        nothing_sharded,
    )
}


def looked_at(shrunk: SmallRun) -> dict[str, Any]:
    """What a rank is given to train on."""
    seen: list[list[Batch]] = []
    taken = UnevenLoader.step

    def looking(self: UnevenLoader, i: int) -> list[Batch]:
        seen.append(taken(self, i))
        return seen[-1]

    with patch.object(UnevenLoader, "step", looking):
        measured = train_rank(shrunk)
    return {
        "targets": measured.targets,
        "micro_batches": len(seen[0]),
        "documents": max(int(batch.segments.max()) for batches in seen for batch in batches),
    }
