"""Messages and progress for a person, on stderr. A bar on a terminal, a plain line every few
seconds elsewhere.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PLAIN_EVERY_S = 5.0


def say(message: str) -> None:
    """One line to the person, on stderr: stdout is kept for results."""
    print(message, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`42s`, `3m 07s`, `2h 05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


class Progress:
    """Shows how far a long step is, and how long it will still take.

    >>> with Progress("train", total=300, unit="steps") as progress:
    ...     progress.update(17, loss="3.20", tokens_per_s="9,100")

    `total=None` when the end is not known. `done` may start above zero (a resumed step): the time
    left is reckoned from what this process did itself.
    """

    def __init__(
        self, title: str, total: int | None, unit: str, *, done: int = 0, quiet: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.done, self.quiet = title, total, unit, done, quiet
        self._first, self._began, self._said = done, time.monotonic(), time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            # 40 ms that whoever only says a line, as every rank does, need not wait for.
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.done, note=""
            )
        return self

    def update(self, done: int, **fields: str) -> None:
        """`done` counts from zero over the whole step; `fields` are shown beside it, as given."""
        self.done = done
        if self.quiet:
            return
        note = "  ".join(f"{key} {value}" for key, value in fields.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            of = f"/{self.total:,}" if self.total is not None else ""
            say(f"{self.title} {done:,}{of} {self.unit}{'  ' + note if note else ''}{self._left()}")

    def _left(self) -> str:
        made = self.done - self._first
        if self.total is None or made <= 0:
            return ""
        seconds = (time.monotonic() - self._began) / made * (self.total - self.done)
        return f"  {duration(seconds)} left"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
