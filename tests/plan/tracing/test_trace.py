"""What a step takes without contents, against the same step with contents and the allocator's own
events.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.plan.tracing import trace
from ingot.plan.tracing.records import MemoryUse, RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all
from ingot.train.micro_batch.trial import made_up_plan, open_trial
from tests.plan.tracing.measured import SECOND, peak_of_events
from tests.tolerances import TRACED_MEMORY

RECIPE = """
name: traced
model: {source: "preset:llama-3m"}
tokenizer: {source: train, vocab_size: 512}
data: {train: [{source: "builtin:stdlib"}], seq_len: 128, pack: none}
train: {steps: 2, global_batch: 4, micro_batch: 2}
precision: {compute: fp32}
"""
BF16 = "precision.compute=bf16"
FOUR = ["model.config.num_hidden_layers=4", "train.global_batch=8"]


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return lambda *knobs: load_recipe([file], list(knobs))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "knobs",
    [
        [],
        [BF16],
        [BF16, "data.pack=best_fit"],
        [BF16, "memory.recompute.kind=selective"],
        ["memory.recompute.kind=full"],
        [BF16, "precision.master=stochastic"],
        ["train.optimizer.kind=sgd"],
        ["model.lora.rank=4"],
        ["objective.kind=dpo"],
        ["objective.kind=seq2seq", "model.source=preset:t5-mini"],
    ],
    ids=" ".join,
)
def test_memory_is_what_the_allocator_counts(recipe: Any, knobs: list[str]) -> None:
    asked = recipe(*knobs)
    with running_mesh(asked.parallel) as mesh:
        plan = made_up_plan(asked, mesh)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=activities, profile_memory=True) as profile,
            open_trial(plan, mesh) as trial,
            trial.step_function(plan.batch) as take,
        ):
            take(0)
            with torch.profiler.record_function(SECOND):
                take(1)
    measured = peak_of_events(profile.profiler.kineto_results.events())  # type: ignore[union-attr]
    traced = trace.trace_rank(asked, 1)
    assert traced.peak.total == pytest.approx(measured, rel=TRACED_MEMORY)


def test_a_model_of_many_layers_follows_from_two_of_few(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe("model.config.num_hidden_layers=9", BF16)
    told = trace.trace_rank(asked, 1)
    monkeypatch.setattr(trace, "_fewer_layers", lambda plan: None)
    whole = trace.trace_rank(asked, 1)
    assert told.layers == whole.layers == 9
    assert (told.peak, told.between, told.build) == (whole.peak, whole.between, whole.build)
    for mine, its in ((told.micro_batch, whole.micro_batch), (told.update, whole.update)):
        assert _work(mine) == pytest.approx(_work(its), rel=1e-6)


def _work(operators: Any) -> tuple[float, float]:
    return (
        sum(one.flops * count for one, count in operators.items()),
        sum(one.bytes * count for one, count in operators.items()),
    )


def test_ranks_of_other_layouts_are_traced_alone(recipe: Any) -> None:
    knobs = {
        "one": ([], 1, 0),
        "shard": (["parallel.shard=2"], 2, 0),
        "tensor": (["parallel.tensor=2"], 2, 1),
        "first": (["parallel.pipeline=2", "parallel.shard=1"], 2, 0),
        "last": (["parallel.pipeline=2", "parallel.shard=1"], 2, 1),
        "refused": (["parallel.tensor=3"], 3, 0),
    }
    requests = [
        TraceRequest(recipe(*FOUR, *knobs), world, rank) for knobs, world, rank in knobs.values()
    ]
    found = dict(zip(knobs, trace_all(requests), strict=True))
    refused = found.pop("refused")
    assert isinstance(refused, WrongInput)
    assert "parallel.tensor 3 does not divide" in str(refused)
    one, shard, tensor, first, last = found.values()
    for trace_ in found.values():
        assert isinstance(trace_, RankTrace)
    assert one.between.bytes["weights"] == 2 * shard.between.bytes["weights"]  # type: ignore[union-attr]
    assert shard.peak.bytes["gathered"] > 0 == one.peak.bytes["gathered"]  # type: ignore[union-attr]
    assert tensor.peak.bytes["activations"] < one.peak.bytes["activations"]  # type: ignore[union-attr]
    assert first.layers == last.layers == 2  # type: ignore[union-attr]
    # The first stage holds the activations of more micro-batches, the last one has the head.
    assert first.peak.bytes["activations"] > last.peak.bytes["activations"]  # type: ignore[union-attr]
    assert last.peak.bytes["temporary"] > first.peak.bytes["temporary"]  # type: ignore[union-attr]


def test_buffers_of_a_pipeline_grow_with_the_micro_batches_of_a_step(recipe: Any) -> None:
    knobs = ["model.config.num_hidden_layers=4", "parallel.pipeline=2", "train.micro_batch=1"]
    few, many = (
        trace_all([TraceRequest(recipe(*knobs, f"train.global_batch={rows}"), 2, 1)])[0]
        for rows in (8, 16)
    )
    assert isinstance(few, RankTrace)
    assert isinstance(many, RankTrace)
    assert (few.micro_steps, many.micro_steps) == (8, 16)
    held = [one.between.bytes["temporary"] for one in (few, many)]
    assert held[1] == pytest.approx(2 * held[0], rel=0.01)
    assert many.peak.total - few.peak.total == held[1] - held[0]


def test_cuda_keeps_less_of_a_norm_and_more_of_the_head(recipe: Any) -> None:
    asked = recipe(BF16, "data.seq_len=512", "tokenizer.vocab_size=512")
    cpu, cuda = (trace.trace_rank(asked, 1, kind=kind) for kind in ("cpu", "cuda"))
    assert cuda.peak.bytes["activations"] < cpu.peak.bytes["activations"]
    assert sum(one.flops * count for one, count in cuda.micro_batch.items()) == pytest.approx(
        sum(one.flops * count for one, count in cpu.micro_batch.items()), rel=0.02
    )


def test_products_are_counted_once_forward_and_twice_backward(recipe: Any) -> None:
    asked: Recipe = recipe("train.global_batch=2")
    found = trace.trace_rank(asked, 1)
    products = sum(
        one.flops * count for one, count in found.micro_batch.items() if one.kind == "matmul"
    )
    hidden, wide, heads = 256, 768, 256 + 2 * 128
    weights = 3 * (hidden * (heads + hidden) + 3 * hidden * wide) + 512 * hidden
    assert products == pytest.approx(6 * weights * 2 * 128, rel=1e-6)


def test_a_line_through_two_traces() -> None:
    few = RankTrace(0, (_use(10),), _use(4), _use(3), {}, {}, 1, 2)
    more = replace(few, windows=(_use(14),), between=_use(5), layers=3)
    told = few.with_layers(7, more)
    assert (told.peak.total, told.between.total, told.build.total) == (30, 9, 3)


def _use(size: int) -> MemoryUse:
    return MemoryUse(
        {
            "weights": size,
            "masters": 0,
            "optimizer": 0,
            "gradients": 0,
            "gathered": 0,
            "activations": 0,
            "temporary": 0,
        }
    )
