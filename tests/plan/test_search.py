"""Which layouts a search finds, which it refuses and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees
from ingot.config.load import load_recipe
from ingot.config.models.presets import preset
from ingot.config.shape import expert_parameters, least_parameters, parameter_count
from ingot.plan.choose import Limits, choose
from ingot.plan.layouts import ALL_FREE, Candidate, _least_bytes, possible_layouts
from ingot.plan.ranges import Range
from ingot.plan.search import Judged, _Bench, search
from ingot.plan.seconds import NOTHING, StepSeconds
from ingot.plan.tracing.memory import RankMemory, kinds_of_ranks
from ingot.plan.tracing.records import ROLES, MemoryUse, RankTrace
from ingot.plan.tracing.workers import Tracer, TraceRequest

RECIPE = """
name: searched
model: {source: "preset:llama-3m"}
tokenizer: {source: train, vocab_size: 512}
data: {train: [{source: "builtin:stdlib"}], seq_len: 128, pack: none}
train: {steps: 2, global_batch: 8, micro_batch: 1}
precision: {compute: fp32}
"""
CONFIG = preset("llama-3m")
MIB = 2**20


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return lambda *knobs: load_recipe([file], list(knobs))


def _step(total: Range) -> StepSeconds:
    return StepSeconds(*[NOTHING] * 8, total, 0.0)


def _seconds(recipe: Any, world: int, memory: tuple[RankMemory, ...]) -> StepSeconds:
    """Larger micro-batches are faster, recomputing is slower."""
    again = {"none": 0, "selective": 1, "full": 2}[recipe.memory.recompute.kind]
    return _step(Range.exactly(10 + again - memory[0].trace.micro_steps ** -1))


class _Line:
    """Stands in for the processes that trace: 100 bytes, and 10 for each row of a micro-batch;
    `more` for each above four.
    """

    def __init__(self, more: int = 0) -> None:
        self._more = more

    def traces(self, requests: Sequence[TraceRequest]) -> list[RankTrace]:
        rows = [request.recipe.train.micro_batch for request in requests]
        uses = [
            MemoryUse(dict.fromkeys(ROLES, 0)).plus(
                "weights", 100 + 10 * count + self._more * max(0, count - 4)
            )
            for count in rows
        ]
        return [RankTrace(0, (use,), use, use, {}, {}, 1, 1) for use in uses]


@pytest.mark.parametrize(("has", "rows"), [(109, None), (110, 1), (125, 2), (140, 4), (999, 8)])
def test_the_largest_micro_batch_that_fits_is_proposed(
    has: int, rows: int | None, recipe: Any
) -> None:
    others: list[tuple[str, str]] = []
    layout = Degrees()
    bench = _Bench(cast("Tracer", _Line()), recipe(), "cpu", Range.exactly(has), others)
    found = [one.micro_batch for one in bench.grown([layout], "none")]
    assert found == ([] if rows is None else [rows])
    assert [reason.split(":")[0] for _, reason in others] == ["does not fit"] * (rows is None)


def test_of_a_micro_batch_that_does_not_fit_half_is_tried(recipe: Any) -> None:
    """Memory grows faster than one and two rows promise, of which eight would fit."""
    layout = Degrees()
    bench = _Bench(cast("Tracer", _Line(more=20)), recipe(), "cpu", Range.exactly(185), [])
    assert [one.micro_batch for one in bench.grown([layout], "none")] == [4]


@pytest.mark.drawn("a search that traces")
def test_what_fits_is_found_and_what_does_not_is_told(recipe: Any) -> None:
    # A replica takes 44 MiB even where all is recomputed, a half 39 MiB, half of each matrix 26.
    has = Range.exactly(42 * MIB)
    # One row a rank: what is searched is the layout alone.
    one_row = recipe("train.global_batch=2")
    result = search(one_row, CONFIG, [2], 2, "cpu", has, _seconds)
    assert all(one.peak.high <= 42 * MIB for one in result.found)
    best = result.found[0].candidate
    assert (best.layout.shard, best.layout.tensor) in ((2, 1), (1, 2))
    told = [reason for what, reason in result.others if what.startswith("2 devices: replicate")]
    assert len(told) == 3
    assert all(reason.startswith("does not fit: ") for reason in told)


@pytest.mark.drawn("a search that traces")
def test_recomputing_is_tried_only_where_it_makes_room(recipe: Any) -> None:
    result = search(recipe(), CONFIG, [1], 1, "cpu", Range.exactly(2**40), _seconds)
    assert [one.candidate for one in result.found] == [Candidate(Degrees(), "none", 8)]
    assert result.others == []


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 12,
    "num_experts_per_tok": 2,
}


def test_ranks_of_a_mixture_may_share_its_experts(recipe: Any) -> None:
    """All ranks hold all experts, those of a node of 4 share the 12, or the 4 that 8 ranks can."""
    asked, others = recipe("train.global_batch=16"), []
    room = Range.exactly(2.0**40)
    found = possible_layouts(asked, MIXTURE, 8, 4, room, ALL_FREE, others)
    degrees = {(one.shard, one.expert) for one in found if one.tensor * one.pipeline == 1}
    assert degrees == {(shard, expert) for shard in (1, 4, 8) for expert in (1, 4)}
    dense = possible_layouts(asked, CONFIG, 8, 4, room, ALL_FREE, others)
    assert {one.expert for one in dense} == {1}


def test_experts_that_are_shared_take_less_of_each_rank(recipe: Any) -> None:
    """Of 16 bytes a weight, a quarter of the experts' and all of the rest."""
    asked, others = recipe("train.global_batch=16"), []
    experts = expert_parameters(MIXTURE)
    assert experts == 2 * 12 * 3 * 64 * 512
    held = 16.0 * (parameter_count(MIXTURE) - experts + experts / 4)
    for room, fits in ((held, True), (held - 1, False)):
        found = possible_layouts(asked, MIXTURE, 4, 4, Range.exactly(room), ALL_FREE, others)
        layouts = {(one.expert, one.replicate, one.tensor, one.pipeline) for one in found}
        assert ((4, 4, 1, 1) in layouts) == fits
        assert (1, 4, 1, 1) not in layouts


def test_a_candidate_is_what_its_knobs_say(recipe: Any) -> None:
    layout = Degrees(tensor=2, pipeline=2, shard=2, replicate=2, expert=2)
    one = Candidate(layout, "full", 2)
    assert one.of(recipe()) == recipe(*one.overrides)
    assert one.text() == (
        "16 devices: tensor 2 x pipeline 2 x shard 2 x expert 2 x replicate 2, micro-batch 2, full"
        " recomputation"
    )


def test_ties_are_what_the_device_decides() -> None:
    one, slower, tied, close = (
        Judged(
            Candidate(Degrees(), "none", size),
            (),
            _step(Range(*total, "guessed")),
        )
        for size, total in (
            (1, (1, 2, 4)),
            (2, (1.5, 3, 5)),
            (4, (0.5, 3, 5)),
            (8, (1.01, 2.03, 4.02)),
        )
    )
    assert not one.is_tied(slower)
    assert one.is_tied(tied)
    assert one.is_tied(close)
    assert close.is_tied(one)


@pytest.mark.parametrize(
    ("peak", "fit"), [(50, "fits"), (85, "may not fit"), (95, "may not fit"), (120, "does not fit")]
)
def test_fits_is_said_only_where_all_ends_of_ranges_agree(peak: int, fit: str) -> None:
    use = MemoryUse(dict.fromkeys(ROLES, 0)).plus("weights", peak)
    trace = RankTrace(0, (use,), use, use, {}, {}, 1, 1)
    other = Range(1, 10, 20, "guessed")
    rank = RankMemory("every rank", 0, trace, other)
    assert rank.fit(Range(90, 100, 110, "modelled")) == fit


def test_one_rank_of_each_kind() -> None:
    assert kinds_of_ranks(Degrees()) == [("this process", 0)]
    assert kinds_of_ranks(Degrees(shard=4)) == [("every rank", 0)]
    two = kinds_of_ranks(Degrees(pipeline=2, shard=4))
    assert two == [("first stage", 0), ("last stage", 4)]
    four = kinds_of_ranks(Degrees(pipeline=4, shard=2))
    assert four == [("first stage", 0), ("stages between", 2), ("last stage", 6)]


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("devices", ["0", "8..4", "many", "4-8"])
def test_devices_are_a_number_or_two(recipe: Any, devices: str) -> None:
    from ingot.plan.assemble import ModelKnown
    from ingot.plan.place import place_of

    asked = recipe().at("train")
    place = place_of(asked)
    with pytest.raises(WrongInput, match="give a number, or two such as"):
        choose(asked, place, ModelKnown(CONFIG, random=True), devices, Limits(None, None))


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("devices", ["12", "3..12"])
def test_devices_are_whole_nodes(recipe: Any, devices: str) -> None:
    from ingot.plan.assemble import ModelKnown
    from ingot.plan.place import place_of

    asked = recipe("launch.kind=slurm", "launch.nodes=2", "launch.processes=8").at("train")
    place = place_of(asked, "h100")
    with pytest.raises(WrongInput, match="12 are not whole nodes of 8; give at most 8, or a mult"):
        choose(asked, place, ModelKnown(CONFIG, random=True), devices, Limits(None, None))


@pytest.mark.parametrize(
    ("knobs", "fits"),
    [
        ([], False),
        (["train.optimizer.kind=sgd"], True),
        (["memory.offload.optimizer=1.0"], True),
        (["model.lora.rank=8"], True),
    ],
)
def test_what_cannot_fit_is_not_traced_whatever_the_model_and_only_that(
    recipe: Any, knobs: list[str], fits: bool
) -> None:
    t5 = recipe("objective.kind=seq2seq", "model.source=preset:t5-mini", *knobs)
    config = preset("t5-mini")
    weights = least_parameters(config)
    others: list[tuple[str, str]] = []
    # Adam takes 16 bytes a weight, plain descent 8, a weight that is kept 4.
    has = Range.exactly(12.0 * weights)
    found = list(possible_layouts(t5, config, 1, 1, has, ALL_FREE, others))
    assert bool(found) == fits
    assert fits or others[0][1].startswith("does not fit: weights, gradients and optimizer")


def test_frozen_weights_in_16_bits_are_not_refused_for_32(recipe: Any) -> None:
    knobs = "model.lora.rank=8", "model.source=preset:llama-3m"
    alone = Degrees()
    wide, narrow, auto = (
        _least_bytes(recipe(*knobs, f"precision.compute={compute}"), CONFIG, alone)
        for compute in ("fp32", "bf16", "auto")
    )
    weights = parameter_count(CONFIG)
    assert wide - narrow == 2 * weights
    assert auto == narrow, "what it comes to is not known here"
