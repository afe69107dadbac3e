"""The benchmarks still run: one small turn of every contender here, the program itself among the
slow tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import spine


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_both_training_contenders_do_the_same_work() -> None:
    ours, theirs = (
        make("llama-3m", 2, 8)() for make in (spine.train_ours, spine.train_transformers)
    )
    assert ours.units == theirs.units == 16
    assert ours.found == pytest.approx(theirs.found, rel=1e-3)


def test_generation_contenders_give_as_many_tokens() -> None:
    for make in (spine.generate_ours, spine.generate_transformers):
        assert make("llama-3m", 2, 4, 3)().units == 6


@pytest.mark.slow
def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.run",
        "--quick",
        "--rounds",
        "1",
        "--write",
        "a-test",
    ]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    path = Path("benchmarks/results/a-test.json")
    try:
        assert result.returncode == 0, result.stderr
        assert len(json.loads(path.read_text())["comparisons"]) == 9
    finally:
        path.unlink(missing_ok=True)
