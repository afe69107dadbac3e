"""Rows to batches of tensors: this rank's share of each global batch, made ahead of need. The one file of `data` with torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from ingot.config.shape import BatchPlan
from ingot.data.order import Order
from ingot.data.rows import IGNORE, Row, Rows


@dataclass(frozen=True)
class Batch:
    """A micro-batch, int64 tensors [B, T]; see `rows.Row` for what each holds. Dead rows have segments 0 and labels -100."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        tensors = (self.tokens, self.labels, self.positions, self.segments)
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


class Loader:
    """The micro-batches of any step, by its number alone: there is no position to save but that number.

    While a step runs, the next one's batches are made in a thread.

    Args:
        rows: what is trained on.
        order: which row is which sample.
        plan: how a global batch is dealt. Step i is samples [i * G, (i + 1) * G), rank r takes the r-th contiguous share.
        rank: whose share this is.
    """

    def __init__(self, rows: Rows, order: Order, plan: BatchPlan, rank: int) -> None:
        self._rows, self._order, self._plan, self._rank = rows, order, plan, rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def step(self, i: int) -> list[Batch]:
        """This rank's micro-batches of step `i`, all [micro_batch, T]; the last one is filled up with dead rows."""
        if self._next is not None and self._next[0] == i:
            batches = self._next[1].result()
        else:
            batches = self._make(i)
        self._next = (i + 1, self._thread.submit(self._make, i + 1))
        return batches

    def _make(self, i: int) -> list[Batch]:
        first = i * self._plan.global_batch + self._rank * self._plan.per_rank
        indices = self._order.rows(first, self._plan.per_rank)
        return list(fixed_batches(self._rows, indices.tolist(), self._plan.micro_batch))

    def close(self) -> None:
        """Stop making batches ahead."""
        self._next = None
        self._thread.shutdown(wait=True, cancel_futures=True)


def fixed_batches(rows: Rows, indices: Iterable[int], micro_batch: int) -> Iterator[Batch]:
    """Batches of exactly `micro_batch` rows in the order of `indices`; the last one is filled up with dead rows."""
    waiting: list[Row] = []
    for index in indices:
        waiting.append(rows.row(index))
        if len(waiting) == micro_batch:
            yield _stack(waiting)
            waiting = []
    if waiting:
        yield _stack([*waiting, *[_dead(rows.seq_len)] * (micro_batch - len(waiting))])


def _stack(rows: Sequence[Row]) -> Batch:
    return Batch(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))


def _dead(length: int) -> Row:
    return Row(*(np.full(length, fill, np.int64) for fill in (0, IGNORE, 0, 0)))
