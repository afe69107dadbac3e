"""What `parallel: auto` comes to at a place, and with which micro-batch trials begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.config.automatic import StartDevices
from ingot.config.degrees import Degrees
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.plan.assemble import ModelKnown
from ingot.plan.automatic import (
    SearchingPlanner,
    automatic_layout,
    no_layout,
    planned_layout,
)
from ingot.plan.devices.coefficients import Coefficients, Curve, cpu_name, save
from ingot.plan.place import PlannedPlace, place_of, place_of_start
from ingot.plan.ranges import Range
from ingot.plan.tracing.workers import Tracer, TraceRequest
from tests.small import small_recipe, write_documents

CONFIG = preset("llama-3m")
MODEL = ModelKnown(CONFIG, random=True)
MIB = 2**20
KINDS = ("matmul float32", "attention float32", "memory float32", "within", "between")
H100 = StartDevices(8, 8, "cuda", "NVIDIA H100 80GB HBM3", 85 * 10**9)


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    write_documents(tmp_path / "text", 5)
    knobs = {
        "parallel": "auto",
        "model__config": None,
        "launch__processes": 2,
        "data__seq_len": 128,
    }
    knobs |= {"train__global_batch": 8, "train__micro_batch": 1}
    return lambda **more: small_recipe(tmp_path, **{**knobs, **more})


@pytest.fixture
def calibrated(traced: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine's processor with two ranks."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    exact = Range.exactly(1, "measured")
    rate, name = Curve.line(exact * 1e-6, exact * 1e9), cpu_name(1, 2)
    curves = dict.fromkeys(KINDS, rate)
    save(Coefficients(*name, curves, exact, exact, exact, "measured", threads=1, ranks=2))


@pytest.fixture(scope="module")
def traced() -> Iterator[None]:
    """Each trace is made once for all tests of this file."""
    traces, known = Tracer.traces, dict[str, Any]()

    def remembered(self: Tracer, requests: Sequence[TraceRequest]) -> Any:
        knobs = ("parallel", "memory", "data.seq_len", "train.global_batch", "train.micro_batch")
        names = [f"{one.recipe.select(knobs)} {one[1:]}" for one in requests]
        absent = {name: one for name, one in zip(names, requests, strict=True) if name not in known}
        known.update(zip(absent, traces(self, list(absent.values())), strict=True))
        return [known[name] for name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tracer, "traces", remembered)
        yield


def place(recipe: Recipe, memory: float = 2**40) -> PlannedPlace:
    found = place_of(recipe.at("train"))
    return replace(found, device_bytes=Range.exactly(memory))


@pytest.mark.drawn("degrees by trials")
def test_the_fastest_that_fits_is_chosen(recipe: Any, calibrated: None) -> None:
    asked = recipe()
    chosen = automatic_layout(asked, place(asked), MODEL)
    assert chosen.searched
    assert chosen.degrees.world == 2
    assert chosen.why.startswith("the fastest of 3 that fit this machine, CPU, about")
    # A replica takes 48 MiB, half of the weights 38, half of each matrix 25.
    small = automatic_layout(asked, place(asked, 42 * MIB), MODEL)
    assert small.degrees in (Degrees(shard=2), Degrees(tensor=2))


def test_nothing_that_fits_is_refused_with_what_helps(recipe: Any, calibrated: None) -> None:
    asked = recipe()
    with pytest.raises(WrongInput) as refused:
        automatic_layout(asked, place(asked, 22 * MIB), MODEL)
    told = str(refused.value)
    assert told.startswith(
        "parallel: auto finds no layout of this machine, CPU that fits: 2 devices"
    )
    assert "does not fit: " in told
    assert "set memory.recompute.kind=full, lower train.micro_batch" in told


def test_the_one_that_takes_least_is_taken_where_none_surely_fits(
    recipe: Any, calibrated: None
) -> None:
    asked = recipe()
    unsure = replace(place(asked), device_bytes=Range(20 * MIB, 60 * MIB, 900 * MIB, "guessed"))
    chosen = automatic_layout(asked, unsure, MODEL)
    assert chosen.degrees == Degrees(tensor=2)
    assert chosen.why.startswith("of those that may fit this machine, CPU the one that takes least")


@pytest.mark.parametrize(
    ("config", "changed", "why"),
    [
        (None, {}, "the model's configuration is not known"),
        (CONFIG, {"device_bytes": None}, "the memory of CPU is not known"),
        (CONFIG, {"type": "cuda", "device_name": "GB999"}, "the speed of GB999 is not known"),
    ],
)
def test_weights_are_shared_by_all_where_little_is_known(
    config: Any, changed: dict[str, Any], why: str, recipe: Any
) -> None:
    asked = recipe()
    chosen = automatic_layout(asked, replace(place(asked), **changed), ModelKnown(config, True))
    assert (chosen.degrees, chosen.searched) == (Degrees(shard=2), False)
    assert chosen.why.startswith(why)


def test_a_kernel_that_was_not_measured_is_no_reason_to_refuse(
    recipe: Any, calibrated: None, tmp_path: Path
) -> None:
    (file,) = (tmp_path / "config/ingot/devices").iterdir()
    file.write_text(file.read_text(encoding="utf-8").replace("attention float32", "other"))
    asked = recipe()
    chosen = automatic_layout(asked, place(asked), MODEL)
    assert chosen.degrees == Degrees(shard=2)
    assert "have no attention in float32" in chosen.why


def test_one_process_needs_no_search(recipe: Any) -> None:
    asked = recipe(launch__processes=1)
    chosen = automatic_layout(asked, place(asked), MODEL)
    assert (chosen.degrees, chosen.text()) == (Degrees(), "one process: there is only one")


def test_what_can_be_refused_without_a_trace_is(recipe: Any) -> None:
    asked = recipe()
    assert no_layout(asked, place(asked), CONFIG) == ""
    told = no_layout(asked, place(asked, MIB), CONFIG)
    assert "weights, gradients and optimizer alone take" in told
    odd = recipe(train__global_batch=5, model__config__num_key_value_heads=1)
    told = no_layout(odd, place(odd), {**CONFIG, "num_key_value_heads": 1})
    assert "train.global_batch 5 does not divide over 2 processes" in told


def test_what_training_refuses_is_no_candidate(recipe: Any) -> None:
    """Samples while training are not possible with sequence parallelism, nor is dropout of an
    adapter with shared matrices.
    """
    asked = recipe(train__sample_every=2, train__global_batch=5, evaluate__prompts="[the]")
    told = no_layout(asked, place(asked), CONFIG)
    assert "parallel.sequence cannot cut evenly" in told


def test_given_degrees_are_left(recipe: Any) -> None:
    given = recipe(parallel="{shard: 2}")
    assert planned_layout(given, place(given), MODEL, searching=True) == (given, "")
    auto, told = planned_layout(recipe(), place(given), MODEL, searching=False)
    assert (auto.parallel.shard, auto.parallel.degrees) == (2, "given")
    assert (
        told == "parallel: auto is decided when training starts; counted with weights shared by all"
    )


def test_a_start_is_a_place(recipe: Any) -> None:
    found = place_of_start(recipe().at("train"), replace(H100, world=16))
    assert (found.nodes, found.processes, found.type) == (2, 8, "cuda")
    assert found.device is not None
    assert (found.device.name, found.device_bytes) == ("h100", Range.exactly(85e9, "measured"))
    unknown = place_of_start(recipe().at("train"), replace(H100, name="GB999"))
    assert (unknown.device, unknown.device_name) == (None, "GB999")


@pytest.mark.drawn("degrees by trials")
def test_trials_begin_with_what_surely_fits(recipe: Any, traced: None) -> None:
    asked = recipe(parallel="{replicate: 8}", train__global_batch=1024, train__micro_batch="auto")
    planner = SearchingPlanner()
    assert planner.micro_batch(asked, H100) == 128, "all rows of a rank"
    # From two rows it follows that 128 would fit, which they do not: half of them are tried.
    assert planner.micro_batch(asked, replace(H100, memory=27 * 10**8)) == 64
    assert planner.micro_batch(asked, replace(H100, memory=10**8)) is None
    assert planner.micro_batch(asked, replace(H100, type="cpu")) is None
