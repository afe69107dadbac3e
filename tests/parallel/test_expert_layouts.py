"""Experts that ranks share, over each axis that they are folded on, equal one process: with a
frozen base, recomputation and every optimizer, and with the losses of their routers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.config.sections.training import OptimizerSettings
from ingot.verify.layout.modes import EXPERT_MODES, layout
from tests.parallel.proving import Proving, recipe_of
from tests.parallel.proving import check as holds
from tests.parallel.test_layouts import OPTIMIZERS
from tests.small import copy_of

LOSSES: dict[str, Any] = {"train__experts__aux_loss": 0.3, "train__experts__z_loss": 0.02}
BIAS: dict[str, Any] = {"train__experts__bias_rate": 0.05}
CORRECTED = ("glm4_moe", "minimax_m2")
SHORT = ("expert shards", "expert ring", "expert tensor shards")
"""Fewer experts than shards, so that each is cut; ranks that hold a part of each row; ranks that
share matrices, too."""
COUNTED = "expert tensor stages"
"""The load is added up over the ranks of stages and of matrices."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "three of six": ("olmoe", {"replicate": 2, "expert": 2}),
    "windows": ("mixtral", {"replicate": 2, "shard": 2, "expert": 4}),
    "minimax in shards": ("minimax_m2", {"shard": 2, "expert": 2}),
    "minimax in stages": ("minimax_m2", {"pipeline": 2, "replicate": 2, "expert": 2}),
    "minimax in parts": ("minimax_m2", {"context": 2, "expert": 2}),
    "sinks in shards": ("gpt_oss", {"shard": 2, "expert": 2}),
    "sinks in stages": ("gpt_oss", {"pipeline": 2, "replicate": 2, "expert": 2}),
    "sinks in a ring": ("gpt_oss", {"context": 2, "expert": 2}),
    "sinks by heads": ("gpt_oss", {"context": 2, "context_by": "ulysses", "expert": 2}),
    "adapter": ("qwen3_moe-lora", {"shard": 2, "expert": 2}),
    "adapter in stages": ("qwen3_moe-lora", {"pipeline": 2, "replicate": 2, "expert": 2}),
    "recomputed": ("qwen3_moe", {"shard": 2, "expert": 2, "recompute": "full"}),
    "in part": ("qwen3_moe", {"shard": 2, "expert": 2, "recompute": "selective"}),
    "adapter over matrices": ("qwen3_moe-lora", {"shard": 2, "tensor": 2, "expert": 4}),
    "recomputed over matrices": (
        "glm4_moe",
        {"shard": 2, "tensor": 2, "expert": 2, "recompute": "full"},
    ),
    "sinks over matrices": (
        "gpt_oss",
        {"context": 2, "context_by": "ulysses", "tensor": 2, "expert": 4},
    ),
    "whole rows over matrices": (
        "minimax_m2",
        {"replicate": 2, "tensor": 2, "sequence": False, "expert": 4},
    ),
    "zero bubble": (
        "qwen3_moe",
        {
            "shard": 2,
            "expert": 2,
            "pipeline": 2,
            "virtual": 2,
            "schedule": "zero_bubble",
            "reshard": False,
        },
    ),
    "kept": ("qwen3_moe", {"shard": 4, "expert": 2, "reshard": False}),
    "ulysses": ("qwen3_moe", {"context": 2, "shard": 2, "context_by": "ulysses", "expert": 4}),
    "interleaved": (
        "qwen3_moe",
        {"shard": 2, "expert": 2, "pipeline": 2, "virtual": 2, "schedule": "interleaved"},
    ),
}


@pytest.fixture(scope="module")
def proving() -> Iterator[Proving]:
    made = Proving()
    with made.prover:
        yield made


@pytest.fixture(scope="module")
def texts(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(prepared_root, tmp_path_factory.mktemp("experts") / "root")


def check(
    proving: Proving,
    texts: Path,
    model: str,
    knobs: dict[str, Any],
    optimizer: OptimizerSettings | None = None,
) -> None:
    losses = {} if model.endswith("-lora") else BIAS if model in CORRECTED else LOSSES
    reference = proving.reference(recipe_of(texts, model, **losses), optimizer)
    found = proving.prover.finding(reference, layout(**knobs))
    holds(found)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode in SHORT else [pytest.mark.drawn("experts over axes")])
        for mode in EXPERT_MODES
    ],
)
def test_shared_experts_equal_one_process(mode: str, proving: Proving, texts: Path) -> None:
    """That a rank holds its share only is part of it."""
    check(proving, texts, "qwen3_moe", EXPERT_MODES[mode])


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=() if mode == COUNTED else [pytest.mark.drawn("bias")])
        for mode in EXPERT_MODES
    ],
)
def test_a_bias_that_balances_is_that_of_one_process(
    mode: str, proving: Proving, texts: Path
) -> None:
    """It is compared as the weights are, after each step, and decides what the next one chooses."""
    check(proving, texts, "glm4_moe", EXPERT_MODES[mode])


@pytest.mark.drawn
@pytest.mark.parametrize("case", OTHERS)
def test_whatever_else_is_done_with_them(case: str, proving: Proving, texts: Path) -> None:
    check(proving, texts, *OTHERS[case])


@pytest.mark.drawn
@pytest.mark.parametrize(
    "mode", ["expert shards", "expert hybrid", "expert ring", "expert tensor copies"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_sees_the_same_experts(
    optimizer: str, mode: str, proving: Proving, texts: Path
) -> None:
    """One that takes this rank's share of the experts for all gives other weights."""
    check(proving, texts, "qwen3_moe", EXPERT_MODES[mode], OPTIMIZERS[optimizer])


def test_what_is_impossible_is_refused(proving: Proving, texts: Path) -> None:
    for model, knobs, reason in (
        ("llama", {"shard": 2, "expert": 2}, "and the model has none"),
        (
            "qwen3_moe",
            {"context": 3, "expert": 3},
            "does not divide the model's 4 experts; 1, 2, 4",
        ),
        ("qwen3_moe", {"shard": 2, "expert": 4}, "does not divide the 2 ranks of"),
        ("qwen3_moe", {"shard": 2, "tensor": 2}, "which these ranks must share: parallel.expert"),
    ):
        reference = proving.reference(recipe_of(texts, model))
        found = proving.prover.finding(reference, layout(**knobs))
        assert found.holds is None
        assert reason in found.reason


def test_a_layer_with_an_expert_that_all_tokens_meet_is_recomputed(
    proving: Proving, texts: Path
) -> None:
    """That one comes after those that ranks share, so that all of these is computed again, with
    what FSDP does around them, which is not what it did in forward.
    """
    check(proving, texts, "glm4_moe", {"shard": 2, "expert": 2, "recompute": "full"})
