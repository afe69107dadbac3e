"""What a step takes without contents, against the same step with contents and the allocator's own
events.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_memory import measured
from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.plan.assemble import _flops
from ingot.plan.tracing import trace
from ingot.plan.tracing.records import DISPATCH, SPREAD, MemoryUse, Operator, RankTrace
from ingot.plan.tracing.stand_ins import counted_dispatches
from ingot.plan.tracing.workers import TraceRequest, trace_all
from ingot.train.micro_batch.trial import made_up_setup, open_trial
from tests.ranks import run_ranks
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
SMALL = ["model.config.hidden_size=128", "model.config.intermediate_size=384", "data.seq_len=64"]
"""For what is computed: products in bf16 are slow where a processor has no instructions for it."""
T5 = [
    "objective.kind=seq2seq",
    "model.source=preset:t5-mini",
    "model.config.num_layers=5",
    "model.config.num_decoder_layers=5",
    "data.seq_len=16",
    "data.target_len=8",
]
DEEP = ["model.config.num_layers=6", "model.config.num_decoder_layers=6"]
"""For shards, which are followed from three layers and four."""
GRADIENTS = [
    "precision.compute=fp32",
    "data.seq_len=64",
    "model.config.hidden_size=512",
    "model.config.intermediate_size=1024",
]
LONG = pytest.mark.drawn("memory of several ranks")
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
        ["train.optimizer.kind=muon", "train.optimizer.compute=bf16"],
        ["model.lora.rank=4"],
        ["model.neftune_alpha=5"],
        ["memory.offload.activations=true"],
        ["memory.offload.optimizer=0.5"],
        ["objective.kind=dpo"],
        ["objective.kind=kto"],
        ["objective.kind=seq2seq", "model.source=preset:t5-mini"],
    ],
    ids=" ".join,
)
def test_memory_is_what_the_allocator_counts(recipe: Any, knobs: list[str]) -> None:
    asked = recipe(*([] if "objective.kind=seq2seq" in knobs else SMALL), *knobs)
    traced = trace.trace_rank(asked, 1)
    assert traced.peak.total == pytest.approx(measured(asked)["peak"], rel=TRACED_MEMORY)


@pytest.mark.drawn("a traced plan", keep=2)
def test_a_teacher_is_there_without_gradients_or_optimizer(recipe: Any, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = 2 * 512 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
    alone = trace.trace_rank(recipe(*SMALL), 1)
    taught = trace.trace_rank(
        recipe(*SMALL, "objective.kind=distill", f"objective.teacher={tmp_path}"), 1
    )
    assert taught.peak.bytes["weights"] - alone.peak.bytes["weights"] == 4 * weights
    for part in ("gradients", "optimizer"):  # of the student alone
        assert taught.peak.bytes[part] == alone.peak.bytes[part]


@pytest.mark.drawn("a traced plan", keep=2)
@LONG
@pytest.mark.parametrize(
    "knobs",
    [
        ["parallel.shard=2", "data.seq_len=16"],
        ["parallel.shard=2", "data.seq_len=16", BF16, "memory.recompute.kind=full"],
        ["parallel.tensor=2"],
        ["parallel.context=2"],
        ["parallel.replicate=2", BF16],
        ["parallel.replicate=2", BF16, "train.micro_batch=1"],
    ],
    ids=" ".join,
)
def test_memory_of_two_ranks_is_what_their_allocators_count(recipe: Any, knobs: list[str]) -> None:
    """Where layers are wide and rows short, the peak is in what gloo copies."""
    asked = recipe(*SMALL, *knobs)
    traced = trace.trace_rank(asked, 2)
    counted = run_ranks(2, measured, asked)
    assert traced.peak.total == pytest.approx(counted[0]["peak"], rel=TRACED_MEMORY)


@pytest.mark.drawn("what Python takes")
def test_selective_recomputation_asks_python_as_often_as_planned(recipe: Any) -> None:
    asked = recipe("memory.recompute.kind=selective", "model.config.num_hidden_layers=2")
    traced = trace.trace_rank(asked, 1)
    times = 0

    def note() -> None:
        nonlocal times
        times += 1

    with running_mesh(asked.parallel) as mesh:
        setup = made_up_setup(asked, mesh)
        with open_trial(setup, mesh) as trial, trial.step_function(setup.batch) as take:
            take(0)
            with counted_dispatches(note):
                take(1)
    assert times == traced.micro_batch[DISPATCH] * traced.micro_steps > 0
    assert DISPATCH not in trace.trace_rank(recipe(), 1).micro_batch


@pytest.mark.drawn("what Python takes")
def test_operators_on_divided_tensors_are_counted(recipe: Any) -> None:
    layers = "model.config.num_hidden_layers=2"
    divided, sharded = (
        trace.trace_rank(recipe(layers, knob), 2).micro_batch
        for knob in ("parallel.tensor=2", "parallel.shard=2")
    )
    assert divided[SPREAD] > 10 * sharded.get(SPREAD, 0)


@pytest.mark.drawn("a traced plan", keep=2)
@pytest.mark.parametrize(
    ("world", "knobs"),
    [
        (1, []),
        # Backward takes more and more, as gradients do that it adds up.
        (2, ["parallel.shard=2", *GRADIENTS]),
        pytest.param(2, ["parallel.shard=2", "data.seq_len=16"], marks=LONG),
        pytest.param(
            2, ["parallel.shard=2", "memory.recompute.kind=full", "data.seq_len=16"], marks=LONG
        ),
        (1, [*T5, "train.global_batch=2"]),
        pytest.param(2, [*T5, *DEEP, "parallel.shard=2"], marks=LONG),
    ],
)
def test_a_model_of_many_layers_follows_from_two_of_few(
    recipe: Any, monkeypatch: pytest.MonkeyPatch, world: int, knobs: list[str]
) -> None:
    layers = [] if "objective.kind=seq2seq" in knobs else ["model.config.num_hidden_layers=6"]
    asked = recipe(*layers, BF16, *knobs)
    followed = trace.trace_rank(asked, world)
    monkeypatch.setattr(trace, "_fewer_layers", lambda plan, mesh: None)
    whole = trace.trace_rank(asked, world)
    assert followed.extended
    assert not whole.extended
    assert followed.layers == whole.layers == (6 if layers else 12 if DEEP[0] in knobs else 10)
    assert (followed.between, followed.build) == (whole.between, whole.build)
    # Where stacks meet, a sharded T5 holds 6 KiB otherwise than within a stack.
    slack = 8192 if knobs[:1] == T5[:1] and world > 1 else 0
    assert abs(followed.peak.total - whole.peak.total) <= slack
    for mine, its in ((followed.micro_batch, whole.micro_batch), (followed.update, whole.update)):
        assert _work(mine) == pytest.approx(_work(its), rel=1e-6)


def _work(operators: Any) -> tuple[float, float]:
    return (
        sum(one.flops * count for one, count in operators.items()),
        sum(one.bytes * count for one, count in operators.items()),
    )


@LONG
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
    # The first stage holds the activations of more micro-batches, the last one multiplies more.
    assert first.peak.bytes["activations"] > last.peak.bytes["activations"]  # type: ignore[union-attr]
    assert _work(last.micro_batch)[0] > _work(first.micro_batch)[0]  # type: ignore[union-attr]


@LONG
def test_muon_divides_its_products_over_ranks_and_holds_few_matrices(recipe: Any) -> None:
    knobs = ["train.optimizer.kind=muon", "model.config.num_hidden_layers=6"]
    alone, shard, tensor = (
        trace.trace_rank(recipe(*knobs, *more), world, kind="cuda")
        for more, world in (
            (["train.global_batch=8"], 1),
            (["train.global_batch=8", "parallel.shard=4"], 4),
            (["parallel.shard=2", "parallel.tensor=2"], 4),
        )
    )
    products = [_work(one.update)[0] for one in (alone, shard, tensor)]
    # 42 matrices for 4 ranks, the largest ones first.
    assert products[1:] == pytest.approx([products[0] / 4] * 2, rel=0.1)
    for found in (shard, tensor):
        exchanged = {one.dtype for one in found.update if one.kind == "alltoall_base_"}
        assert exchanged == {"bfloat16"}
        weights = alone.between.bytes["weights"]
        assert found.between.bytes["optimizer"] == pytest.approx(
            alone.between.bytes["optimizer"] / 4, rel=0.02
        )
        # Of a model of 4.7 M weights a few matrices of 196,608 in bf16, not a share of all of it.
        assert found.windows[-1].bytes["temporary"] < weights / 8


@pytest.mark.drawn("a plan at length", keep=2)
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


@pytest.mark.drawn("a traced plan", keep=2)
def test_buckets_are_there_beside_gradients_that_wait_for_others(recipe: Any) -> None:
    """torch's data parallelism takes the gradients of the last micro-batch into its buckets, to
    which those of earlier ones are added until then.
    """
    alone = trace.trace_rank(recipe(), 1)
    replica = trace.trace_rank(recipe("parallel.replicate=2", "train.global_batch=8"), 2)
    assert alone.micro_steps == replica.micro_steps == 2
    weights = alone.between.bytes["weights"]
    assert replica.peak.total - alone.peak.total == pytest.approx(weights, rel=0.01)


@pytest.mark.drawn
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_offloaded_takes_none_of_a_gpus_memory(recipe: Any, world: int) -> None:
    sharded = [f"parallel.shard={world}", "model.config.num_hidden_layers=12"]
    offload = "memory.offload."

    def of(*knobs: str) -> RankTrace:
        return trace.trace_rank(recipe(*sharded, *knobs), world, kind="cuda")

    plain, activations, half = of(), of(f"{offload}activations=true"), of(f"{offload}optimizer=0.5")
    kept = plain.peak.bytes["activations"]
    assert activations.peak.bytes["activations"] < 0.05 * kept
    # Two layers are fetched at a time, of twelve.
    assert plain.peak.total - activations.peak.total > 0.4 * kept
    state = plain.between.bytes["optimizer"]
    assert half.between.bytes["optimizer"] == pytest.approx(state / 2, rel=0.1)
    assert half.between.bytes["masters"] == 0
    if world > 1:
        weights = of(f"{offload}weights=true")
        assert weights.between.total < 0.01 * plain.between.total
        assert weights.peak.bytes["gathered"] > 0
        held = plain.between.total
        assert plain.peak.total - weights.peak.total == pytest.approx(held, rel=0.05)


@pytest.mark.drawn("a traced plan", keep=2)
def test_on_a_cpu_what_is_offloaded_stays_in_the_same_memory(recipe: Any) -> None:
    plain, host = (
        trace.trace_rank(recipe(*knobs), 1) for knobs in ([], ["memory.offload.optimizer=1"])
    )
    weights = plain.between.bytes["weights"]
    assert host.between.total - plain.between.total == weights


@pytest.mark.drawn("a traced plan", keep=2)
def test_cuda_keeps_less_of_a_norm_and_more_of_the_head(recipe: Any) -> None:
    asked = recipe(BF16, "data.seq_len=512", "tokenizer.vocab_size=512")
    cpu, cuda = (trace.trace_rank(asked, 1, kind=kind) for kind in ("cpu", "cuda"))
    assert cuda.peak.bytes["activations"] < cpu.peak.bytes["activations"]
    assert cpu.pieces == (0, 0, 0)
    assert 0 < cuda.pieces[0] <= cuda.pieces[2] < cuda.peak.total / 2
    assert sum(one.flops * count for one, count in cuda.micro_batch.items()) == pytest.approx(
        sum(one.flops * count for one, count in cpu.micro_batch.items()), rel=0.02
    )


@pytest.mark.drawn("a plan at length", keep=2)
def test_what_is_compiled_for_cuda_keeps_no_number_that_can_be_had_again(recipe: Any) -> None:
    def of(layers: int, *, compiled: bool) -> RankTrace:
        knobs = (f"model.config.num_hidden_layers={layers}", f"train.compile={compiled}")
        return trace.trace_rank(recipe(BF16, *knobs), 1, kind="cuda")

    def of_a_layer(*, compiled: bool) -> float:
        few, many = (of(layers, compiled=compiled) for layers in (2, 4))
        return (many.peak.bytes["activations"] - few.peak.bytes["activations"]) / 2

    tokens, hidden, wide = 2 * 128, 256, 768
    # The activation of a feed-forward's gate, and half of the bytes of its norms' inputs.
    freed = tokens * 2 * (wide + 2 * hidden)
    assert of_a_layer(compiled=False) - of_a_layer(compiled=True) == pytest.approx(freed, rel=0.01)
    for kind in ("matmul", "attention"):
        assert of_kind(of(2, compiled=False), kind) == of_kind(of(2, compiled=True), kind)


@pytest.mark.drawn("a plan at length", keep=2)
def test_products_in_float8_are_counted_in_float8(recipe: Any) -> None:
    float8 = "precision.float8=rowwise"
    wide, narrow, compiled = (
        trace.trace_rank(recipe(BF16, *knobs), 1, kind="cuda")
        for knobs in ([], [float8], [float8, "train.compile=true"])
    )
    head = 6 * 512 * 256 * 2 * 128
    for found in (narrow, compiled):
        assert of_kind(found, "matmul", "bfloat16") == pytest.approx(head, rel=1e-6)
        in_float8 = of_kind(found, "matmul", "float8_e4m3fn")
        assert in_float8 == pytest.approx(of_kind(wide, "matmul") - head, rel=1e-6)
    moved = [
        sum(one.bytes * count for one, count in found.micro_batch.items() if one.kind == "memory")
        for found in (narrow, compiled)
    ]
    assert moved[1] < moved[0] / 2


def of_kind(found: RankTrace, kind: str, dtype: str | None = None) -> float:
    """FLOPs of a micro-batch."""
    return sum(
        one.flops * count
        for one, count in found.micro_batch.items()
        if one.kind == kind and dtype in (None, one.dtype)
    )


@pytest.mark.drawn("a traced plan", keep=2)
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_computes_what_the_share_of_the_peak_counts(recipe: Any, *, lora: bool) -> None:
    asked: Recipe = recipe("train.global_batch=2", *(["model.lora={}"] if lora else []))
    found = trace.trace_rank(asked, 1)
    config = preset("llama-3m") | {"vocab_size": 512}
    hidden, rank, attention = 256, 16, 12 * 256 * 3 * 64
    told = (_flops(asked, config) or 0.0) - attention
    # Beneath the first products of an adapted model nothing learns: no gradient goes there.
    first = hidden * (256 + 2 * 128) + 3 * rank * hidden if lora else 0
    assert of_kind(found, "matmul") == pytest.approx((told - 2 * first) * 2 * 128, rel=1e-6)


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
    more = replace(more, pieces=(8, 8, 30))
    extended = few.with_layers(7, more)
    assert (extended.pieces, extended.extended, few.extended) == ((2, 8, 30), True, False)
    assert (extended.peak.total, extended.between.total, extended.build.total) == (30, 9, 3)


def test_operators_that_become_rarer_with_more_layers_are_never_fewer_than_none() -> None:
    small, large = Operator("memory", "float32", 0.0, 4), Operator("memory", "float32", 0.0, 8)
    few = RankTrace(0, (_use(10),), _use(4), _use(3), {small: 5.0, large: 1.0}, {}, 1, 2)
    more = replace(few, micro_batch={small: 4.0, large: 3.0}, layers=3)
    found = few.with_layers(20, more).micro_batch
    assert all(count > 0 and one.bytes >= 0 for one, count in found.items()), found
    moved = sum(count * one.bytes for one, count in found.items())
    assert moved == pytest.approx(28 + 18 * 12, rel=0.02), "as many bytes as on the line"


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
