from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, record_event
from tests.report.made_up import made_up_run
from tests.ui.serving import Shown, showing


def runs_folder(root: Path) -> Path:
    """Made-up runs: two whole ones, one that failed, one below another folder."""
    output = root / "runs"
    for number, name in enumerate(("first", "second")):
        run = made_up_run(output, name, seed=number, bits=2.2 + number / 10)
        for step in (100, 200, 300):
            text = f"def -> main{step}(run{number})"
            append_line(run.metrics, {"step": step, "samples/0": text})
    failed = made_up_run(output, "failed", steps=40)
    for path in (failed.steps / "train.json", *failed.reports.glob("*.json")):
        path.unlink()
    record_event(failed.events, "failure", cause="train: disk full; make space and run it again")
    made_up_run(output / "more", "inner", steps=20)
    return output


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that no test changes."""
    return runs_folder(tmp_path_factory.mktemp("ui"))


@pytest.fixture(scope="session")
def shown(runs: Path) -> Iterator[Shown]:
    """A server that shows them."""
    with showing(runs) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "runs", "alone", steps=50)
