"""What goes wrong, in words a person can act on. Each error carries the exit code that scripts rely
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_KEEP = 3
EXIT_STOPPED = 75


class IngotError(Exception):
    """The base of all errors that are shown as one line.

    Write the message as: the thing, the value, where it stands; then the next action.
    """

    exit_code = EXIT_FAILED

    def __str__(self) -> str:
        """The message with control characters (of a file name, a key, a value) spelt out: it goes
        to a terminal.
        """
        return "".join(
            c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
            for c in super().__str__()
        )


class Failed(IngotError):
    """The world failed us: disk full, port taken, a process that died. Trying again may help."""


class WrongInput(IngotError):
    """What was asked for cannot be right: recipe, data, layout. Trying again unchanged cannot
    help.
    """

    exit_code = EXIT_WRONG_INPUT


class Stopped(IngotError):
    """Stopped by a signal. With a committed checkpoint the code is 75, and the same command goes on
    from there.
    """

    def __init__(self, message: str, *, signum: int, committed: bool) -> None:
        super().__init__(message)
        self.exit_code = EXIT_STOPPED if committed else 128 + signum


SHOWN = 200
"""Characters of a value that a message shows around the first difference from another one."""


def differing(one: T, other: T, *ways: Callable[[T], str]) -> tuple[str, str]:
    """Two values as texts, which are not equal where the values are not: written in the first
    of `ways` that tells them apart, else with `str`, `repr`, or with their types. Of long texts the
    part around the first difference.
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
