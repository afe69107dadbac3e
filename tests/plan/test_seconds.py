"""The time of a step from what its ranks do: each part by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.plan.devices.coefficients import Coefficients, Curve, guessed, is_narrow
from ingot.plan.devices.types import device_type
from ingot.plan.ranges import Range
from ingot.plan.seconds import StepLayout, sent_bytes, step_seconds
from ingot.plan.tracing.records import DISPATCH, SPREAD, MemoryUse, Operator, RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all
from tests.small import small_recipe

PRODUCT = Operator("matmul", "float32", 1e9, 1)
SUM = Operator("memory", "float32", 0, 1000)


def line(rate: float) -> Curve:
    return Curve.line(Range.exactly(0, "measured"), Range.exactly(rate, "measured"))


def device(exposed: Range = Range.exactly(1, "measured")) -> Coefficients:  # noqa: B008 (frozen)
    """1e9 FLOP/s, 1,000 bytes/s; 100 bytes/s within a node and 10 between nodes."""
    curves = {
        "matmul": line(1e9),
        "attention": line(5e8),
        "memory": line(1000),
        "within": line(100),
        "between": line(10),
    }
    nothing = Range.exactly(0, "measured")
    compiled = Range(0.5, 0.5, 1, "guessed")
    return Coefficients("d", "D", curves, nothing, exposed, compiled, "measured")


def trace(
    micro_batch: Mapping[Operator, float],
    update: Mapping[Operator, float] | None = None,
    steps: int = 1,
) -> RankTrace:
    return RankTrace(0, (), MemoryUse(), MemoryUse(), micro_batch, update or {}, steps, 1)


def bounds(value: Range) -> tuple[float, ...]:
    return tuple(round(bound, 9) for bound in (value.low, value.likely, value.high))


def likely(
    micro_batch: Mapping[Operator, float], layout: StepLayout, steps: int = 1
) -> dict[str, float]:
    took = step_seconds([trace(micro_batch, steps=steps)], device(), layout)
    parts = ("matmul", "attention", "memory", "within", "between", "bubble", "total")
    return {name: round(getattr(took, name).likely, 9) for name in parts}


def test_experts_that_are_chosen_more_often_are_the_upper_end() -> None:
    even = trace({PRODUCT: 1})
    crowded = replace(even, crowded=trace({PRODUCT: 3}))
    took = step_seconds([crowded], device(), StepLayout())
    assert bounds(took.matmul) == bounds(took.total) == (1, 1.3, 3)
    assert took.total.origin == "guessed"
    assert took.flops == 1e9


def test_python_between_operators_takes_its_time() -> None:
    taken = replace(
        device(),
        curves=device().curves
        | {
            "dispatch": Curve.flat(Range.exactly(0.5, "measured")),
            "dispatch of shards": Curve.flat(Range.exactly(2.0, "measured")),
        },
    )
    took = step_seconds([trace({PRODUCT: 1, DISPATCH: 4, SPREAD: 3})], taken, StepLayout())
    assert bounds(took.total) == (9, 9, 9)
    ahead = step_seconds(
        [trace({PRODUCT: 1, DISPATCH: 1000})], guessed(device_type("h100")), StepLayout()
    )
    without = step_seconds([trace({PRODUCT: 1})], guessed(device_type("h100")), StepLayout())
    assert ahead.total.likely == without.total.likely
    assert ahead.total.high > without.total.high


def test_ranks_on_a_shared_processor_wait_at_each_collective() -> None:
    """The longer they computed since the last one, the longer; not where nothing was measured."""
    sums = Operator("all_reduce", "float32", 0, 100, (2, 1))
    slow = Curve(((0.0, (0.0,) * 3), (10.0, (5.0,) * 3)), "measured")
    shared = replace(device(), curves=device().curves | {"waiting": slow})
    alone, waiting = (
        step_seconds([trace({PRODUCT: 4, sums: 2})], one, StepLayout(2)).total.likely
        for one in (device(), shared)
    )
    assert waiting - alone == pytest.approx(2 * 5.0 * (4 / 2) / 10)
    between = {PRODUCT: 4, sums._replace(kind="send"): 2}
    assert (
        step_seconds([trace(between)], shared, StepLayout(2)).total
        == step_seconds([trace(between)], device(), StepLayout(2)).total
    )


def test_micro_batches_are_many_and_the_update_is_one() -> None:
    took = step_seconds([trace({PRODUCT: 2}, {SUM: 3}, 4)], device(), StepLayout())
    assert took.matmul.likely == pytest.approx(8)
    assert took.memory.likely == pytest.approx(3)
    assert bounds(took.total) == (11, 11, 11)
    assert took.total.origin == "measured"
    assert took.flops == 8e9
    assert took.share_of_peak(5.5e9, 1e9).likely == pytest.approx(0.5)


def test_a_product_takes_the_longer_of_computing_and_reading() -> None:
    reading = Operator("matmul", "float32", 1e9, 3000)
    assert likely({PRODUCT: 1, reading: 1}, StepLayout())["matmul"] == 4


@pytest.mark.parametrize("kind", ["special", "softmax", "random"])
def test_kernels_that_are_not_known_apart_count_as_bound_by_memory(kind: str) -> None:
    assert likely({SUM._replace(kind=kind): 2}, StepLayout())["memory"] == 2


@pytest.mark.parametrize(
    ("group", "where"),
    [((2, 1), "within"), ((4, 1), "within"), ((2, 4), "between"), ((8, 1), "between")],
)
def test_a_group_is_within_a_node_if_its_ranks_are(group: tuple[int, int], where: str) -> None:
    took = likely({Operator("send", "float32", 0, 100, group): 1}, StepLayout(ranks_per_node=4))
    assert took[where] == (1 if where == "within" else 10)


def test_between_nodes_a_ring_uses_the_networks_of_all_its_ranks_in_a_node() -> None:
    layout = StepLayout(ranks_per_node=4)
    across, alone = (Operator("all_gather", "float32", 0, 800, group) for group in ((8, 1), (8, 4)))
    assert likely({across: 1}, layout)["between"] == 17.5  # 700 bytes over four networks
    assert likely({alone: 1}, layout)["between"] == 70


def test_each_collective_sends_its_share() -> None:
    assert sent_bytes("reduce", 100, 4) == 150
    assert sent_bytes("gather", 100, 4) == 75
    assert sent_bytes("send", 100, 4) == 100
    for name, seconds in (
        ("all_reduce", 1.5),
        ("_reduce_scatter_base_", 0.75),
        ("allgather_", 0.75),
    ):
        operator = Operator(name, "float32", 0, 100, (4, 1))
        assert likely({operator: 1}, StepLayout(ranks_per_node=4))["within"] == seconds


@pytest.mark.parametrize("kind", ["wait_tensor", "recv_", "barrier", "all_reduce"])
def test_waiting_and_groups_of_one_take_no_time(kind: str) -> None:
    group = (1, 1) if kind == "all_reduce" else (2, 1)
    assert likely({Operator(kind, "float32", 0, 100, group): 9}, StepLayout())["total"] == 0


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("_allgather_base_", 2, 3), ("all_gather_into_tensor", 3, 3)]
)
def test_only_sharding_hides_what_it_sends(kind: str, low: float, high: float) -> None:
    gather = Operator(kind, "float32", 0, 200, (2, 1))  # a second
    exposed = Range(0, 0.25, 1, "guessed")
    took = step_seconds([trace({PRODUCT: 2, gather: 1})], device(exposed), StepLayout(2))
    assert bounds(took.total) == (low, 2.25 if low < high else 3, high)
    assert took.total.origin == ("guessed" if low < high else "measured")


def test_what_is_longer_than_computing_cannot_be_hidden() -> None:
    gather = Operator("_allgather_base_", "float32", 0, 1000, (2, 1))  # five seconds
    hidden = device(Range(0, 0, 1, "guessed"))
    took = step_seconds([trace({PRODUCT: 2, gather: 1})], hidden, StepLayout(2))
    assert bounds(took.total) == (5, 5, 7)


def test_the_bubble_is_shared_by_virtual_stages_and_filled_by_zero_bubble() -> None:
    plain = likely({PRODUCT: 1}, StepLayout(pipeline=4), 8)
    assert (plain["bubble"], plain["total"]) == (3, 11)
    virtual = likely({PRODUCT: 1}, StepLayout(pipeline=4, virtual=2), 8)
    assert virtual["bubble"] == 1.5
    filled = likely({PRODUCT: 1}, StepLayout(pipeline=4, zero_bubble=True), 8)
    assert filled["bubble"] == pytest.approx(1)


def test_the_slowest_rank_counts() -> None:
    ranks = [trace({PRODUCT: times}) for times in (1, 3, 2)]
    assert step_seconds(ranks, device(), StepLayout()).total.likely == pytest.approx(3)


def test_compiled_kernels_read_less_and_multiply_as_much() -> None:
    took = likely({PRODUCT: 1, SUM: 2}, StepLayout(compiled=True))
    assert (took["matmul"], took["memory"]) == (1, 1)


def test_what_is_done_once_a_step_is_not_compiled() -> None:
    took = step_seconds([trace({}, update={SUM: 2})], device(), StepLayout(compiled=True))
    assert took.memory.likely == pytest.approx(2)


def test_a_product_with_a_short_side_is_narrow() -> None:
    def product(m: int, n: int, k: int) -> Operator:
        return Operator("matmul", "float32", 2 * m * n * k, 4 * (m * k + k * n + m * n))

    assert is_narrow(product(1024, 8, 4096))
    assert is_narrow(product(64, 64, 64))
    assert not is_narrow(product(1024, 1024, 1024))


def test_what_sharding_sends_is_in_a_traced_step(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, parallel__shard=2, train__global_batch=8, train__micro_batch=4)
    [traced] = trace_all([TraceRequest(recipe, 2)])
    assert isinstance(traced, RankTrace)
    sent = {operator.kind for operator in traced.micro_batch if operator.group == (2, 1)}
    assert {"_allgather_base_", "_reduce_scatter_base_"} <= sent
    took = step_seconds([traced], device(), StepLayout(2))
    assert took.within.likely > 0 < took.matmul.likely


def test_a_guessed_step_has_a_wide_range_and_says_so() -> None:
    work = {Operator("matmul", "bfloat16", 1e13, 10**9): 100.0}
    took = step_seconds([trace(work)], guessed(device_type("a100-80")), StepLayout(8))
    assert took.total.origin == "guessed"
    assert took.total.high / took.total.low == pytest.approx(2, abs=0.1)


def test_attention_of_documents_that_share_a_row_takes_its_share() -> None:
    product = Operator("attention", "float32", 1e9, 1)
    third = StepLayout(attended=Range.exactly(1 / 3))
    assert likely({product: 3}, third)["attention"] == 2
    assert likely({product: 3, PRODUCT: 1}, third)["matmul"] == 1
