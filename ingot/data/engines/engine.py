"""The face of an engine: one stage of work, done for many tasks by any number of processes
anywhere.

A task becomes a result by a pure function of the task and of files that every worker sees; larger
results are files. So which engine does the work, and how it deals it out, changes nothing in what
comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ingot.base.progress import Progress

Task = TypeVar("Task")
Result = TypeVar("Result")
Task_contra = TypeVar("Task_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)

Advance = Callable[[int], None]
"""Called with the bytes of input that were just done. Raises `Failed` where the work is to stop."""


class Work(Protocol[Task_contra, Result_co]):
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
        self, work: Work[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """Raises what the work raises; Failed where a worker dies."""
        ...

    def close(self) -> None:
        """Let go of workers, if there are any."""
        ...
