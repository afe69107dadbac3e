"""Rows into batches of tensors: this rank's share of each global batch, prefetched. The only file
of `data` that imports torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from ingot.base.errors import WrongInput
from ingot.base.markers import problems, read_marker
from ingot.config.shape import BatchPlan
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.prefetch import PartPrefetcher
from ingot.data.batches.rows import IGNORE, Ids, Rows
from ingot.data.batches.samples import Samples

AT_ONCE_TOKENS = 1 << 16
"""Micro-batches are made together up to this many tokens; made one by one, small ones would cost
more in overhead than in work.
"""
SPARE = 16


@dataclass(frozen=True)
class Batch:
    """A micro-batch of B rows, int64 tensors. `samples.RowArrays` describes the first four fields.
    Dummy rows, which fill up a batch, have segments 0 and labels -100.

    rows: the number of each row in its split, [B], -1 for dummy rows; empty where not given.
    ratings: of rated answers 1 where one is good, else 0, [B]; empty for all else.
    values: what an objective needs of each token beside its id, [B, T, C] float32; None for
    nothing.
    count: how many targets the batch stands for, where `values` are given and the objective does
    not count them itself.
    text: how many tokens are no padding, where segments do not tell; else None.
    causal: whether rows have padding behind their text only and are read by a model in which no
    token sees a later one.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    segments: torch.Tensor
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ratings: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    values: torch.Tensor | None = None
    count: int = 0
    text: int | None = None
    causal: bool = False

    @property
    def text_tokens(self) -> int:
        """Tokens of text, without padding; of pairs those of both sides. Asked on the host."""
        return int((self.segments > 0).sum()) if self.text is None else self.text

    @property
    def single_documents(self) -> bool:
        """Whether each row is a single document and needs no segment mask; asked on the host."""
        return self.causal or bool((self.segments == self.segments[:, :1]).all())

    def side(self, number: int) -> Batch:
        """The first (0) or second (1) row of each sample, of samples that are two rows."""
        return replace(
            self,
            tokens=self.tokens[number::2],
            labels=self.labels[number::2],
            positions=self.positions[number::2],
            segments=self.segments[number::2],
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        names = ("tokens", "labels", "positions", "segments", "rows", "ratings", "values")
        tensors = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{
                name: tensor.to(device, non_blocking=non_blocking)
                for name, tensor in tensors.items()
                if tensor is not None
            },
        )


class BatchSource(Protocol):
    """What a training takes its batches from."""

    def step(self, i: int, meanwhile: Callable[[], bool] = lambda: False) -> Sequence[Batch]:
        """This rank's micro-batches of step `i`, in host memory. While they are waited for,
        `meanwhile` is polled; once it returns True on any rank, the result may be empty.
        """
        ...

    def close(self) -> None: ...


class Loader:
    """The micro-batches of any step, as a function of the step number alone, which is therefore all
    the state that a checkpoint needs.

    While a step runs, one thread makes the next step's batches and another verifies the checksums
    of parts once they are first read; a mismatch ends training at its next step.

    Args:
        rows: the training rows.
        order: maps sample numbers to rows.
        plan: how a global batch G is divided. Step i is samples [i * G, (i + 1) * G); rank r takes
            the r-th contiguous share.
        rank: the rank whose share this loader yields.
    """

    def __init__(
        self, rows: Rows | Samples, order: SampleOrder, plan: BatchPlan, rank: int
    ) -> None:
        self._rows, self._order, self._plan, self._rank = rows, order, plan, rank
        self._memory = BatchBuffers()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._next: tuple[int, Future[list[Batch]]] | None = None
        self._checksums = ChecksumThread(rows, rank, plan.world)
        self._ahead = (
            PartPrefetcher(rows, order, plan.global_batch, quiet=rank != 0)
            if rows.deferred is not None and order.windowed
            else None
        )

    def step(self, i: int, meanwhile: Callable[[], bool] = lambda: False) -> list[Batch]:
        """This rank's micro-batches of step `i`, each of `micro_batch` rows; the last one is padded
        with dummy rows.

        While waiting for parts that have to be fetched from a bucket, `meanwhile` is polled; when
        it returns True, the result is empty and no sample was drawn.

        Raises:
            WrongInput: a part is damaged.
        """
        self._checksums.raise_if_damaged()
        if self._ahead is not None and not self._ahead.wait(i, meanwhile):
            return []
        if self._next is not None and self._next[0] == i:
            batches = self._next[1].result()
        else:
            batches = self._make(i)
        self._next = (i + 1, self._thread.submit(self._make, i + 1))
        return batches

    def _make(self, i: int) -> list[Batch]:
        first = i * self._plan.global_batch + self._rank * self._plan.per_rank
        indices = self._order.rows(first, self._plan.per_rank)
        samples = range(first, first + self._plan.per_rank)
        places = [self._order.place(sample) for sample in samples]
        size = self._plan.micro_batch
        return list(fixed_batches(self._rows, indices.tolist(), size, self._memory, places))

    def close(self) -> None:
        """Stop prefetching."""
        self._next = None
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._ahead is not None:
            self._ahead.close()
        self._checksums.close()


class ChecksumThread:
    """A thread that reads the files of parts in use and compares them with the checksums in their
    markers.

    The ranks divide the files among them. With one copy per node, part of each copy is therefore
    not verified: `ingot verify data` reads everything.
    """

    def __init__(self, rows: Rows | Samples, rank: int, world: int) -> None:
        self._rows, self._rank, self._world = rows, rank, world
        self._found: list[str] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="checksums", daemon=True)
        self._thread.start()

    def raise_if_damaged(self) -> None:
        """Raises WrongInput if a file was found to be damaged."""
        if self._found:
            raise WrongInput(f"{self._found[0]}; run `ingot prepare --again`")

    def _run(self) -> None:
        folder = self._rows.columns
        entries = [
            entry
            for name in self._rows.markers
            for entry in (read_marker(folder, name) or {}).get("files", [])
        ]
        mine = {folder / entry["path"]: entry for entry in entries[self._rank :: self._world]}
        while (path := self._rows.touched.get()) is not None and not self._stopped:
            if entry := mine.pop(path, None):
                self._found += problems(folder, {"files": [entry]}, checksums=True)

    def close(self) -> None:
        """Stop after the file that is being read."""
        self._stopped = True
        self._rows.touched.put(None)
        self._thread.join()


class BatchBuffers:
    """Reuses memory for batches once the last tensor in it is freed: mapping new pages costs more
    than filling them.
    """

    def __init__(self) -> None:
        self._spare: list[Ids] = []

    def tensor(self, *shape: int) -> torch.Tensor:
        """An uninitialised int64 tensor of `shape`."""
        count = int(np.prod(shape))
        room = self._spare.pop() if self._spare else np.empty(0, np.int64)
        if len(room) != count:
            room = np.empty(count, np.int64)
        # The tensor and all its slices share a storage, which keeps this one view alive.
        view = room.view()
        weakref.finalize(view, self._give_back, room).atexit = False
        return torch.from_numpy(view).view(shape)

    def _give_back(self, room: Ids) -> None:
        if len(self._spare) < SPARE:
            self._spare.append(room)


def fixed_batches(
    rows: Rows | Samples,
    indices: Iterable[int],
    micro_batch: int,
    memory: BatchBuffers | None = None,
    places: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Batches of exactly `micro_batch` rows in the order of `indices`; the last one is padded with
    dummy rows. `places`: where each stands in the sequence of training samples (`Samples.fields`).
    """
    if isinstance(rows, Samples):
        done = 0
        for some in _runs(indices, micro_batch):
            own = None if places is None else places[done : done + len(some)]
            done += len(some)
            tokens, labels, positions, segments = (
                torch.from_numpy(values) for values in rows.fields(some, micro_batch, own)
            )
            numbers, ratings = _numbers(some, micro_batch), rows.ratings(some, micro_batch)
            batch = Batch(tokens, labels, positions, segments, numbers, torch.from_numpy(ratings))
            if rows.writes:
                batch = replace(batch, text=batch.text_tokens + int((labels != IGNORE).sum()))
            yield batch
        return
    memory = BatchBuffers() if memory is None else memory
    at_once = max(1, AT_ONCE_TOKENS // (micro_batch * rows.seq_len)) * micro_batch
    for some in _runs(indices, at_once):
        size = -(-len(some) // micro_batch) * micro_batch
        made = memory.tensor(4, size, rows.seq_len)
        rows.batch(some, out=made[:, : len(some)].numpy())
        for values, dead in zip(made, (0, IGNORE, 0, 0), strict=True):
            values[len(some) :] = dead
        numbers = _numbers(some, size).split(micro_batch)
        yield from (
            Batch(*fields)
            for fields in zip(*(values.split(micro_batch) for values in made), numbers, strict=True)
        )


def _numbers(rows: Sequence[int], count: int) -> torch.Tensor:
    """Row numbers padded to `count` with -1 for dummy rows."""
    return torch.tensor([*rows, *[-1] * (count - len(rows))], dtype=torch.int64)


def _runs(indices: Iterable[int], count: int) -> Iterator[Sequence[int]]:
    """Yield `indices` in chunks of up to `count`."""
    waiting: list[int] = []
    for index in indices:
        waiting.append(index)
        if len(waiting) == count:
            yield waiting
            waiting = []
    if waiting:
        yield waiting
