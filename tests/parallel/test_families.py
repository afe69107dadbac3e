"""Every family over ranks: each way of spreading a model meets every family that differs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ingot.config.models.family import sizes
from ingot.verify.layout.modes import layout
from tests.parallel.proving import EVERY, Proving, check, recipe_of
from tests.small import copy_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "shard": {"shard": 2},
    "tensor": {"tensor": 2},
    "tensor-whole-rows": {"tensor": 2, "sequence": False},
    "pipeline": {"pipeline": 2},
    "ring": {"context": 2},
    "ulysses": {"context": 2, "context_by": "ulysses"},
    "tensor-shard": {"tensor": 2, "shard": 2},
    "tensor-pipeline": {"tensor": 2, "pipeline": 2},
}


@pytest.fixture(scope="module")
def proving() -> Iterator[Proving]:
    made = Proving()
    with made.prover:
        yield made


@pytest.fixture(scope="module")
def texts(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of(prepared_root, tmp_path_factory.mktemp("families") / "root")


def is_sparse(config: Mapping[str, Any]) -> bool:
    """Whether a model has experts, which the ranks of `tensor` share."""
    return sizes(config).experts is not None


SHORT = {("olmo2", "tensor"), ("gemma3", "pipeline"), ("qwen3_moe", "shard")}
"""A norm over the width of all ranks, and scalars at the ends of a pipeline, experts in shards: tried in each
run."""


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(
            family,
            way,
            marks=[]
            if (family, way) in SHORT
            else [pytest.mark.drawn(f"families over {way.partition('-')[0]}")],
        )
        for family, config in EVERY.items()
        for way, degrees in LAYOUTS.items()
    ],
)
def test_a_family_over_ranks_equals_one_process(
    family: str, way: str, proving: Proving, texts: Path
) -> None:
    reference = proving.reference(recipe_of(texts, family))
    shared = {"expert": LAYOUTS[way].get("tensor", 1)} if is_sparse(EVERY[family]) else {}
    found = proving.prover.finding(reference, layout(**LAYOUTS[way], **shared))
    check(found)
