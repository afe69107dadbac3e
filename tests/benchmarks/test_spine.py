"""The benchmarks still run: one small turn of every contender here, the program itself among the slow tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import spine
from benchmarks.turns import Contender, Result, Turn, Work, ratio, take_turns


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def test_both_training_contenders_do_the_same_work() -> None:
    ours, theirs = (make("llama-3m", 2, 8)() for make in (spine.train_ours, spine.train_transformers))
    assert ours.units == theirs.units == 16
    assert ours.found == pytest.approx(theirs.found, rel=1e-3)


def test_generation_contenders_give_as_many_tokens() -> None:
    for make in (spine.generate_ours, spine.generate_transformers):
        assert make("llama-3m", 2, 4, 3)().units == 6


def slowly(units: float) -> Work:
    return lambda: Turn(units, 1.0)


def finding(number: float) -> Work:
    return lambda: Turn(1.0, number)


def failing() -> Work:
    raise ValueError("no such thing")


def test_turns_give_a_rate_for_each_round() -> None:
    one, two = take_turns([Contender("one", slowly, (1.0,)), Contender("two", slowly, (1e3,))], 3, 1)
    assert len(one.rates) == len(two.rates) == len(one.cpu_seconds) == 3
    assert ratio(two, one)[0] > 1


def test_contenders_that_differ_or_fail_end_the_program() -> None:
    with pytest.raises(SystemExit, match=r"one 1\.0, two 1\.1"):
        take_turns([Contender("one", finding, (1.0,)), Contender("two", finding, (1.1,))], 1, 1)
    with pytest.raises(SystemExit, match="no such thing"):
        take_turns([Contender("one", failing)], 1, 1)


def test_ratios_are_taken_round_by_round() -> None:
    one, two = (Result("", rates, [], [], 0) for rates in ([2.0, 20.0, 6.0], [1.0, 5.0, 2.0]))
    assert ratio(one, two) == (3.0, 2.0, 4.0)


@pytest.mark.slow
def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "benchmarks.spine", "--quick", "--rounds", "1", "--write", "a-test"]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    path = Path("benchmarks/results/a-test.json")
    try:
        assert result.returncode == 0, result.stderr
        assert len(json.loads(path.read_text())["comparisons"]) == 4
    finally:
        path.unlink(missing_ok=True)
