"""What the engine asks of whatever computes answers: a `Generator`, a `Summarizer` or a
`Classifier`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ingot.models.generation.request import Piece, Request


class Worker(Protocol):
    """Takes requests into a batch and works on it a step at a time; one thread alone calls it. A
    job is the worker's own name for a request.
    """

    def add(self, request: Request) -> Any:
        """Take a request in; answers its job."""
        ...

    def cancel(self, job: Any) -> None:
        """Forget a request; one that is finished already is ignored."""
        ...

    def clear(self) -> None:
        """Forget all."""
        ...

    def step(self) -> Sequence[tuple[Any, Piece]]:
        """Compute a little; pieces of jobs, each job's in order, the last one with its `finish`."""
        ...


@runtime_checkable
class Interruptible(Protocol):
    """A worker whose steps are long: it can be told while one runs that nobody waits for a job any
    more.
    """

    def interrupt(self, job: Any) -> None:
        """From any thread."""
        ...
