"""What a mixture of experts takes, on one rank and on ranks that share its experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.plan_memory import measured
from ingot.config.degrees import Degrees
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count
from ingot.plan.storage import ModelSize, model_size
from ingot.plan.tracing import trace
from ingot.plan.tracing.memory import rank_memory
from ingot.plan.tracing.records import RankTrace
from tests.ranks import run_ranks
from tests.tolerances import TRACED_MEMORY, TRACED_MEMORY_OF_EXPERTS

MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
}
RECIPE = """
name: traced
model: {source: MODEL, init: random}
tokenizer: {source: train, vocab_size: 512}
data: {train: [{source: "builtin:stdlib"}], seq_len: 128, pack: none}
train: {steps: 2, global_batch: 4, micro_batch: 2}
precision: {compute: fp32}
"""
MATRICES = ["parallel.expert=2", "parallel.tensor=2"]
SHARED = ["parallel.expert=2", "parallel.shard=2"]
BF16 = "precision.compute=bf16"
Ask = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Ask:
    file, model = tmp_path / "recipe.yaml", tmp_path / "model"
    model.mkdir()
    file.write_text(RECIPE.replace("MODEL", str(model)), encoding="utf-8")

    def ask(*knobs: str, **config: object) -> Recipe:
        (model / "config.json").write_text(json.dumps(MIXTURE | config), encoding="utf-8")
        return load_recipe([file], list(knobs))

    return ask


@pytest.mark.drawn("memory of experts")
@pytest.mark.parametrize("knobs", [[], [BF16]], ids=" ".join)
def test_memory_is_what_the_allocator_counts(recipe: Ask, knobs: list[str]) -> None:
    asked = recipe(*knobs)
    traced = trace.trace_rank(asked, 1)
    assert traced.crowded is None
    assert traced.peak.total == pytest.approx(measured(asked)["peak"], rel=TRACED_MEMORY)


@pytest.mark.drawn("memory of several ranks")
@pytest.mark.parametrize(
    "knobs",
    [SHARED, ["parallel.expert=2", "parallel.replicate=2", BF16], MATRICES],
    ids=" ".join,
)
def test_memory_of_ranks_that_share_experts_is_what_they_measure(
    recipe: Ask, knobs: list[str]
) -> None:
    """Routers that nobody has trained spread rows nearly evenly."""
    asked = recipe(*knobs)
    traced = trace.trace_rank(asked, 2)
    counted = run_ranks(2, measured, asked)
    for rank in counted:
        assert traced.peak.total == pytest.approx(rank["peak"], rel=TRACED_MEMORY_OF_EXPERTS)


def test_a_product_of_experts_counts_for_the_rows_that_choose_them(recipe: Ask) -> None:
    found = trace.trace_rank(recipe("train.global_batch=2"), 1)
    products = sum(
        one.flops * count for one, count in found.micro_batch.items() if one.kind == "matmul"
    )
    attention, router, experts = 128 * 32 * 2 * (4 + 2), 128 * 8, 2 * 3 * 128 * 96
    weights = 3 * (attention + router + experts) + 512 * 128
    assert products == pytest.approx(6 * weights * 2 * 128, rel=1e-6)


@pytest.mark.drawn("rows of experts")
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_products_of_experts_are_of_the_type_that_is_computed_in(recipe: Ask, compute: str) -> None:
    """Not of the numbers that say which rows meet which matrix, which take many times as long."""
    traced = trace.trace_rank(recipe(f"precision.compute={compute}"), 1)
    operators = {**traced.micro_batch, **traced.update}
    types = {operator.dtype for operator in operators if operator.kind == "matmul"}
    assert types <= {"float32", "bfloat16"}
    products = [operator for operator in operators if operator.kind == "matmul"]
    most = max(products, key=lambda operator: operator.flops * operators[operator])
    assert most.dtype == {"fp32": "float32", "bf16": "bfloat16"}[compute]


@pytest.mark.drawn("a plan at length", keep=2)
def test_rows_travel_twice_each_way_in_every_layer(recipe: Ask) -> None:
    found = trace.trace_rank(recipe(*SHARED), 2)
    exchanges = {
        one.bytes: count for one, count in found.micro_batch.items() if one.kind == "alltoall_base_"
    }
    rows, counts = 2 * 128 * 2 * 128 * 4, 8 * 8
    assert exchanges == {rows: 4 * 3, counts: 3}
    whole = trace.trace_rank(recipe("parallel.shard=2"), 2)
    assert not any(one.kind == "alltoall_base_" for one in whole.micro_batch)
    for role in ("weights", "optimizer"):
        assert found.between.bytes[role] == pytest.approx(whole.between.bytes[role], rel=0.01)


@pytest.mark.drawn("rows of experts")
def test_ranks_that_share_matrices_send_their_part_of_the_rows(recipe: Ask) -> None:
    found = trace.trace_rank(recipe(*MATRICES), 2)
    exchanges = {
        one.bytes: count for one, count in found.micro_batch.items() if one.kind == "alltoall_base_"
    }
    rows, counts = 2 * (128 // 2) * 2 * 128 * 4, 8 * 8
    assert exchanges == {rows: 4 * 3, counts: 3}
    whole = trace.trace_rank(recipe(), 1)
    shared = 3 * 8 * 3 * 128 * 96 * 4 // 2  # a layer has eight experts, a rank four of them
    assert whole.between.bytes["weights"] - found.between.bytes["weights"] > shared


@pytest.mark.drawn("traced experts")
def test_a_rank_whose_experts_are_chosen_more_often_is_the_upper_end(recipe: Ask) -> None:
    found = trace.trace_rank(recipe(*SHARED), 2)
    assert isinstance(found.crowded, RankTrace)
    more = found.crowded.peak.total - found.peak.total
    assert 0 < more < found.peak.total
    memory = rank_memory("every rank", 0, found, Degrees(shard=2, expert=2), "cpu")
    assert (memory.peak.low, memory.peak.high) == (
        found.peak.total,
        found.crowded.peak.total,
    )
    assert memory.peak.origin == "guessed"


@pytest.mark.drawn("traced experts")
def test_layers_of_two_kinds_are_all_traced(recipe: Ask) -> None:
    """Only every second layer has experts: two layers do not tell of twelve."""
    many = {"num_hidden_layers": 12}
    assert trace.trace_rank(recipe(**many), 1).extended
    assert not trace.trace_rank(recipe(**many, decoder_sparse_step=2), 1).extended


def test_a_mixture_has_active_weights(recipe: Ask) -> None:
    whole = parameter_count(MIXTURE)
    idle = 3 * 6 * 3 * 128 * 96  # six of eight experts are not chosen
    assert model_size(recipe(), MIXTURE) == ModelSize(whole, whole, active=whole - idle)
    dense = MIXTURE | {"mlp_only_layers": [0, 1, 2]}
    size = model_size(recipe(), dense)
    assert size is not None
    assert size.active is None
