"""Runs one operation on all ranks so that a failure on any rank is raised on every rank: no rank is
left waiting in a collective for one that failed.
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


def run_on_all(mesh: Mesh, each_rank: Callable[[], T], on_main: Callable[[Sequence[T]], R]) -> R:
    """Call `each_rank` on every rank, then `on_main` on rank 0 with all results in rank order, and
    return the result of `on_main` on every rank. Collective.

    If any call raises, every rank raises the exception of the lowest failing rank; `on_main` is not
    called when `each_rank` failed anywhere.
    """
    if mesh.world == 1:
        return on_main([each_rank()])
    value, error = _attempt(each_rank)
    everyone: list[tuple[T, Exception | None]] | None = (
        [(value, None)] * mesh.world if mesh.is_main else None
    )
    dist.gather_object((value, error), everyone, group=mesh.group, group_dst=0)
    # The exception of rank 0 is broadcast like its result.
    main_value, main_error = mesh.from_main(
        lambda: _attempt(lambda: on_main([_unwrap(*one) for one in everyone or []]))
    )
    return _unwrap(main_value, main_error)


def _attempt(call: Callable[[], T]) -> tuple[T, Exception | None]:
    """The result of a call, or the exception that it raised."""
    try:
        return call(), None
    except Exception as error:
        return None, picklable(error)  # type: ignore[return-value]  # `_unwrap` raises first


def describe_error(error: BaseException) -> str:
    """The message, with the class in front unless it is a bare RuntimeError."""
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"


def picklable(error: Exception) -> Exception:
    """The exception itself, or a RuntimeError with its text where it cannot be pickled for another
    rank. Its traceback is added as a note.
    """
    if not hasattr(error, "__notes__"):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        substitute = RuntimeError(describe_error(error))
        substitute.__notes__ = error.__notes__
        return substitute
    return error


def _unwrap(value: T, error: Exception | None) -> T:
    if error is not None:
        raise error
    return value
