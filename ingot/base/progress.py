"""Messages and progress on stderr: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PLAIN_EVERY_S = 5.0


def say(message: str) -> None:
    """Print a line for the user on stderr; stdout is reserved for results."""
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
    """Shows the progress of a long step and the estimated time left.

    >>> with Progress("train", total=300, unit="steps") as progress:
    ...     progress.update(17, loss="3.20", tokens_per_s="9,100")

    `total` None if the end is not known. `done` may start above zero (a resumed step): the time
    left is estimated from what this process did itself.
    """

    def __init__(
        self, title: str, total: int | None, unit: str, *, done: int = 0, quiet: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.done, self.quiet = title, total, unit, done, quiet
        self._first, self._began, self._said = done, time.monotonic(), time.monotonic()
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            # Imported here: it takes 40 ms, which a rank that only prints lines need not spend.
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
        """`done` counts from zero over the whole step; `fields` are shown beside it."""
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
