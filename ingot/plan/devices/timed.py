"""Times the kernels that torch runs, what Python takes for an operator where a mode of torch or a
divided tensor is in between, and the loader, which makes rows from prepared columns as in training;
and draws from them the curves of `coefficients`.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ingot.base.markers import entry_of
from ingot.base.progress import Progress
from ingot.config.sections.objective import Documents
from ingot.data.batches.loader import BatchBuffers, fixed_batches
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import open_rows
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import (
    ColumnPart,
    PreparedData,
    PreparedSource,
    column_dtype,
    read_prepared,
    write_prepared,
)
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import pack
from ingot.parallel.mesh import Mesh
from ingot.parallel.recompute import keep_matmuls
from ingot.plan.devices.coefficients import Curve, is_narrow
from ingot.plan.loading import DOCUMENT
from ingot.plan.ranges import Range
from ingot.plan.tracing.meter import COLLECTIVES, describe
from ingot.plan.tracing.records import DISPATCH, SPREAD, Operator
from ingot.plan.tracing.stand_ins import counted_dispatches

Seconds = tuple[float, float, float]


class TimedKernel(NamedTuple):
    """A call of a kernel and how long it took: the shortest, the median, the upper quartile."""

    operator: Operator
    seconds: Seconds


@dataclass(frozen=True)
class TimedStep:
    """The kernels of a step, and the seconds beyond them, of which each kernel has the same share:
    calls, views, autograd.
    """

    kernels: list[TimedKernel]
    call_s: float


class KernelTimer(TorchDispatchMode):
    """Times every operator that computes while it is active, in order."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.calls: list[tuple[Operator, float]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        began = now(self._device)
        result = func(*args, **(kwargs or {}))
        took = now(self._device) - began
        if func.namespace not in COLLECTIVES and not _is_view(func, args, result):
            self.calls.append((describe(func, args, kwargs or {}, result), took))
        return result


def _is_view(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    if func._schema.is_mutable:
        return False
    there = {one.untyped_storage()._cdata for one in tree_leaves(args) if isinstance(one, Tensor)}
    made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    return all(one.untyped_storage()._cdata in there for one in made)


def now(device: torch.device) -> float:
    """Seconds, when all that was asked of the device is done. Of a single thread of a CPU, those in
    which it ran: other processes disturb them less.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()


def timed_step(
    recorded: Sequence[Sequence[tuple[Operator, float]]],
    whole: Sequence[float],
    device: torch.device,
) -> TimedStep:
    kernels = [
        TimedKernel(calls[0][0], spread([took for _, took in calls]))
        for calls in zip(*recorded, strict=True)
    ]
    # Waiting for an accelerator takes time itself, which the shortest kernel shows.
    idle = 0.0 if device.type == "cpu" else min(one.seconds[0] for one in kernels)
    kernels = [
        TimedKernel(one.operator, spread(max(0.0, took - idle) for took in one.seconds))
        for one in kernels
    ]
    beyond = statistics.median(whole) - sum(one.seconds[1] for one in kernels)
    return TimedStep(kernels, max(0.0, beyond / len(kernels)))


def spread(times: Iterable[float]) -> Seconds:
    """The shortest, the median, the upper quartile."""
    known = sorted(times)
    return known[0], statistics.median(known), known[3 * len(known) // 4]


class TimedWork(NamedTuple):
    """A point of a curve; heavier ones count more where several are taken together."""

    work: float
    seconds: Seconds
    weight: float = 1.0


def draw_curves(steps: Sequence[TimedStep], call_s: float) -> dict[str, Curve]:
    """The curve of each kind: means over kernels with about the same work, plus the call."""
    bins: dict[str, dict[int, list[TimedWork]]] = defaultdict(lambda: defaultdict(list))
    for one in (kernel for step in steps for kernel in step.kernels):
        kind, timed = _timed_work(one)
        if timed.work:
            bins[kind][round(math.log2(timed.work))].append(timed)
    return {
        kind: _curve([found[at] for at in sorted(found)], 0 if "attending" in kind else call_s)
        for kind, found in bins.items()
    }


def _timed_work(kernel: TimedKernel) -> tuple[str, TimedWork]:
    """The curve to which a kernel belongs, and its point."""
    operator, seconds = kernel
    # Integers and booleans are as rare as small: they count as float32.
    dtype = "bfloat16" if operator.dtype == "bfloat16" else "float32"
    if operator.kind == "attention":
        low, likely, high = (took / operator.bytes for took in seconds)
        point = TimedWork(operator.flops / operator.bytes, (low, likely, high), operator.bytes)
        return f"attending {dtype}", point
    if is_narrow(operator):
        return f"narrow {dtype}", TimedWork(operator.bytes, seconds)
    work = operator.flops if operator.kind == "matmul" else float(operator.bytes)
    return f"{operator.kind} {dtype}", TimedWork(work, seconds)


def _curve(bins: Sequence[Sequence[TimedWork]], call_s: float) -> Curve:
    weights = [sum(one.weight for one in found) for found in bins]

    def means(values: Callable[[TimedWork], float]) -> list[float]:
        return [
            sum(values(one) * one.weight for one in found) / weight
            for found, weight in zip(bins, weights, strict=True)
        ]

    works = means(lambda one: one.work)
    low, likely, high = (
        rising(means(lambda one, at=at: one.seconds[at] + call_s), weights)  # type: ignore[misc]
        for at in range(3)
    )
    # Less work than was measured takes no longer, and at least a call.
    none = (call_s, (call_s + likely[0]) / 2, high[0])
    points = zip(works, zip(low, likely, high, strict=True), strict=True)
    return Curve(((0.0, none), *points), "measured")


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values of which none is smaller than the one before, by weighted squares: runs
    that fall are replaced by their mean.
    """
    runs: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        runs.append((value, weight, 1))
        while len(runs) > 1 and runs[-2][0] > runs[-1][0]:
            (first, w1, n1), (second, w2, n2) = runs[-2:]
            runs[-2:] = [((first * w1 + second * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return [value for value, _, count in runs for _ in range(count)]


VOCAB = 30_000
LENGTHS = (128, 1024, 8192)
"""Tokens in a row."""
SHORT = 32
"""Tokens of a document, of which many lie in a row."""
TOKENS = 400_000
"""In a column: enough for some steps, and written in a hundredth of a second."""
ROWS, MICRO_BATCH = 32, 4
"""Of a measured step."""
COLUMNS: dict[str, tuple[Documents, tuple[str, ...]]] = {
    "loading text": ("text", ("tokens",)),
    "loading chat": ("chat", ("tokens", "mask")),
    "loading samples": (
        "preference",
        ("chosen", "chosen_mask", "rejected", "rejected_mask"),
    ),
}


def loading_curves(counted: int) -> dict[str, Curve]:
    """Seconds of one row of each kind against its tokens, a row being one document, and of each
    further document in it; `counted` steps each.
    """
    curves = {}
    for name, (documents, columns) in COLUMNS.items():
        sides = 2 if documents == "preference" else 1
        times = [_row_seconds(documents, columns, T, T, counted) for T in LENGTHS]
        low, likely, high = (rising([one[at] for one in times], [1.0] * 3) for at in range(3))
        points = zip(
            (float(sides * T) for T in LENGTHS), zip(low, likely, high, strict=True), strict=True
        )
        # A short row takes no longer than the shortest that was measured.
        curves[name] = Curve(((0.0, (0.0, likely[0], high[0])), *points), "measured")
    longest = LENGTHS[-1]
    alone = curves["loading text"].seconds(longest).likely
    many = _row_seconds(*COLUMNS["loading text"], longest, SHORT, counted)
    first, middle, last = (max(0.0, one - alone) / (longest / SHORT - 1) for one in many)
    curves[DOCUMENT] = Curve(tuple((at, (first, middle, last)) for at in (0.0, 1.0)), "measured")
    return curves


def _row_seconds(
    documents: Documents, columns: Sequence[str], seq_len: int, length: int, counted: int
) -> Seconds:
    """Seconds of the processor for a row of `seq_len` tokens, of documents of `length` tokens."""
    with tempfile.TemporaryDirectory(prefix="ingot-load-") as name:
        folder = Path(name)
        _write(folder, documents, columns, length)
        how = "none" if documents == "preference" else "best_fit"
        quiet = Progress("pack", None, "MB", quiet=True)
        pack(folder, read_prepared(folder), seq_len, how, LocalEngine(1), quiet)
        rows = open_rows(folder, "train", seq_len, pack=how, pad_last=False)
        order, memory, times = SampleOrder(rows.sizes, 0), BatchBuffers(), []
        for step in range(counted + 1):
            began = time.thread_time()
            indices = order.rows(step * ROWS, ROWS).tolist()
            for _ in fixed_batches(rows, indices, MICRO_BATCH, memory):
                pass
            times.append((time.thread_time() - began) / ROWS)
        return spread(times[1:])


def _write(folder: Path, documents: Documents, columns: Sequence[str], length: int) -> None:
    """Columns of documents of random tokens, all of which are trained."""
    random, count, entries, kinds = np.random.default_rng(0), max(64, TOKENS // length), [], []
    for name in columns:
        dtype = column_dtype(name, VOCAB)
        below = (1, 2) if name.endswith("mask") else (1, VOCAB)
        prefix = column_prefix(folder, "train", name, 0)
        with ColumnWriter(prefix, dtype) as writer:
            writer.append(random.integers(*below, count * length), np.full(count, length, np.int64))
        entries += [entry_of(folder, path.name) for path in (bin_path(prefix), idx_path(prefix))]
        kinds.append({"name": name, "dtype": dtype.name})
    tokens = count * length
    part = ColumnPart(0, count, tokens, 0, "0")
    source = PreparedSource("random", 1.0, count, tokens, 0, [part])
    made = PreparedData(
        documents,
        kinds,
        {"train": [source]},
        "none",
        None,
        VOCAB,
        {"train": "random"},
        {"train": "random"},
    )
    write_prepared(folder, made, {}, entries)


CHAIN = 200
"""Operators in a row, forward, and as many in backward, to time what Python takes for one."""


def host_curves(mesh: Mesh, counted: int) -> dict[str, Curve]:
    """Seconds of one operator more than of the same without what is in between; `counted` runs."""
    found = {DISPATCH.kind: _dispatching(counted)}
    if mesh.world > 1:
        found[SPREAD.kind] = _dividing(mesh, counted)
    return found


def _chain(x: Tensor) -> Tensor:
    for _ in range(CHAIN):
        x = x * 1.0001
    return x


def _dispatching(counted: int) -> Curve:
    x, asked = torch.ones(8, requires_grad=True), 0
    alone = partial(checkpoint, _chain, x, use_reentrant=False, preserve_rng_state=False)
    contexts = partial(create_selective_checkpoint_contexts, keep_matmuls)

    def note() -> None:
        nonlocal asked
        asked += 1

    with counted_dispatches(note):
        alone(context_fn=contexts).sum().backward()
    return _difference(
        lambda: alone(context_fn=contexts).sum().backward(),
        lambda: alone().sum().backward(),
        asked,
        counted,
    )


def _dividing(mesh: Mesh, counted: int) -> Curve:
    """Collective, though nothing is sent."""
    devices = init_device_mesh(mesh.device.type, (mesh.world,))
    plain = torch.ones(8, requires_grad=True)
    held = DTensor.from_local(torch.ones(8), devices, [Replicate()]).requires_grad_()

    def run(x: Tensor) -> None:
        y = _chain(x)
        y.backward(torch.ones_like(y))

    return _difference(lambda: run(held), lambda: run(plain), 2 * CHAIN, counted)


def _difference(
    more: Callable[[], object], less: Callable[[], object], operators: int, counted: int
) -> Curve:
    """Of two runs in turn, in seconds of the processor, for each operator."""

    def took(run: Callable[[], object]) -> float:
        began = time.thread_time()
        run()
        return time.thread_time() - began

    took(more), took(less)
    each = [max(0.0, took(more) - took(less)) / operators for _ in range(counted)]
    return Curve.flat(Range.of(spread(each), "measured"))
