"""Compiled layers: the same numbers and names, one compilation for equal layers, with all that
wraps them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from ingot.parallel.apply import CACHE, keep_compiled
from tests import tolerances
from tests.parallel.wrapped_run import Case, Result, run_case, run_cases
from tests.ranks import run_ranks
from tests.train.test_step import distance


def assert_near(result: Result, wanted: Result) -> None:
    assert result.losses == pytest.approx(wanted.losses, rel=tolerances.LOSS_FP32)
    assert result.norms == pytest.approx(wanted.norms, rel=tolerances.SPLIT_LOSS)
    assert distance(result.weights, wanted.weights) < tolerances.SPLIT_WEIGHTS
    assert result.names == wanted.names


def compiled_once(case: Case) -> None:
    torch._dynamo.reset()
    counters.clear()
    assert_near(run_case(replace(case, compiled=True)), run_case(case))
    assert counters["stats"]["unique_graphs"] == 1, "five equal layers are one graph"
    assert not counters["graph_break"]


@pytest.mark.drawn("compiled layers")
def test_equal_layers_are_compiled_once() -> None:
    compiled_once(Case(steps=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        {"recompute": {"kind": "full"}},
        {"recompute": {"kind": "selective"}},
        {"recompute": {"kind": "full", "layers": 2}},
        {"offload": {"activations": True}},
    ],
)
def test_compiled_layers_save_memory_as_others_do(memory: dict[str, Any]) -> None:
    compiled_once(Case(steps=2, memory=memory))


@pytest.mark.drawn("compiled layers")
def test_compiled_layers_are_sharded() -> None:
    case = Case(parallel={"shard": 2}, steps=2)
    for plain, compiled in run_ranks(
        2, run_cases, [case, replace(case, compiled=True)], timeout_s=300
    ):
        assert_near(compiled, plain)


@pytest.mark.slow
def test_compiled_layers_are_recomputed_and_sharded() -> None:
    case = Case(parallel={"shard": 2}, steps=2, memory={"recompute": {"kind": "full"}})
    for plain, compiled in run_ranks(
        2, run_cases, [case, replace(case, compiled=True)], timeout_s=300
    ):
        assert_near(compiled, plain)


def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled()
    assert os.environ[CACHE] == str(tmp_path / "ingot" / "compiled")
    monkeypatch.setenv(CACHE, "elsewhere")
    keep_compiled()
    assert os.environ[CACHE] == "elsewhere"
