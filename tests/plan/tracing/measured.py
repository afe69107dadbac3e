"""Reads the peak of memory from the events of torch's profiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SECOND = "the second step"
"""Name of the profiled region whose peak is asked for."""


def peak_of_events(events: Sequence[Any]) -> int:
    """The highest number of bytes that the CPU's allocator held during the region `SECOND`, of what
    was allocated since the profile began.
    """
    step = next(event for event in events if event.name() == SECOND)
    first, last = step.start_ns(), step.start_ns() + step.duration_ns()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    held = peak = 0
    for moment, change in changes:
        held += change
        if moment < first:
            peak = held
        elif moment <= last:
            peak = max(peak, held)
    return peak
