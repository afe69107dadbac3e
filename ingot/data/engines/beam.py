"""Does the work with an Apache Beam runner. Runs in the environment that apache-beam lives in (constraints-beam.txt)."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress
from ingot.base.storage import write_atomic
from ingot.data.engines.engine import Result, Task, Work
from ingot.data.engines.outcome import attempt, result_of

LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class BeamEngine:
    """One pipeline a stage: tasks in, each one's outcome as a small file in `folder`, which all workers see.

    Args:
        runner: Beam's runner.
        partitions: how many bundles a stage is cut into; 0: one for each task.
        options: Beam's pipeline options by name.
        folder: where outcomes lie until they are read; of this engine alone.
    """

    runner: str
    partitions: int
    options: dict[str, str] = field(default_factory=dict)
    folder: Path = Path("beam")

    def run(self, work: Work[Task, Result], tasks: Sequence[Task], progress: Progress) -> list[Result]:
        """See `Engine.run`."""
        beam, options = _beam(self)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        bundles = min(self.partitions or len(tasks), len(tasks))
        numbered = list(enumerate(tasks))
        pipeline = beam.Pipeline(runner=self.runner, options=options)
        shares = pipeline | beam.Create([numbered[share::bundles] for share in range(bundles)]) | beam.Reshuffle()
        _ = shares | beam.Map(_Bundle(work, self.folder))
        with ThreadPoolExecutor(1) as waiting:
            job = waiting.submit(lambda: pipeline.run().wait_until_finish())
            while not wait([job], timeout=LOOK_EVERY_S).done:
                progress.update(progress.done, parts=f"{sum(1 for _ in self.folder.iterdir())}/{len(tasks)}")
        try:
            job.result()
            outcomes = [pickle.loads((self.folder / str(number)).read_bytes()) for number in range(len(tasks))]
        except Exception as error:  # whatever the runner raises
            raise Failed(f"Beam gave up ({_last_line(error)}); see the log of its workers, or try data.engine.kind=local") from error
        shutil.rmtree(self.folder)
        return [result_of(outcome) for outcome in outcomes]

    def close(self) -> None:
        """Each stage ended its own pipeline."""


@dataclass(frozen=True)
class _Bundle:
    """Does some tasks in one worker and leaves their outcomes in the folder."""

    work: Work[Any, Any]
    folder: Path

    def __call__(self, numbered: Sequence[tuple[int, Any]]) -> None:
        for number, outcome in attempt(self.work, numbered, lambda _: None):
            write_atomic(self.folder / str(number), pickle.dumps(outcome))


def _last_line(error: Exception) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)[:300]


def _beam(engine: BeamEngine) -> tuple[Any, Any]:
    """The library and its options."""
    try:
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise WrongInput(
            f"data.engine.kind beam needs apache-beam, which lives in an environment of its own ({error}); `make beam` makes it, "
            f"then set data.engine.python to its interpreter"
        ) from error
    # Workers unpickle tasks by name, so a main module need not travel.
    return beam, PipelineOptions(flags=[], **{"save_main_session": False, **engine.options})
