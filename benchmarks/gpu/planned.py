"""What `ingot plan` says of a training row, traced on this machine's processor for a device of the
kind that will run it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.steps import emulating, recipe_of
from ingot.plan.assemble import timed, traceable
from ingot.plan.place import place_of
from ingot.plan.ranges import Range
from ingot.plan.tracing.memory import plan_memory
from ingot.plan.unknown import Unknown

DEVICE = "BENCHMARK_DEVICE"
"""Environment variable: the device that is planned for, as CUDA or the plan calls it."""


def run(asked: Asked, record: Record, **knobs: Any) -> None:
    device = os.environ.get(DEVICE, "cpu")
    with tempfile.TemporaryDirectory() as name, emulating(asked):
        recipe = recipe_of(Path(name), tiny=asked.tiny, **knobs).at("train")
        place = place_of(recipe, device)
        memory = tuple(plan_memory(traceable(recipe, place, None), 1, place.type))
        step = timed(recipe, place, memory, Unknown("no documents: rows are made up"))
    rank = memory[0]
    record.figures(
        device=device,
        fits=rank.fit(place.device_bytes) if place.device_bytes is not None else "unknown",
        allocated_bytes=rank.trace.peak.total,
        device_bytes=plain(rank.peak),
        step_s={"unknown": step.needs} if isinstance(step, Unknown) else plain(step.total),
        parts={} if isinstance(step, Unknown) else parts_of(step),
    )


def plain(value: Range) -> dict[str, float]:
    return {"low": value.low, "likely": value.likely, "high": value.high}


def parts_of(step: Any) -> dict[str, float]:
    """Seconds of each kind of work, the likely ones."""
    names = ("matmul", "attention", "memory", "within", "loading")
    found = {name: getattr(step, name, None) for name in names}
    return {name: value.likely for name, value in found.items() if isinstance(value, Range)}
