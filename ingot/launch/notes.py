"""What a supervisor leaves in the run folder: events, and the stacks of ranks that it asks for.
None of it may stop a run.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import IngotError
from ingot.base.runlog import record_event
from ingot.launch.attempt import Attempt


def note(events: Path, kind: str, **about: Any) -> None:
    """Record an event, if the disk lets us."""
    with contextlib.suppress(OSError, IngotError):
        record_event(events, kind, **about)


def stacks_file(logs: Path, rank: int) -> Path:
    """Where a rank of a training writes the stacks of all its threads when it gets SIGUSR2."""
    return logs / f"stacks-rank{rank}.txt"


def ask_for_stacks(attempt: Attempt, logs: Path, ranks: Collection[int]) -> dict[int, Path]:
    """Have `ranks` write their stacks; the files of those that did. Only of ranks that gave a sign
    of life: SIGUSR2 ends any other process.
    """
    files = {rank: stacks_file(logs, rank) for rank in ranks if rank in attempt.running()}
    before = {rank: _stamp(path) for rank, path in files.items()}
    for rank in files:
        attempt.send(signal.SIGUSR2, rank)
    until = time.monotonic() + attempt.stacks_s
    while time.monotonic() < until and any(
        _stamp(path) == before[rank] for rank, path in files.items()
    ):
        time.sleep(0.05)
    time.sleep(0.1)  # what has begun to be written is soon there
    return {rank: path for rank, path in files.items() if _stamp(path) != before[rank]}


def told_stacks(files: Mapping[int, Path]) -> str:
    """The end of a line that tells of these ranks."""
    return (
        f"; stacks: {', '.join(str(path) for path in files.values())}"
        if files
        else "; it does not answer when asked for its stacks"
    )


def _stamp(path: Path) -> tuple[int, int]:
    """Its size alone would not do: a rank on another machine begins a file of its own."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
