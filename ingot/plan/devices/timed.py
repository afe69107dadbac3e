"""Times the kernels that torch runs, and draws from them the curves of `coefficients`."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ingot.plan.devices.coefficients import Curve, is_narrow
from ingot.plan.tracing.meter import COLLECTIVES, describe
from ingot.plan.tracing.records import Operator

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
