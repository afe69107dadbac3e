"""What a step's time goes into, by operator: the least of several steps for each call, which is
close to its CPU time on one thread, however busy the machine is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders.turnstile import Turnstile
from ingot.train.step import StepInfo

Place = tuple[str, str]
"""A part of the step, and an operator in it."""

PARTS = {
    "ingot::cpu_attention": "attention",
    "ingot::cpu_attention_backward": "attention, backward",
    "scaled_dot_product": "attention",
    "_Summed": "head",
    "CompiledFunctionBackward": "layers, backward",
    "CompiledFunction": "layers",
    "Optimizer.step": "optimizer",
    "autograd::engine": "backward",
}
"""The part that an event and all below it belong to, by the beginning of its name."""


class Profiled:
    """The last hook: answers once with what so many steps after the second have in common."""

    def __init__(self, turnstile: Turnstile, steps: int) -> None:
        self.turnstile, self._steps = turnstile, steps
        self._found: list[dict[Place, list[float]]] = []
        self._trace: profile | None = None

    def after_step(self, info: StepInfo) -> bool:
        if self._trace is not None:
            self._trace.__exit__(None, None, None)
            self._found.append(calls_of(self._trace))
        if len(self._found) == self._steps:
            self.turnstile.answer(found=least(self._found))
            self.turnstile.wait()
        # The first steps compile, and map the memory that later ones use again.
        if info.step >= 1:
            self._trace = profile(activities=[ProfilerActivity.CPU])
            self._trace.__enter__()
        return False

    def close(self) -> None:
        pass


def calls_of(trace: profile) -> dict[Place, list[float]]:
    """The seconds of each call of each operator, without what it calls in turn."""
    made: dict[Place, list[float]] = defaultdict(list)
    for event in trace.events() or ():
        part, above = "", event
        while above is not None and not part:
            part = next((PARTS[name] for name in PARTS if above.name.startswith(name)), "")
            above = above.cpu_parent
        made[part or "other", _operator(event)].append(event.self_cpu_time_total / 1e6)
    return made


def _operator(event: Any) -> str:
    name: str = event.name.removeprefix("aten::")
    # The compiler's kernels are named after what they join, then numbered.
    return name.rstrip("0123456789_") if name.startswith(("cpp_fused", "graph_")) else name


def least(steps: Sequence[Mapping[Place, list[float]]]) -> list[tuple[str, str, float, int]]:
    """Part, operator, seconds and calls of a step, the longest first: of each call the least of all
    steps; of operators that are not called equally often the least sum.
    """
    found = [
        (*place, *_least_of(place, steps)) for place in {key for step in steps for key in step}
    ]
    return sorted(found, key=lambda row: -row[2])


def _least_of(place: Place, steps: Sequence[Mapping[Place, list[float]]]) -> tuple[float, int]:
    calls = [step[place] for step in steps if place in step]
    if len({len(each) for each in calls}) == 1:
        return sum(min(same) for same in zip(*calls, strict=True)), len(calls[0])
    return min(map(sum, calls)), min(map(len, calls))
