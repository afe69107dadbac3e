"""How a task that ran elsewhere tells what it became: its result, or the error in words."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.data.engines.engine import Result, Task, Work


@dataclass(frozen=True)
class Outcome:
    """A task's result; or `error`, one of ours that is told in words and raised again where the
    command was typed.
    """

    result: Any = None
    error: str | None = None
    wrong_input: bool = False


def attempt(
    work: Work[Task, Any], numbered: Iterable[tuple[int, Task]], advance: Callable[[int], None]
) -> Iterator[tuple[int, Outcome]]:
    """Do some tasks in one worker. Errors that are no words of ours are raised: the engine may try
    the task again.
    """
    try:
        do = opened(work)
    except (WrongInput, Failed) as error:
        yield from (
            (number, Outcome(error=str(error), wrong_input=isinstance(error, WrongInput)))
            for number, _ in numbered
        )
        return
    for number, task in numbered:
        try:
            yield number, Outcome(do(task, advance))
        except (WrongInput, Failed) as error:
            yield number, Outcome(error=str(error), wrong_input=isinstance(error, WrongInput))


_last: list[tuple[bytes, Callable[[Any, Callable[[int], None]], Any]]] = []


def opened(work: Work[Task, Result]) -> Callable[[Task, Callable[[int], None]], Result]:
    """What does the tasks; opened anew only where this process did another stage before."""
    key = pickle.dumps(work)
    if not _last or _last[0][0] != key:
        _last[:] = [(key, work.open())]
    return _last[0][1]


def result_of(outcome: Outcome) -> Any:
    """The result, or the error raised again."""
    if outcome.error is not None:
        raise (WrongInput if outcome.wrong_input else Failed)(outcome.error)
    return outcome.result
