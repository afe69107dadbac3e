"""Every engine gives the same results in the same order, and the same errors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress
from ingot.data.engines.engine import Advance, Engine, attempt, result_of
from ingot.data.engines.local import LocalEngine
from ingot.data.engines.spark import SparkEngine
from tests.data.engines.places import SPARK, needs_spark
from tests.house.source import PROJECT
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class Squares:
    """A stage that squares numbers, and refuses one of them."""

    refused: int | None = None
    crashes: bool = False

    def open(self) -> Callable[[int, Advance], tuple[int, int]]:
        def square(task: int, advance: Advance) -> tuple[int, int]:
            advance(task * 10**6)
            if task == self.refused:
                raise WrongInput(f"{task} is refused")
            if self.crashes:
                raise ZeroDivisionError("a fault of the program")
            return task * task, os.getpid()

        return square


ENGINES = [
    pytest.param(LocalEngine(1), id="one process"),
    pytest.param(LocalEngine(2), id="two processes"),
    pytest.param(SparkEngine("local[2]", 1, SPARK), id="spark 1", marks=needs_spark),
    pytest.param(SparkEngine("local[2]", 7, SPARK), id="spark 7", marks=needs_spark),
]


@pytest.mark.parametrize("engine", ENGINES)
class TestEngine:
    def test_results_come_in_the_order_of_the_tasks(self, engine: Engine) -> None:
        with Progress("squares", None, "MB", quiet=True) as progress:
            assert [square for square, _ in engine.run(Squares(), list(range(20)), progress)] == [
                task * task for task in range(20)
            ]

    def test_no_tasks_are_no_results(self, engine: Engine) -> None:
        with Progress("squares", None, "MB", quiet=True) as progress:
            assert engine.run(Squares(), [], progress) == []

    def test_a_refusal_arrives_in_its_own_words(self, engine: Engine) -> None:
        with (
            Progress("squares", None, "MB", quiet=True) as progress,
            pytest.raises(WrongInput, match=r"^7 is refused$"),
        ):
            engine.run(Squares(refused=7), list(range(20)), progress)


@needs_spark
def test_work_happens_in_the_workers() -> None:
    for engine in (LocalEngine(2), SparkEngine("local[2]", 4, SPARK)):
        with Progress("squares", None, "MB", quiet=True) as progress:
            assert os.getpid() not in {
                pid for _, pid in engine.run(Squares(), list(range(8)), progress)
            }


@needs_spark
def test_a_fault_on_spark_is_one_line() -> None:
    with (
        Progress("squares", None, "MB", quiet=True) as progress,
        pytest.raises(Failed, match="Spark gave up") as failed,
    ):
        SparkEngine("local[2]", 2, SPARK).run(Squares(crashes=True), [1, 2], progress)
    assert "\n" not in str(failed.value)


def test_an_outcome_carries_the_kind_of_error() -> None:
    outcomes = dict(attempt(Squares(refused=2), [(0, 1), (1, 2)], lambda _: None))
    assert result_of(outcomes[0])[0] == 1
    with pytest.raises(WrongInput, match="2 is refused"):
        result_of(outcomes[1])


def squares_in_two(
    tmp_path: Path, *before: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script that has two workers, in a program that `before` starts."""
    script = tmp_path / "script.py"
    script.write_text(
        "print('begun')\n"
        "from ingot.base.progress import Progress\n"
        "from ingot.data.engines.local import LocalEngine\n"
        "from tests.data.engines.test_engines import Squares\n"
        "with Progress('squares', None, 'MB', quiet=True) as progress:\n"
        "    print([square for square, _ in LocalEngine(2).run(Squares(), [1, 2, 3], progress)])\n"
    )
    return subprocess.run(
        [*before, sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **variables},
        timeout=PATIENCE_S,
        check=False,
    )


def test_workers_do_not_run_the_callers_script(tmp_path: Path) -> None:
    """A script without a main guard would start itself again in every worker."""
    done = squares_in_two(tmp_path)
    assert done.stdout == "begun\n[1, 4, 9]\n", done.stderr


def test_workers_start_where_the_temporary_folder_has_a_long_path(tmp_path: Path) -> None:
    """As schedulers make one for each job: too long for the name of a socket."""
    folder = tmp_path / ("scratch-" * 12)
    folder.mkdir()
    done = squares_in_two(tmp_path, TMPDIR=str(folder))
    assert done.stdout == "begun\n[1, 4, 9]\n", done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="Linux mounts for one process alone")
@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=4k", "No space left on device"), ("ro", "Read-only file system")],
)
def test_workers_without_shared_memory_say_what_they_need(
    options: str, reason: str, tmp_path: Path
) -> None:
    fill = f"mount -t tmpfs -o {options} tmpfs /dev/shm && (head -c 4096 /dev/zero > /dev/shm/a; "
    done = squares_in_two(tmp_path, "unshare", "-m", "sh", "-c", fill + 'exec "$0" "$1")')
    if "begun" not in done.stdout:
        pytest.skip("mounting another /dev/shm needs root")
    told = done.stderr.splitlines()[-1]
    assert f"no shared memory ({reason}): /dev/shm must have room and be writable" in told
    assert told.endswith("or set data.engine.workers=1")
