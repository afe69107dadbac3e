"""Runs the work with an Apache Beam runner, in an environment with apache-beam
(constraints-beam.txt).
"""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress
from ingot.base.remote.bucket import open_bucket
from ingot.base.storage import write_atomic
from ingot.data.engines.engine import LOOK_EVERY_S, Result, Stage, Task, attempt, result_of
from ingot.data.engines.shared import AREA

LISTS = ("labels", "experiments", "dataflow_service_options")
"""Options that take several values, separated by commas."""
_one_bundle = threading.Lock()
"""Beam runs several bundles at a time in threads of one worker process, but per-process state (an
open stage, a working folder) serves one task at a time. Parallelism comes from processes.
"""


@dataclass(frozen=True)
class BeamEngine:
    """One pipeline per stage: tasks in, and each task's outcome as a small file in `folder`, which
    all workers must see.

    Args:
        runner: Beam's runner.
        partitions: how many bundles a stage is divided into; 0: one per task.
        options: Beam's pipeline options by name.
        folder: where outcomes are stored until they are read; used by this engine only.
        shared: address in a bucket used instead of `folder` if workers share no disk.
    """

    runner: str
    partitions: int
    options: dict[str, str] = field(default_factory=dict)
    folder: Path = Path("beam")
    shared: str | None = None

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """See `Engine.run`."""
        beam, options = _beam(self)
        outcomes = (
            _OnDisk(self.folder)
            if self.shared is None
            else _InBucket(f"{self.shared}/{AREA}/outcomes")
        )
        outcomes.empty()
        bundles = min(self.partitions or len(tasks), len(tasks))
        numbered = list(enumerate(tasks))
        pipeline = beam.Pipeline(runner=self.runner, options=options)
        shares = (
            pipeline
            | beam.Create([numbered[share::bundles] for share in range(bundles)])
            | beam.Reshuffle()
        )
        _ = shares | beam.Map(_Bundle(work, outcomes))
        with ThreadPoolExecutor(1) as waiting:
            job = waiting.submit(lambda: pipeline.run().wait_until_finish())
            while not wait([job], timeout=LOOK_EVERY_S).done:
                progress.update(progress.done, parts=f"{outcomes.count()}/{len(tasks)}")
        try:
            job.result()
            found = [pickle.loads(outcomes.get(number)) for number in range(len(tasks))]
        except Exception as error:  # whatever the runner raises
            raise Failed(
                f"Beam gave up ({_last_line(error)}); see the log of its workers, or try"
                " data.engine.kind=local"
            ) from error
        outcomes.empty()
        return [result_of(outcome) for outcome in found]

    def close(self) -> None:
        """Nothing to close: each stage ended its own pipeline."""


@dataclass(frozen=True)
class _OnDisk:
    """Outcomes as files of a folder that all workers see."""

    folder: Path

    def empty(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def put(self, number: int, outcome: bytes) -> None:
        write_atomic(self.folder / str(number), outcome)

    def get(self, number: int) -> bytes:
        return (self.folder / str(number)).read_bytes()

    def count(self) -> int:
        return sum(1 for _ in self.folder.iterdir()) if self.folder.exists() else 0


@dataclass(frozen=True)
class _InBucket:
    """Outcomes as objects in a bucket."""

    url: str

    def empty(self) -> None:
        bucket = open_bucket(self.url)
        for blob in bucket.list():
            bucket.delete(blob.name)

    def put(self, number: int, outcome: bytes) -> None:
        open_bucket(self.url).put(str(number), outcome)

    def get(self, number: int) -> bytes:
        return open_bucket(self.url).get(str(number))

    def count(self) -> int:
        return len(open_bucket(self.url).list())


@dataclass(frozen=True)
class _Bundle:
    """Runs a bundle of tasks in a worker and stores their outcomes; holds a lock, so that other
    bundles of the process wait.
    """

    work: Stage[Any, Any]
    outcomes: _OnDisk | _InBucket

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> None:
        with _one_bundle:
            for number, outcome in attempt(self.work, numbered, lambda _: None):
                self.outcomes.put(number, pickle.dumps(outcome))


def _last_line(error: Exception) -> str:
    return next(
        (line.strip() for line in reversed(str(error).splitlines()) if line.strip()),
        type(error).__name__,
    )[:300]


def _beam(engine: BeamEngine) -> tuple[Any, Any]:
    """The Beam module and the pipeline options."""
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise WrongInput(
            "data.engine.kind beam needs apache-beam, which lives in an environment of its own"
            f" ({error}); `make beam` makes it, then set data.engine.python to its interpreter"
        ) from error
    # Workers unpickle tasks by name, so the main module need not be shipped.
    return beam, PipelineOptions(flags=list(_flags(engine.options)), save_main_session=False)


def _flags(options: Mapping[str, str]) -> Iterator[str]:
    """Options as command-line flags, whose types Beam knows."""
    for name, value in options.items():
        for one in value.split(",") if name in LISTS else [value]:
            yield f"--{name}" if one == "true" else f"--{name}={one}"
