"""Runs the work in the workers of Apache Spark (the API of Spark 3.5). The driver holds tasks and
their small results.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress
from ingot.data.engines.engine import (
    LOOK_EVERY_S,
    Result,
    Stage,
    Task,
    TaskOutcome,
    attempt,
    result_of,
)


@dataclass(frozen=True)
class SparkEngine:
    """One Spark application for all stages of a process.

    Args:
        master: Spark's master; None: taken from spark-submit or the environment.
        partitions: how many partitions a stage is divided into; 0: one per task.
        conf: further Spark settings.

    The workers need ingot installed, and the run folder at the same path (a shared disk) or work
    that is wrapped for a bucket (`shared.py`).
    """

    master: str | None = None
    partitions: int = 0
    conf: dict[str, str] = field(default_factory=dict)

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """See `Engine.run`."""
        if not tasks:
            return []
        context = _context(self)
        done, finished = context.accumulator(0), context.accumulator(0)

        def do(numbered: Iterable[tuple[int, Task]]) -> Iterator[tuple[int, TaskOutcome]]:
            for item in attempt(work, numbered, done.add):
                finished.add(1)
                yield item

        numbered = context.parallelize(
            list(enumerate(tasks)), min(self.partitions or len(tasks), len(tasks))
        )
        began = progress.done
        with ThreadPoolExecutor(1) as waiting:
            job = waiting.submit(numbered.mapPartitions(do).collect)
            try:
                while not wait([job], timeout=LOOK_EVERY_S).done:
                    progress.update(
                        began + done.value // 10**6, parts=f"{finished.value}/{len(tasks)}"
                    )
            except BaseException:
                context.cancelAllJobs()
                raise
        try:
            outcomes = dict(job.result())
        except Exception as error:  # errors of py4j and Spark
            raise Failed(
                f"Spark gave up ({_first_line(error)}); see the log of its workers, or try"
                " data.engine.kind=local"
            ) from error
        return [result_of(outcomes[number]) for number in range(len(tasks))]

    def close(self) -> None:
        """The application ends with this process; restarting it for another stage would take
        seconds.
        """


def _first_line(error: Exception) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )[:300]


def _context(engine: SparkEngine) -> Any:
    """The running application, or a new one."""
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError as error:
        raise WrongInput(
            f"data.engine.kind spark needs a package that is not installed ({error}); pip install"
            " 'ingot[spark]'"
        ) from error
    # Workers on this machine use this interpreter, others that of their image or PYSPARK_PYTHON.
    if (engine.master or "").startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf = (
        SparkConf()
        .setAppName("ingot prepare")
        .set("spark.ui.enabled", "false")
        .set("spark.ui.showConsoleProgress", "false")
    )
    if engine.master is not None:
        conf = conf.setMaster(engine.master)
    for name, value in engine.conf.items():
        conf = conf.set(name, value)
    return SparkContext.getOrCreate(conf)
