"""The interface of an engine: runs one stage of work over many tasks in any number of processes.

A task becomes a result by a pure function of the task and of files that every worker sees; large
results are files. So the output does not depend on the engine or on how it divides the work.
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
"""Called with the number of input bytes just processed. Raises `Failed` if the work is to stop."""


class Stage(Protocol[Task_contra, Result_co]):
    """One stage, picklable: what all its tasks share. A frozen dataclass of plain values."""

    def open(self) -> Callable[[Task_contra, Advance], Result_co]:
        """Called once in each worker process: opens what the tasks share and returns the function
        that runs one task.
        """
        ...


LOOK_EVERY_S = 0.5
"""Seconds between two looks at what tasks have done."""


class Engine(Protocol):
    """Runs all tasks of a stage. Results are small and returned in the order of the tasks."""

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """Raises what the work raises; Failed if a worker dies."""
        ...

    def close(self) -> None:
        """Stop the workers, if there are any."""
        ...


@dataclass(frozen=True)
class TaskOutcome:
    """A task's result, or the message of one of ingot's own errors, which is raised again in the
    command's process.
    """

    result: Any = None
    error: str | None = None
    wrong_input: bool = False


def attempt(
    work: Stage[Task, Any], numbered: Iterable[tuple[int, Task]], advance: Callable[[int], None]
) -> Iterator[tuple[int, TaskOutcome]]:
    """Run tasks in one worker. Errors other than ingot's own are raised: the engine may retry the
    task.
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
    """The function that runs a task of this stage; the last opened stage is cached."""
    key = pickle.dumps(work)
    if not _last or _last[0][0] != key:
        _last[:] = [(key, work.open())]
    return _last[0][1]


def result_of(outcome: TaskOutcome) -> Any:
    """The result; raises the error of a failed task."""
    if outcome.error is not None:
        raise (WrongInput if outcome.wrong_input else Failed)(outcome.error)
    return outcome.result
