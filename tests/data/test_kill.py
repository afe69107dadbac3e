"""`kill -9` at any moment; the same command then gives the bytes that an undisturbed run gives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from tests.data.small import everything, recipe, sentences, write_jsonl
from tests.patience import PATIENCE_S

SCRIPT = """
import sys
from ingot.config.load import load_recipe
from ingot.data.raw import ranges
from ingot.data.raw import store as raw
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare

raw.GROUP_BYTES, raw.PART_BYTES, ranges.SMALLEST_BYTES = 20_000, 200_000, 60_000
if __name__ == "__main__":
    recipe = load_recipe([sys.argv[1]], environ={}, dotenv=None)
    print("start", flush=True)
    ingest(recipe)
    prepare(recipe)
    print("end", flush=True)
"""


def small(root: Path) -> Recipe:
    source = write_jsonl(root / "in" / "a.jsonl", sentences(4000))
    return recipe(root, source, data__engine__workers=2)


def start(root: Path, made: Recipe) -> subprocess.Popen[str]:
    (root / "verbs.py").write_text(SCRIPT)
    (root / "recipe.yaml").write_text(dump_recipe(made))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(root / "verbs.py"), str(root / "recipe.yaml")]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    """What a run that nobody disturbs writes, and the seconds it takes from its first word on."""
    root = tmp_path_factory.mktemp("undisturbed")
    made = small(root)
    process = start(root, made)
    assert process.stdout is not None
    assert process.stdout.readline() == "start\n"
    began = time.monotonic()
    assert process.stdout.readline() == "end\n"
    seconds = time.monotonic() - began
    assert process.wait() == 0
    return comparable(made), seconds


def comparable(made: Recipe) -> dict[str, str]:
    """All files but the one with the sources' own paths and times."""
    return {
        path: digest
        for path, digest in everything(made.folder.root / "data").items()
        if path not in ("raw/manifest.json", "columns/manifest.json")
    }


@pytest.mark.drawn("a kill while data is made")
@pytest.mark.parametrize("moment", [0.05, 0.5, 0.85])
def test_killed_and_run_again(
    tmp_path: Path, undisturbed: tuple[dict[str, str], float], moment: float
) -> None:
    expected, seconds = undisturbed
    made = small(tmp_path)
    process = start(tmp_path, made)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(moment * seconds)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive, "workers outlive their parent"
    again = start(tmp_path, made)
    again.communicate()
    assert again.returncode == 0
    assert comparable(made) == expected


def with_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until the process has workers that work."""
    assert process.stdout is not None
    process.stdout.readline()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        # Workers are forked by a child, whose only business that is.
        children = psutil.Process(process.pid).children()
        if len(workers := [worker for child in children for worker in child.children()]) == 2:
            return workers
        time.sleep(0.02)
    raise AssertionError("no workers were started")


@pytest.mark.drawn("workers that end early")
def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    made = small(tmp_path)
    process = start(tmp_path, made)
    with_workers(process)[0].kill()
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode
    assert "a worker process died, perhaps for want of memory; run the same command again" in told


@pytest.mark.drawn("workers that end early")
def test_interrupted_workers_stop_at_once(tmp_path: Path) -> None:
    made = small(tmp_path)
    process = start(tmp_path, made)
    workers = with_workers(process)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.wait(timeout=PATIENCE_S)
    assert time.monotonic() - began < 30
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive
    assert not (made.folder.columns / "manifest.json").exists()
