"""`events.jsonl`: what happened to a run (start, save, failure, restart), from which goodput is
counted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.base.storage import disk_errors, fsync_folder


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON line; concurrent writers never mix within a line.

    A torn last line (a crash while appending) is closed first, so that it does not swallow this
    one.
    """
    line = (json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(
                descriptor, fcntl.LOCK_EX
            )  # else another writer's line may be seen half-way, and taken for torn
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(descriptor)


def flush_lines(path: Path) -> None:
    """Make the lines appended so far survive a crash of the machine; nothing where there is no
    file.

    Appending does not: a disk takes milliseconds for it. Whatever vouches for lines before it (a
    checkpoint for the metrics of its steps) calls this first.
    """
    with disk_errors(path), contextlib.suppress(FileNotFoundError):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        fsync_folder(path.parent)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects in a file of lines; torn lines (crashes while appending) are left out.
    Nothing where there is no file.
    """
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def record_event(
    path: Path,
    kind: str,
    *,
    attempt: int = 0,
    rank: int = 0,
    step: int | None = None,
    seconds: float | None = None,
    cause: str | None = None,
    **more: Any,
) -> None:
    """Append one event; `seconds` is how long it took, `cause` says in words why it happened."""
    event = {
        "t_wall": time.time(),
        "t_mono": time.monotonic(),
        "attempt": attempt,
        "rank": rank,
        "kind": kind,
        "step": step,
        "seconds": seconds,
        "cause": cause,
        **more,
    }
    append_line(path, event)
