"""Layers shared by ranks: the weights, losses and norms of one process, whatever the schedule and
what else is shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.sections.layout import MemorySettings, Parallel
from ingot.config.sections.lora import Lora
from ingot.config.shape import check_pipeline
from ingot.models.adapters.lora import add_lora, lora_layers
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.spec import ModelSpec, create_model
from ingot.objectives.forward import PipelinedBatches
from ingot.parallel import apply, schedules
from ingot.parallel import pipeline as stages
from ingot.parallel.apply import WrapSettings, apply_wrappers
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import running_mesh
from ingot.parallel.pipeline import assign_layers, parameter_counts, split_stages
from ingot.parallel.schedules import resolved_schedule
from tests import tolerances
from tests.exhaustive import some_of
from tests.parallel.wrapped_run import MODEL, Case, Result, run_case, run_cases
from tests.ranks import run_ranks
from tests.train.test_step import distance

TIED = {**MODEL, "tie_word_embeddings": True}
Axes = dict[str, Any]


def looped(schedule: str = "auto", **axes: Any) -> Axes:
    return {"pipeline": 2, "virtual": 2, "schedule": schedule, **axes}


TWO = {
    "1f1b": Case({"pipeline": 2}),
    "1f1b, tied": Case({"pipeline": 2}, model=TIED),
    "gpipe, tied": Case({"pipeline": 2, "schedule": "gpipe"}, model=TIED),
    "1f1b of one micro-batch": Case({"pipeline": 2}, micro_batch=8),
    "interleaved": Case(looped()),
    "interleaved, tied": Case(looped(), model=TIED, micro_batch=1),
    "zero bubble": Case(looped("zero_bubble"), micro_batch=1),
    "zero bubble, tied": Case(looped("zero_bubble"), model=TIED),
    "zero bubble, recomputed": Case(looped("zero_bubble"), {"recompute": {"kind": "full"}}),
    "interleaved, recomputed": Case(looped(), {"recompute": {"kind": "selective"}}),
    "1f1b, adapter": Case({"pipeline": 2}, lora=True, steps=1),
    "zero bubble, adapter": Case(looped("zero_bubble"), lora=True, steps=1),
}
FOUR = {
    "1f1b": Case({"pipeline": 4}, model=TIED),
    "shard": Case({"pipeline": 2, "shard": 2}, model=TIED),
    "zero bubble, shard": Case(looped("zero_bubble", shard=2, reshard=False), model=TIED),
    "zero bubble, replicate": Case(looped("zero_bubble", replicate=2)),
}
FOUR_MORE = {
    "gpipe": Case({"pipeline": 4, "schedule": "gpipe"}),
    "replicate": Case({"pipeline": 2, "replicate": 2}, model=TIED),
    "interleaved, shard": Case(looped(shard=2), micro_batch=1),
    "interleaved, shard, adapter": Case(looped(shard=2), lora=True, steps=1),
    "tensor": Case({"pipeline": 2, "tensor": 2}, model=TIED),
    "interleaved, tensor": Case(looped(tensor=2, sequence=False)),
    "zero bubble, tensor": Case(looped("zero_bubble", tensor=2), model=TIED),
    "context": Case({"pipeline": 2, "context": 2}, model=TIED),
    "zero bubble, context": Case(looped("zero_bubble", context=2, context_by="ulysses")),
}
EIGHT = {
    "shard and tensor": Case({"pipeline": 2, "shard": 2, "tensor": 2}, model=TIED),
    "zero bubble, shard and tensor": Case(looped("zero_bubble", shard=2, tensor=2, reshard=False)),
    "context and tensor": Case({"pipeline": 2, "context": 2, "tensor": 2}, model=TIED),
    "context and shard": Case({"pipeline": 2, "context": 2, "shard": 2}, model=TIED),
    "interleaved, copies of shards": Case(looped(replicate=2, shard=2), model=TIED),
    "deep and shard": Case({"pipeline": 4, "shard": 2}, model=TIED, micro_batch=1),
}


_ALONE: dict[str, Result] = {}


def alone(case: Case) -> Result:
    """The same in one process, whole batches at once, nothing spared; once for all layouts of it."""
    whole = Case(
        model=case.model, compute=case.compute, lora=case.lora, steps=case.steps, micro_batch=8
    )
    if repr(whole) not in _ALONE:
        _ALONE[repr(whole)] = run_case(whole)
    return _ALONE[repr(whole)]


def together(results: list[Result]) -> dict[str, Tensor]:
    """The weights of all ranks; where several have one, they have the same."""
    weights: dict[str, Tensor] = {}
    for result in results:
        for name, weight in result.weights.items():
            assert torch.equal(weights.setdefault(name, weight), weight), name
    return weights


def assert_equal(results: list[Result], expected: Result) -> None:
    weights = together(results)
    assert weights.keys() == expected.weights.keys()
    assert {name for result in results for name in result.names} == set(expected.names)
    assert distance(weights, expected.weights) < tolerances.SPLIT_WEIGHTS
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=tolerances.LOSS_FP32)
        assert result.norms == pytest.approx(expected.norms, rel=tolerances.SPLIT_LOSS)


def assert_all_equal(world: int, cases: dict[str, Case]) -> None:
    found = run_ranks(world, run_cases, list(cases.values()), timeout_s=240)
    for number, (name, case) in enumerate(cases.items()):
        print(name)  # shown where it fails
        results = [of_rank[number] for of_rank in found]
        assert_equal(results, alone(case))
        sizes = [sum(weight.numel() for weight in result.weights.values()) for result in results]
        assert max(sizes) < 0.8 * sum(weight.numel() for weight in together(results).values()), (
            "each rank has a share of the layers"
        )


@pytest.mark.drawn("ranks of a pipeline")
def test_two_ranks_equal_one() -> None:
    tried = {"1f1b, tied", *some_of([*TWO], 5, "stages")}
    assert_all_equal(2, {name: case for name, case in TWO.items() if name in tried})


@pytest.mark.drawn("ranks of a pipeline")
def test_four_ranks_equal_one() -> None:
    assert_all_equal(4, FOUR)


@pytest.mark.slow
def test_four_ranks_that_share_more_equal_one() -> None:
    assert_all_equal(4, FOUR_MORE)


@pytest.mark.slow
def test_eight_ranks_equal_one() -> None:
    assert_all_equal(8, EIGHT)


@pytest.mark.drawn("two ranks, bit for bit")
def test_schedules_agree_in_bf16() -> None:
    """Zero bubble adds up gradients of weights in float32, too."""
    kinds = [
        Case({"pipeline": 2}, compute="bf16", micro_batch=1),
        *(Case(looped(kind), compute="bf16", micro_batch=1) for kind in ("auto", "zero_bubble")),
    ]
    found = run_ranks(2, run_cases, kinds)
    plain, *others = (
        together([of_rank[number] for of_rank in found]) for number in range(len(kinds))
    )
    for other in others:
        assert distance(other, plain) < tolerances.SPLIT_WEIGHTS
    assert found[0][0].losses == pytest.approx(alone(kinds[0]).losses, abs=tolerances.BF16_LOSS)


# Faults that are planted: each would leave a loss that falls.


def without_twins(case: Case) -> Result:
    """The gradients of a tied embedding's two copies are not summed."""
    apply.tied_across_stages = lambda model: frozenset()  # type: ignore[attr-defined]
    return run_case(case)


def without_other_stages(case: Case) -> Result:
    """The norm is that of the rank's own stages."""
    whole_norm = Masters.norm

    def norm(self: Masters) -> Tensor:
        mesh = self.mesh
        self.mesh = replace(
            mesh, parts={name: part for name, part in mesh.parts.items() if name != "pipeline"}
        )
        try:
            return whole_norm(self)
        finally:
            self.mesh = mesh

    Masters.norm = norm  # type: ignore[method-assign]
    return run_case(case)


def without_a_layer(case: Case) -> Result:
    """The last layer belongs to no stage."""
    stages.assign_layers = lambda layers, count: assign_layers(layers - 1, count)  # type: ignore[attr-defined]
    return run_case(case)


def with_scaled_gradients(case: Case) -> Result:
    """Torch's default: gradients divided by the number of micro-batches."""
    plain = schedules.Schedule1F1B
    schedules.Schedule1F1B = lambda *args, **knobs: plain(*args, **{**knobs, "scale_grads": True})  # type: ignore[attr-defined, misc, assignment]
    return run_case(case)


def with_dropout_of_the_first(case: Case) -> Result:
    """Each micro-batch drops what the first one does."""
    values = PipelinedBatches.values

    def wrong(self: PipelinedBatches, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        before = self._before
        self._before = lambda index, batch: before(0, batch)
        try:
            return values(self, stage, number, hidden)
        finally:
            self._before = before

    PipelinedBatches.values = wrong  # type: ignore[method-assign]
    return run_case(case)


FAULTS: list[tuple[Callable[[Case], Result], Case]] = [
    (without_twins, Case({"pipeline": 2}, model=TIED)),
    (without_other_stages, Case({"pipeline": 2})),
    (without_a_layer, Case({"pipeline": 2})),
    (with_scaled_gradients, Case({"pipeline": 2})),
    (with_dropout_of_the_first, Case({"pipeline": 2}, lora=True, steps=1)),
]


@pytest.mark.parametrize(("fault", "case"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_faults_would_be_seen(fault: Callable[[Case], Result], case: Case) -> None:
    results, expected = run_ranks(2, fault, case), alone(case)
    with pytest.raises(AssertionError):
        assert_equal(results, expected)


# What is refused


@pytest.mark.parametrize(
    ("parallel", "memory", "compiled", "dropout", "said"),
    [
        (looped("zero_bubble"), {}, True, 0.0, "train.compile cannot; set it to interleaved"),
        (looped("zero_bubble", shard=2), {}, False, 0.0, "set parallel.reshard to false"),
        (
            looped("zero_bubble"),
            {"recompute": {"kind": "selective"}},
            False,
            0.0,
            "set it to full or none",
        ),
        (
            {"pipeline": 2},
            {"recompute": {"kind": "full"}},
            False,
            0.1,
            "model.lora.dropout 0.1 with parallel.pipeline",
        ),
    ],
)
def test_what_a_pipeline_cannot_do(
    parallel: Axes, memory: dict[str, Any], compiled: bool, dropout: float, said: str
) -> None:
    with pytest.raises(WrongInput, match=said):
        check_pipeline(
            Parallel(**parallel), MemorySettings(**memory), compiled=compiled, dropout=dropout
        )
    check_pipeline(Parallel(), MemorySettings(**memory), compiled=compiled, dropout=dropout)
    check_pipeline(Parallel(pipeline=2, virtual=2), MemorySettings(), compiled=True, dropout=0.1)


def test_the_schedule_follows_from_the_stages() -> None:
    assert [
        resolved_schedule(Parallel(pipeline=4, schedule=kind), 8)
        for kind in ("auto", "gpipe", "1f1b")
    ] == ["1f1b", "gpipe", "1f1b"]
    assert resolved_schedule(Parallel(pipeline=4), 3) == "gpipe"
    assert resolved_schedule(Parallel(pipeline=2, virtual=2), 2) == "interleaved"


@pytest.mark.parametrize(
    ("layers", "count", "dealt"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (8, 4, [1, 3, 3, 1]),
        (4, 4, [1, 1, 1, 1]),
        (9, 3, [3, 4, 2]),
        (32, 4, [7, 9, 9, 7]),
    ],
)
def test_layers_are_dealt_evenly(layers: int, count: int, dealt: list[int]) -> None:
    assert assign_layers(layers, count) == dealt


def test_every_layer_is_dealt_once_and_no_stage_is_without() -> None:
    for layers in range(1, 30):
        for count in range(1, layers + 1):
            dealt = assign_layers(layers, count)
            assert sum(dealt) == layers
            assert min(dealt) == 1 if count == layers else min(dealt) >= 1
            work = [dealt[0] + 1, *dealt[1:-1], dealt[-1] + 1] if count > 1 else [layers + 2]
            assert max(work) <= max(math.ceil((layers + 2) / count), 2)


@pytest.mark.parametrize("config", [MODEL, TIED])
@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_hold_the_whole_model_under_its_own_names(
    config: dict[str, Any], virtual: int
) -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(config))
    add_lora(model, Lora(rank=2), 0)
    names = [
        name
        for rank in range(2)
        for stage in split_stages(model, rank, 2, virtual)
        for name, _ in stage.named_parameters()
    ]
    twice = ["model.embed_tokens.weight"] if config is TIED else []
    assert sorted(names) == sorted([*(name for name, _ in model.named_parameters()), *twice])
    ends = [stage.stage for rank in range(2) for stage in split_stages(model, rank, 2, virtual)]
    assert (ends[0].first, ends[0].last, ends[-1].first, ends[-1].last) == (
        True,
        False,
        False,
        True,
    )


def sizes_of(config: dict[str, Any]) -> tuple[tuple[int, int], int, list[str]]:
    parallel = Parallel(pipeline=2, virtual=2)
    with running_mesh(parallel) as mesh:
        model = create_model(ModelSpec("decoder", DecoderConfig.from_hf(config), None, True), 0)
        add_lora(model, Lora(rank=2), 0)
        model = apply_wrappers(model, mesh, WrapSettings(parallel))
        return (
            parameter_counts(model, mesh),
            sum(parameter.numel() for parameter in model.parameters()),
            list(lora_layers(model)),
        )


@pytest.mark.parametrize("config", [MODEL, TIED])
def test_the_whole_is_counted_once(config: dict[str, Any]) -> None:
    model = create_model(ModelSpec("decoder", DecoderConfig.from_hf(config), None, True), 0)
    add_lora(model, Lora(rank=2), 0)
    sizes = [
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    ]
    found = run_ranks(2, sizes_of, config)
    for whole, mine, _ in found:
        assert list(whole) == sizes
        assert mine < sizes[0]
    assert sorted(name for _, _, names in found for name in names) == sorted(lora_layers(model))
