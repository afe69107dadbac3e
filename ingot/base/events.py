"""`events.jsonl`: what happened to a run (start, save, failure, restart), from which goodput is counted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line in a single write, so that concurrent writers never mix within a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines of a file that may end in a torn line (a crash while appending): that one is left out."""
    try:
        stream = open(path, "rb")
    except FileNotFoundError:
        return
    with stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def record_event(
    path: Path, kind: str, *, attempt: int = 0, rank: int = 0, step: int | None = None,
    seconds: float | None = None, cause: str | None = None, **more: Any,
) -> None:
    """Append one event; `seconds` is how long it took, `cause` says in words why it happened."""
    event = {"t_wall": time.time(), "t_mono": time.monotonic(), "attempt": attempt, "rank": rank, "kind": kind,
             "step": step, "seconds": seconds, "cause": cause, **more}
    append_line(path, event)
