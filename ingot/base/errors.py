"""Errors with messages that a user can act on, each with the exit code that scripts rely on, and
the end of a process with such a code.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

T = TypeVar("T")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_KEEP = 3
EXIT_STOPPED = 75

NO_ROOM = {
    errno.ENOSPC: "disk full{}; make space",
    errno.EDQUOT: "disk full{}; make space",  # what this user may have of it
    errno.EFBIG: "no file may grow so large{}; lift the limit (`ulimit -f`)",
}
"""What is said, and is to be done, where a file finds no room; `{}` names the file."""


class IngotError(Exception):
    """The base of all errors that are shown as one line.

    The message names the thing, its value and where it is, then the next action.
    """

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        """The message with control characters (in a file name, key or value) escaped, since it is
        printed to a terminal.
        """
        return "".join(
            c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
            for c in super().__str__()
        )


class Failed(IngotError):
    """The environment failed: disk full, port taken, a process died. Trying again may help."""


class WrongInput(IngotError):
    """The request cannot be right: recipe, data, layout. Trying again unchanged cannot help."""

    exit_code = EXIT_WRONG_INPUT


class Stopped(IngotError):
    """Stopped by a signal. With a committed checkpoint the exit code is 75, and the same command
    resumes.
    """

    def __init__(self, message: str, *, signum: int, committed: bool) -> None:
        super().__init__(message)
        self.exit_code = EXIT_STOPPED if committed else 128 + signum

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled as it is: made without `__init__`, which asks for more than the message."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def some_of(items: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return between.join(map(str, items[:most])) + more


SHOWN = 200
"""Characters of a value that a message shows around its first difference from another one."""


def differing(one: T, other: T, *ways: Callable[[T], str]) -> tuple[str, str]:
    """Two values as texts that differ if the values do: formatted by the first of `ways` that tells
    them apart, else by `str`, `repr`, or `repr` with the type. Long texts are cut to the part
    around the first difference.
    """
    texts = "", ""
    more: tuple[Callable[[object], str], ...] = (str, repr, _typed)
    for way in (*ways, *more):
        texts = way(one), way(other)
        if texts[0] != texts[1] or one == other:
            break
    pairs = enumerate(zip(*texts, strict=False))
    at = next((place for place, (left, right) in pairs if left != right), min(map(len, texts)))
    first = max(0, at - SHOWN // 4) if max(map(len, texts)) > SHOWN else 0
    left, right = (
        ("..." if first else "")
        + text[first : first + SHOWN]
        + ("..." if len(text) > first + SHOWN else "")
        for text in texts
    )
    return left, right


def _typed(value: object) -> str:
    return f"{type(value).__name__} {value!r}"


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """End the process with its exit code, once that is decided.

    The code of a stop stands: Python gives handlers back before the process is gone, and the same
    request, come late from elsewhere (a launcher asks each node), would end it as killed.

    A daemon thread that is still inside a library written in C++ when the interpreter ends is
    unwound through code that allows no exception, and takes the process down with SIGABRT. Where
    one is left, the process ends without taking the interpreter apart; and where `at_once` is
    asked for.
    """
    if code == EXIT_STOPPED:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    if at_once or any(thread.daemon for thread in threading.enumerate()):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the other threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def one_line(error: object, most: int = 300, *, kind: bool = False) -> str:
    """What an error says, in one line of `most` characters; `kind`: behind the name of its type."""
    said = f"{type(error).__name__}: {error}" if kind else str(error)
    return " ".join(said.split())[:most]
