"""A step shared by two processes through torchrun: one record, one result, the same numbers."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from ingot.base.reports import read_record
from ingot.base.runlog import read_lines
from ingot.config.load import dump_recipe
from tests.cli.commands import clean_environment, command, ingot
from tests.launch.blocking import wait_until
from tests.patience import PATIENCE_S
from tests.small import prepared, small_recipe
from tests.tolerances import SPLIT_LOSS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Data prepared, and a recipe with relative paths."""
    prepared(tmp_path)
    (tmp_path / "r.yaml").write_text(
        dump_recipe(small_recipe(tmp_path, checkpoint__every=2)).replace(f"{tmp_path}/", ""),
        encoding="utf-8",
    )
    return tmp_path


def _losses(root: Path) -> dict[int, float]:
    return {
        line["step"]: line["train/loss"] for line in read_lines(root / "runs/small/metrics.jsonl")
    }


@pytest.mark.drawn("a run with two processes")
def test_two_processes_train_as_one_does(root: Path) -> None:
    alone = ingot("train", "r.yaml", cwd=root)
    assert alone.returncode == 0, alone.stderr
    before = _losses(root)
    skipped = ingot("train", "r.yaml", "launch.processes=2", cwd=root)
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout.count("train: ") == 1
    assert "unchanged" in skipped.stderr
    together = ingot("train", "r.yaml", "launch.processes=2", "--fresh", cwd=root)
    assert together.returncode == 0, together.stderr
    assert "on 2 x CPU" in together.stderr
    assert together.stdout.count("train: 6 steps") == 1
    after = _losses(root)
    assert after.keys() == before.keys()
    assert max(abs(after[step] - before[step]) for step in before) < SPLIT_LOSS
    record = read_record(root / "runs/small/reports/steps", "train")
    assert record is not None
    assert (
        json.loads((root / "runs/small/model/ingot.json").read_bytes())["model_hash"]
        == record.outputs
    )


@pytest.mark.drawn("a run with two processes")
def test_two_processes_stop_with_a_checkpoint(root: Path) -> None:
    process = subprocess.Popen(
        command("train", "r.yaml", "launch.processes=2", "train.steps=100000"),
        cwd=root,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any((root / "runs/small/checkpoints").glob("*/COMMIT.json")), 120)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, err
    assert "committed; the same command goes on from there" in err
    assert "Traceback" not in err
    assert out == ""
