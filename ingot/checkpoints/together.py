"""One act of all ranks whose failure on any of them is known to all of them: nobody is left waiting
for one who gave up.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from ingot.parallel.mesh import Mesh

T = TypeVar("T")
R = TypeVar("R")


def together(line: Mesh, mine: Callable[[], T], main: Callable[[Sequence[T]], R]) -> R:
    """`mine` on every rank, then `main` of all that came of it, in the order of ranks, on rank 0;
    what that gives, on every rank.

    What any of these raises is raised on every rank: that of the lowest one, and nothing is asked
    of rank 0 then.
    """
    if line.world == 1:
        return main([mine()])
    value, error = _tried(mine)
    everyone: list[tuple[T, Exception | None]] | None = (
        [(value, None)] * line.world if line.is_main else None
    )
    dist.gather_object((value, error), everyone, group=line.group, group_dst=0)
    # What rank 0 raises travels, too.
    value_there, error_there = line.from_main(
        lambda: _tried(lambda: main([_given(*one) for one in everyone or []]))
    )
    return _given(value_there, error_there)


def _tried(call: Callable[[], T]) -> tuple[T, Exception | None]:
    """What a call gives, or what it raises."""
    try:
        return call(), None
    except Exception as error:
        return None, portable(error)  # type: ignore[return-value]  # nobody takes it


def in_words(error: BaseException) -> str:
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"


def portable(error: Exception) -> Exception:
    """The error, or one that says the same where it cannot be sent to another rank; with its
    traceback as a note.
    """
    if not hasattr(error, "__notes__"):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(in_words(error))
        other.__notes__ = error.__notes__
        return other
    return error


def _given(value: T, error: Exception | None) -> T:
    if error is not None:
        raise error
    return value
