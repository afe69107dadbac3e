"""Messages and progress on stderr: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ingot.base.environment import RESULTS_VARIABLE
from ingot.base.errors import NO_ROOM

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

PLAIN_EVERY_S = 5.0
BAR_WIDTH = 20
READER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)
"""Of a pipe or connection, of a connection that was cut, and of a terminal."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""All but tabs and line feeds; those that turn the direction of writing too."""


def visible(text: str) -> str:
    """A text of others, such as a name of a file, with its control characters as Python writes
    them: a terminal would obey them, and hide what stands there.
    """
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def say(message: str) -> None:
    """Print a line for the user on stderr; stdout is reserved for results."""
    print(visible(message), file=sys.stderr, flush=True)


def open_closed_streams() -> None:
    """Give what was started without stdin, stdout or stderr (`>&-`) an empty one: there would be
    nothing to flush, and the next file that is opened would get its number, and what is meant for
    the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: `number`
            os.set_inheritable(descriptor, True)
            # Open to the end, also where another stream takes its place.
            mode = "w" if number else "r"
            stream = os.fdopen(
                descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)


class _Outliving(io.FileIO):
    """A stream whose reader may go away: what is written after that goes nowhere. Where it has
    `messages` alone, what finds no room is lost too, and what comes once there is some is not.

    Unbuffered, as a handler of a signal may write while another write is under way.
    """

    def __init__(self, descriptor: int, *, messages: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._messages = messages

    def write(self, text: Any) -> int:
        left = memoryview(text).cast("B")
        while left:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                if self._messages and error.errno in NO_ROOM:
                    break
                if error.errno not in READER_GONE:
                    raise
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
        return len(text)


def outlive_reader() -> None:
    """From now on this process, and what it starts, goes on when nobody reads its stderr any more:
    a closed terminal, a lost connection, a `tee` that was ended by the same Ctrl-C; and when there
    is no room for it. A training that has a checkpoint to save must not die of a message, nor one
    that is done of its result: where stdout is the same file (`2>&1 | tee`), it has the same
    reader. A result that finds no room is still an error, unless it is only a message to whoever
    started this process.
    """
    messages, results = _is_open(sys.stderr), _is_open(sys.stdout)
    if messages and results and _are_one(sys.stdout, sys.stderr):
        sys.stdout = _outliving(sys.stdout, messages=RESULTS_VARIABLE in os.environ)
    if messages:
        sys.stderr = _outliving(sys.stderr, messages=True)


def _is_open(stream: TextIO | None) -> bool:
    """Whether it is a file of the system's: not closed from the start, nor a test's in memory."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() >= 0
    except (OSError, ValueError):
        return False


def _are_one(first: TextIO, second: TextIO) -> bool:
    return os.path.samestat(os.fstat(first.fileno()), os.fstat(second.fileno()))


def _outliving(stream: TextIO, *, messages: bool) -> TextIO:
    stream.flush()
    return io.TextIOWrapper(
        _Outliving(stream.fileno(), messages=messages),  # raw, as with python -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


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
        self._first, self._began = done, time.monotonic()
        self._said = self._moved = self._began
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            self._bar = _bar(self._count, self._left)
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.done, note=""
            )
        return self

    @property
    def is_watched(self) -> bool:
        """Whether a line on a terminal shows each `update`."""
        return self._bar is not None

    def update(self, done: int, **fields: str) -> None:
        """`done` counts from zero over the whole step; `fields` are shown beside it."""
        if done > self.done:
            self._moved = time.monotonic()
        self.done = done
        if self.quiet:
            return
        note = "  ".join(f"{key} {value}" for key, value in fields.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            parts = (f"{self.title} {self._count()}", note, self._left())
            say("  ".join(part for part in parts if part))

    def _count(self) -> str:
        of = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.done:,}{of} {self.unit}"

    def _left(self) -> str:
        """From the mean pace until the last update; what has passed since then is taken off."""
        made = self.done - self._first
        if self.total is None or made <= 0:
            return ""
        whole = (self._moved - self._began) / made * (self.total - self.done)
        return f"{duration(whole - (time.monotonic() - self._moved))} left"

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar(count: Callable[[], str], left: Callable[[], str]) -> Bar:
    """A line on stderr that a thread draws, so that the time goes on while a step takes long;
    `count` and `left` are asked for with each drawing.
    """
    # Imported here: it takes 40 ms, which a rank that only prints lines need not spend.
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Asked(ProgressColumn):
        def __init__(self, ask: Callable[[], str]) -> None:
            super().__init__()
            self._ask = ask

        def render(self, task: Task) -> Text:
            return Text(self._ask(), no_wrap=True)

    columns = (
        TextColumn("{task.description}"),
        Asked(count),
        BarColumn(bar_width=BAR_WIDTH),
        TextColumn("{task.fields[note]}", markup=False),
        Asked(left),
    )
    return Bar(*columns, console=Console(file=sys.stderr), transient=True)
