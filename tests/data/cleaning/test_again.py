"""Cleaning is done once for the same inputs, goes on where it was stopped, and leaves nothing else
behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ingot.base.errors import Failed
from ingot.base.progress import Progress
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.data.cleaning import clean as stages
from ingot.data.engines.engine import Result, Stage, Task
from ingot.data.engines.local import LocalEngine
from tests.data.cleaning.small import cut, kept, small
from tests.data.cleaning.test_parity import KNOBS, TRAIN, VALIDATION
from tests.data.small import everything
from tests.patience import PATIENCE_S


@dataclass
class Counted:
    """Stops after so many tasks; counts what it did."""

    until: int = 10**9
    done: int = 0

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        do, results = work.open(), []
        for task in tasks:
            if self.done >= self.until:
                raise Failed("stopped")
            results.append(do(task, lambda _: None))
            self.done += 1
        return results


def files(made: Recipe) -> dict[str, str]:
    return everything(made.folder.data / "clean")


@pytest.mark.drawn("cleaning begun again")
def test_stopped_anywhere_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 20_000, 20_000, 20_000)
    made = small(tmp_path, TRAIN, VALIDATION, **KNOBS)
    whole = Counted()
    expected = kept(made, whole)
    written = files(made)
    for until in range(0, whole.done, 7):
        (made.folder.data / "clean" / stages.MARKER).unlink()
        first, second = Counted(until), Counted()
        with pytest.raises(Failed):
            kept(made, first)
        assert kept(made, second) == expected
        assert first.done + second.done == whole.done, "what was done is not done again"
        assert files(made) == written


def test_done_once(tmp_path: Path) -> None:
    made = small(tmp_path, TRAIN, VALIDATION, **KNOBS)
    expected, again = kept(made), Counted()
    assert kept(made, again) == expected
    assert again.done == 0
    assert pickle.loads(pickle.dumps(expected[0])) == expected[0]


def test_what_changes_is_done_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = small(tmp_path / "a", TRAIN[:50], exact=True)
    first, _ = kept(made)
    knobs, raw = (
        small(tmp_path / "a", TRAIN[:50], exact=True, min_chars=30),
        small(tmp_path / "b", TRAIN[:51], exact=True),
    )
    assert len({cleaned.identity for cleaned in (first, kept(knobs)[0], kept(raw)[0])}) == 3
    folder = made.folder.data / "clean"
    assert sorted(path.name for path in folder.iterdir()) == [
        stages.MARKER,
        f"fates-{kept(knobs)[0].identity}",
    ]
    monkeypatch.setattr(stages, "CODE", 0)
    assert kept(knobs, again := Counted())[0].identity != kept(made)[0].identity
    assert again.done > 0


def test_leftovers_are_swept_and_missing_files_made(tmp_path: Path) -> None:
    made = small(tmp_path, TRAIN, exact=True)
    kept(made)
    expected, folder = files(made), made.folder.data / "clean"
    (folder / "stages-0").mkdir()
    (folder / ".clean.json.partial-1").write_text("{")
    (folder / "stages-0" / "keys").write_bytes(b"gigabytes")
    kept(made)
    assert files(made) == expected
    next(iter(folder.glob("fates-*/*"))).unlink()
    kept(made)
    assert files(made) == expected


SCRIPT = """
import sys
from ingot.config.load import load_recipe
from ingot.data.raw import ranges
from ingot.data.raw import store as raw
from ingot.data.cleaning.clean import clean
from ingot.data.engines.local import LocalEngine

ranges.SMALLEST_BYTES = 20_000
if __name__ == "__main__":
    recipe = load_recipe([sys.argv[1]], environ={}, dotenv=None)
    opened = raw.open_raw(recipe)
    print("start", flush=True)
    clean(recipe, opened, LocalEngine(2))
    print("end", flush=True)
"""


@pytest.mark.drawn("cleaning begun again")
def test_killed_and_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, 20_000, 20_000, 20_000)
    made = small(tmp_path, TRAIN, VALIDATION, **KNOBS)
    expected = kept(made, LocalEngine(1))
    written, folder = files(made), made.folder.data / "clean"
    (folder / stages.MARKER).unlink()
    (tmp_path / "clean.py").write_text(SCRIPT)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(made))
    command = [sys.executable, str(tmp_path / "clean.py"), str(tmp_path / "recipe.yaml")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "start\n"
        until = time.monotonic() + PATIENCE_S
        while not list(folder.glob("stages-*/fuzzy/keys-*")) and time.monotonic() < until:
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1], "workers outlive their parent"
    assert list(folder.glob("stages-*/done/*/*"))
    assert not (folder / stages.MARKER).exists()
    assert kept(made, LocalEngine(1)) == expected
    assert files(made) == written
