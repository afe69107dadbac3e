"""Traces ranks in processes of their own: a process group of another size, or another rank of it,
leaves traces in torch that only a new process is rid of.

This process imports no torch. It starts one that does, which forks for each trace: torch is
imported once, and no thread runs yet where it forks.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ingot.base.environment import usable_cores
from ingot.base.errors import Failed, WrongInput
from ingot.base.processes import own_python, preexec_die_with_parent
from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.plan.tracing.records import RankTrace

REQUESTS = "requests"


class TraceRequest(NamedTuple):
    """One rank to trace: the arguments of `ingot.plan.tracing.trace.trace_rank`."""

    recipe: Recipe
    world: int
    rank: int = 0
    kind: str = "cpu"


class Tracer:
    """A process that traces ranks. It is started at the first request and ends with the block.

    Raises:
        Failed: a rank cannot be traced, such as one whose model computes from contents.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def traces(self, requests: Sequence[TraceRequest]) -> list[RankTrace | WrongInput]:
        """The traces of all requests, as many at a time as there are cores; in place of one that
        does not fit together, what is wrong.
        """
        if not requests:
            return []
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="ingot-plan-") as name:
            folder = Path(name)
            (folder / REQUESTS).write_bytes(pickle.dumps(list(requests)))
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            with Progress("plan", len(requests), "traces") as progress:
                for done in range(1, len(requests) + 1):
                    if not process.stdout.readline():
                        break
                    progress.update(done)
            results = [_result(folder / str(number)) for number in range(len(requests))]
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WrongInput):
                raise result
        return results  # type: ignore[return-value]

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*own_python(), "-m", "ingot.plan.tracing.workers"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=preexec_die_with_parent(),
        )


def trace_all(requests: Sequence[TraceRequest]) -> list[RankTrace | WrongInput]:
    """The traces of all requests, as `Tracer.traces`."""
    with Tracer() as tracer:
        return tracer.traces(requests)


def _result(file: Path) -> RankTrace | Exception:
    try:
        found: RankTrace | Exception = pickle.loads(file.read_bytes())
        return found
    except FileNotFoundError:
        return Failed("a process that traced a rank ended early; is there memory for it?")


def _trace_to(file: Path, request: TraceRequest) -> None:
    from ingot.plan.tracing.trace import trace_rank

    result: RankTrace | Exception
    try:
        result = trace_rank(**request._asdict())
    except WrongInput as error:
        result = error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        result = Failed(f"this training cannot be traced ({type(error).__name__}: {reason})")
    file.write_bytes(pickle.dumps(result))


def main() -> None:
    """Trace all requests of each folder that is named on standard input."""
    import ingot.plan.tracing.trace  # noqa: F401 (once, before the forks)

    for line in sys.stdin:
        _trace_folder(Path(line.strip()))


def _trace_folder(folder: Path) -> None:
    """Trace all requests of a folder, each in a fork, and print a line for each that is done."""
    requests: list[TraceRequest] = pickle.loads((folder / REQUESTS).read_bytes())
    if any(request.world > 1 for request in requests):
        import ingot.parallel.schedules  # noqa: F401 (slow, and once before the forks as well)

    cores, running = usable_cores(), 0
    for number, request in enumerate(requests):
        if running == cores:
            _wait_for_one()
            running -= 1
        if os.fork() == 0:
            try:
                _trace_to(folder / str(number), request)
            finally:
                os._exit(0)
        running += 1
    for _ in range(running):
        _wait_for_one()


def _wait_for_one() -> None:
    os.wait()
    sys.stdout.write("\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
