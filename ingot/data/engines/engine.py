"""The face of an engine: one stage of work, done for many tasks by any number of processes
anywhere.

A task becomes a result by a pure function of the task and of files that every worker sees; larger
results are files. So which engine does the work, and how it divides it, does not change the output.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress

Task = TypeVar("Task")
Result = TypeVar("Result")
Task_contra = TypeVar("Task_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)

Advance = Callable[[int], None]
"""Called with the bytes of input that were just done. Raises `Failed` where the work is to stop."""


class Stage(Protocol[Task_contra, Result_co]):
    """One stage, picklable: what is the same for all its tasks. A frozen dataclass of plain
    values.
    """

    def open(self) -> Callable[[Task_contra, Advance], Result_co]:
        """Called once in each worker process: opens what the tasks share and returns what does one
        task.
        """
        ...


class Engine(Protocol):
    """Does all tasks of a stage; results come in the order of the tasks and are small."""

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """Raises what the work raises; Failed where a worker dies."""
        ...

    def close(self) -> None:
        """Let go of workers, if there are any."""
        ...


@dataclass(frozen=True)
class TaskOutcome:
    """A task's result; or `error`, one of ours that is told in words and raised again where the
    command was typed.
    """

    result: Any = None
    error: str | None = None
    wrong_input: bool = False


def attempt(
    work: Stage[Task, Any], numbered: Iterable[tuple[int, Task]], advance: Callable[[int], None]
) -> Iterator[tuple[int, TaskOutcome]]:
    """Do some tasks in one worker. Errors that are no words of ours are raised: the engine may try
    the task again.
    """
    try:
        do = open_stage(work)
    except (WrongInput, Failed) as error:
        yield from (
            (number, TaskOutcome(error=str(error), wrong_input=isinstance(error, WrongInput)))
            for number, _ in numbered
        )
        return
    for number, task in numbered:
        try:
            yield number, TaskOutcome(do(task, advance))
        except (WrongInput, Failed) as error:
            yield number, TaskOutcome(error=str(error), wrong_input=isinstance(error, WrongInput))


_last: list[tuple[bytes, Callable[[Any, Callable[[int], None]], Any]]] = []


def open_stage(work: Stage[Task, Result]) -> Callable[[Task, Callable[[int], None]], Result]:
    """What does the tasks; opened anew only where this process did another stage before."""
    key = pickle.dumps(work)
    if not _last or _last[0][0] != key:
        _last[:] = [(key, work.open())]
    return _last[0][1]


def result_of(outcome: TaskOutcome) -> Any:
    """The result, or the error raised again."""
    if outcome.error is not None:
        raise (WrongInput if outcome.wrong_input else Failed)(outcome.error)
    return outcome.result
