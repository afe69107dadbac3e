"""Judgements before a training starts: each at a recipe that deserves it and at one that does not."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.hostmemory import HostMemory, host_memory
from ingot.config.load import read_recipe
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.plan import place
from ingot.plan.checks import machines
from ingot.plan.checks.finding import PlanFinding
from ingot.plan.checks.machines import (
    judge_compute,
    judge_float8,
    judge_length,
    judge_offload,
    judge_pauses,
    judge_place,
    judge_sampling,
    judge_server,
)
from ingot.plan.checks.recipe import all_judgements, judge_data, judge_rate, published_rates
from ingot.plan.data_sample import ColumnLengths, LengthSample
from ingot.plan.place import installed_gpus, place_of
from ingot.plan.ranges import Range
from ingot.plan.storage import ModelSize
from ingot.plan.unknown import Unknown
from tests.graph import PROJECT
from tests.plan.test_run_cost import PLACE, cost
from tests.small import small_recipe

LENGTHS = ColumnLengths(32, 20.0, 5.0, 20.0, 40.0, 90, 0.2, 0.1, 1.0)
SAMPLE = LengthSample(
    about="all 100 documents",
    documents=100,
    columns={"tokens": LENGTHS},
    truncated=0.0,
    left_out=0.0,
    lost_targets=0.0,
    padding=0.0,
    rows=Range.exactly(400.0),
    tokens=Range.exactly(2e4),
    text_bytes=Range.exactly(8e4),
    vocab_size=320,
)


def warned(findings: Any) -> list[str]:
    found = [findings] if isinstance(findings, PlanFinding) else list(findings)
    return [each.about for each in found if each.kind == "warning"]


@pytest.mark.parametrize(
    ("changed", "about"),
    [
        ({}, []),
        ({"truncated": 0.3, "lost_targets": 0.2}, ["data.seq_len"]),
        ({"truncated": 0.3, "lost_targets": 0.001}, []),
        ({"truncated": 0.3, "lost_targets": None}, ["data.seq_len"]),
        ({"left_out": 0.05}, ["data.seq_len"]),
        ({"padding": 0.8}, ["data.pack"]),
    ],
)
def test_data_beside_the_rows(tmp_path: Path, changed: dict[str, Any], about: list[str]) -> None:
    assert warned(judge_data(small_recipe(tmp_path), replace(SAMPLE, **changed))) == about


def test_what_is_left_out_is_told_with_its_cause(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, objective__kind="sft", data__truncate="drop")
    found = [one.message for one in judge_data(recipe, replace(SAMPLE, left_out=0.5))]
    assert any("since they are longer, and data.truncate is drop" in one for one in found)


def test_padding_of_single_records_is_an_upper_bound(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, objective__kind="dpo")
    told = [one.message for one in judge_data(recipe, replace(SAMPLE, padding=0.9))]
    assert "at most" in told[-1]


@pytest.mark.parametrize(
    ("objective", "truncate", "side"),
    [("sft", "right", "their end"), ("sft", "left", "their beginning"), ("dpo", "left", "prompt")],
)
def test_what_is_cut_is_told_of_its_side(
    objective: str, truncate: str, side: str, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, objective__kind=objective, data__truncate=truncate)
    found = list(judge_data(recipe, replace(SAMPLE, truncated=0.5, lost_targets=None)))
    assert side in found[-1].message
    assert "cut away" not in found[-1].message
    assert warned(found) == ["data.seq_len"]


def test_rows_of_prompts_have_no_padding_to_judge(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        objective={"kind": "grpo", "rewards": [{"kind": "exact"}]},
        train__global_batch=8,
    )
    told = list(judge_data(recipe, replace(SAMPLE, padding=0.9)))
    assert "data.pack" not in [one.about for one in told]


@pytest.mark.parametrize(
    ("peaks", "about"),
    [
        ({"bfloat16": 1e9, "float32": 9e10}, ["precision.compute"]),
        ({"bfloat16": 2e11, "float32": 9e10}, []),
        ({"float32": 9e10}, []),
    ],
)
def test_a_processor_that_is_slow_in_bf16_is_told(
    peaks: dict[str, float], about: list[str]
) -> None:
    found = list(judge_compute("bfloat16", peaks))
    assert warned(found) == about
    assert not found or "90.0 times" in found[0].message
    assert not list(judge_compute("float32", peaks))


@pytest.mark.parametrize(
    ("warmup", "about"),
    [(0.02, []), (3, ["train.schedule.warmup"]), (50, ["train.schedule.warmup"])],
)
def test_the_warm_up_ends_within_the_steps(tmp_path: Path, warmup: float, about: list[str]) -> None:
    steps = 50 if warmup > 3 else 12
    recipe = small_recipe(tmp_path, train__steps=steps, train__schedule__warmup=warmup)
    assert warned(judge_length(recipe, cost(recipe), SAMPLE.rows)) == about


def test_what_a_training_is_too_short_for_is_told(tmp_path: Path) -> None:
    knobs = {"train__evaluate_every": "epoch", "checkpoint__best": "loss"}
    recipe = small_recipe(tmp_path, train__steps=99, **knobs)
    assert warned(judge_length(recipe, cost(recipe), SAMPLE.rows)) == ["checkpoint.best"]
    recipe = small_recipe(tmp_path, train__steps=100, **knobs)
    assert warned(judge_length(recipe, cost(recipe), SAMPLE.rows)) == []


def test_fewer_rows_than_a_batch_and_many_passes_are_told(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=1000)
    few = Range.exactly(3.0)
    assert "train.global_batch" in warned(judge_length(recipe, cost(recipe), few))
    rows = Range.exactly(100.0)
    assert warned(judge_length(recipe, cost(recipe, rows=rows), rows)) == ["train"]
    rows = Range.exactly(4000.0)
    assert warned(judge_length(recipe, cost(recipe, rows=rows), rows)) == []


@pytest.mark.parametrize(
    ("knobs", "size", "rate", "kind"),
    [
        ({}, 1.3e9, 3e-4, "known"),
        ({}, 1.3e9, 3e-2, "warning"),
        ({}, 1.3e9, 1e-6, "warning"),
        ({}, 2e6, 6e-3, "not checked"),
        ({"objective__kind": "sft"}, 7e9, 2e-5, "known"),
        ({"objective__kind": "sft"}, 70e9, 3e-3, "warning"),
        ({"objective__kind": "sft", "model__lora": {}}, 7e9, 2e-4, "known"),
        ({"objective__kind": "dpo"}, 7e9, 5e-7, "known"),
        ({"objective__kind": "dpo"}, 7e9, 2e-5, "warning"),
        ({"train__optimizer__kind": "sgd"}, 1.3e9, 0.1, "not checked"),
    ],
)
def test_a_learning_rate_beside_published_ones(
    tmp_path: Path, knobs: dict[str, Any], size: float, rate: float, kind: str
) -> None:
    recipe = small_recipe(tmp_path, train__optimizer__lr=rate, **knobs)
    random = recipe.objective.kind == "pretrain"
    found = judge_rate(recipe, ModelSize(int(size), int(size)), random=random)
    assert found.kind == kind, found.message
    if kind == "warning":
        assert "(" in found.message, "the sources are named"


def test_every_published_rate_has_a_source_with_an_address() -> None:
    table = dict(published_rates())
    sources = table.pop("sources")
    assert all(one["title"] and one["url"].startswith("https://") for one in sources.values())
    for way, rows in table.items():
        for weights, rate, source in rows:
            assert source in sources, f"{way}: {source}"
            assert 1e7 <= weights <= 1e12
            assert 1e-8 < rate < 1e-2


WEIGHTS = {
    "pretrain_llama": (1.2e9, True),
    "pretrain_llama_8b": (8e9, True),
    "sft_llama": (1.2e9, False),
    "sft_llama_8b": (8e9, False),
    "dpo_llama": (1.2e9, False),
    "reward_llama": (1.2e9, False),
    "lora_llama": (8e9, False),
    "continue_llama": (1.2e9, False),
    "chat_smollm2": (135e6, False),
    "t5_small": (60e6, False),
    "t5_xxl": (11e9, False),
    "bart_large": (400e6, False),
    "roberta_large": (355e6, False),
    "adapt_roberta": (125e6, False),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_shipped_recipe_is_warned_of_its_rate(name: str) -> None:
    weights, random = WEIGHTS[name]
    recipe = read_recipe([str(PROJECT / "recipes" / f"{name}.yaml")])
    found = judge_rate(recipe, ModelSize(int(weights), int(weights)), random=random)
    assert found.kind == "known", found.message


def test_evaluations_that_take_longer_than_training(tmp_path: Path) -> None:
    often = small_recipe(tmp_path, train__steps=100, train__evaluate_every=1)
    assert "train.evaluate_every" in warned(judge_pauses(often, cost(often)))
    seldom = small_recipe(tmp_path, train__steps=1000, train__evaluate_every=500)
    assert warned(judge_pauses(seldom, cost(seldom))) == []


def test_seconds_are_never_much(tmp_path: Path) -> None:
    short = small_recipe(tmp_path, train__steps=3, checkpoint__every=1)
    assert warned(judge_pauses(short, cost(short, step_s=Range.exactly(0.001)))) == []


def test_saves_and_restarts_that_eat_the_run(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=100_000, checkpoint__every=100_000)
    many = replace(PLACE, nodes=2000, processes=8)
    assert "checkpoint.every" in warned(judge_pauses(recipe, cost(recipe, many)))
    large = ModelSize(10**11, 10**11)
    often = small_recipe(tmp_path, train__steps=1000, checkpoint__every=1)
    assert "checkpoint.every" in warned(judge_pauses(often, cost(often, size=large)))


def test_room_devices_and_limits(tmp_path: Path) -> None:
    def told(place: Any = PLACE, recipe: Recipe | None = None, **changed: Any) -> list[str]:
        recipe = recipe or small_recipe(tmp_path, launch__kind="gce", checkpoint__every=4)
        return warned(judge_place(recipe, place, cost(recipe, place, **changed)))

    assert told() == []
    assert told(replace(PLACE, processes=2)) == ["launch.processes"]
    assert told(replace(PLACE, disk_bytes=1e6)) == ["checkpoint.keep"]
    assert told(size=ModelSize(10**10, 10**10)) == ["checkpoint.asynchronous"]
    short = small_recipe(tmp_path, launch__kind="gce", cloud__max_run="1m", train__steps=500)
    assert told(recipe=short) == ["cloud.max_run"]
    cheap = small_recipe(
        tmp_path,
        launch__kind="gce",
        launch__machine={"type": "a3-highgpu-8g"},
        cloud__max_cost=20,
        train__steps=5000,
    )
    assert told(recipe=cheap) == ["cloud.max_cost"]


@pytest.mark.parametrize(
    ("documents", "whole", "knobs", "told"),
    [
        (1, True, {}, True),
        (60, True, {"data__validation__fraction": 0.01}, True),
        (60, True, {}, False),
        (1, False, {}, False),
        (1, True, {"data__validation__fraction": None, "data__validation": []}, False),
    ],
    ids=["one", "few of a small share", "enough", "a sample of more", "none wanted"],
)
def test_so_few_documents_that_none_is_held_out_are_told_before_prepare_stops(
    tmp_path: Path, documents: int, whole: bool, knobs: dict[str, Any], told: bool
) -> None:
    """`small_recipe` holds out a tenth."""
    sample = replace(SAMPLE, documents=documents, whole=whole)
    found = warned(judge_data(small_recipe(tmp_path, **knobs), sample))
    assert ("data.validation" in found) == told


def test_limits_are_held_against_the_upper_end(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, launch__kind="gce", cloud__max_run="1h", train__steps=1000)
    found = cost(recipe)
    assert isinstance(found.total_s, Range)
    assert found.total_s.likely < 3600 < found.total_s.high
    told = [one.message for one in judge_place(recipe, PLACE, found) if one.kind == "warning"]
    assert "may end" in told[0]


def test_a_model_beside_the_machine_that_serves_it(tmp_path: Path) -> None:
    config, machine = preset("llama-8b"), {"type": "g2-standard-8"}
    knobs: dict[str, Any] = {"registry__kind": "vertex", "serve__machine": machine}
    recipe = small_recipe(tmp_path, **knobs)
    size = ModelSize(8 * 10**9, 8 * 10**9)
    fits = judge_server(recipe, config, size)
    assert fits.kind == "known", fits.message
    large = judge_server(recipe, preset("llama-8b"), ModelSize(70 * 10**9, 1))
    assert large.kind == "warning"
    assert "does not fit" in large.message
    assert judge_server(recipe, None, None).kind == "not checked"


def test_a_processor_keeps_keys_and_values_in_float32(tmp_path: Path) -> None:
    """No weights, so that what is needed is the cache alone: 32 layers of 8 heads of 128, keys and
    values of a row of 64 tokens for each of 1,000 requests.
    """

    def needed(machine: str) -> str:
        knobs: dict[str, Any] = {"registry__kind": "vertex", "serve__machine": {"type": machine}}
        recipe = small_recipe(tmp_path, serve__max_batch=1000, data__seq_len=64, **knobs)
        return judge_server(recipe, preset("llama-8b"), ModelSize(0, 0)).message

    on_device = 2 * 2 * 32 * 8 * 128 * 64 * 1000 / 1e9
    assert f"{on_device:.1f} (" in needed("g2-standard-8")
    assert f"{2 * on_device:.1f} (" in needed("e2-highmem-16")


@pytest.mark.parametrize(
    ("processor", "knobs", "gigabytes"),
    [
        ("x86_64", {}, 2),
        ("arm64", {}, 4),
        ("x86_64", {"serve__pack": False}, 4),
        ("x86_64", {"serve__engine": "transformers"}, 4),
        ("x86_64", {"precision__export": "fp32"}, 4),
        ("arm64", {"serve__compute": "bf16"}, 2),
    ],
)
def test_where_weights_are_not_packed_a_processor_has_them_in_float32(
    processor: str,
    knobs: dict[str, Any],
    gigabytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(machines, "installed_gpus", lambda: ())
    recipe = small_recipe(tmp_path, serve__max_batch=1, data__seq_len=1, **knobs)
    told = judge_server(recipe, preset("llama-8b"), ModelSize(10**12, 0)).message
    assert f" ({1000.0 * gigabytes:,} to {1400.0 * gigabytes:,}) GB of this machine's" in told


def test_the_gpu_of_a_machine_with_one_memory_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver tells no size of it, as of NVIDIA's GB10."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA GB10, [N/A]'; echo 'NVIDIA L4, 23034'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host = float(host_memory().total)
    assert installed_gpus.__wrapped__() == (("NVIDIA GB10", host), ("NVIDIA L4", 23034 * 2.0**20))


def test_what_fits_a_container_is_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a limit of 1 GB on a machine with more: half for each of two ranks, and all for a server."""
    for asks in (place, machines):
        monkeypatch.setattr(asks, "installed_gpus", lambda: ())
        monkeypatch.setattr(asks, "host_memory", lambda: HostMemory(0, 10**9))
    here = place_of(small_recipe(tmp_path, launch__processes=2))
    assert (here.host_bytes, here.device_bytes) == (1e9, Range.exactly(5e8, "measured"))
    told = judge_server(small_recipe(tmp_path), preset("llama-8b"), ModelSize(10**9, 0))
    assert "of this machine's 1.0" in told.message


def test_what_sampling_needs_beside_the_steps_is_told(tmp_path: Path) -> None:
    """512 answers of 32 tokens with keys and values of 32 layers of 8 heads of 128 in bfloat16 are
    2.1 GB, a copy of 8 billion weights is 16 GB, and twice of either in float32.
    """
    grpo: dict[str, Any] = {
        "objective": {"kind": "grpo", "rewards": [{"kind": "exact"}], "sample_rows": 512}
    }
    size = ModelSize(8 * 10**9, 8 * 10**9)
    for layout, compute, wanted in (
        ({}, "bf16", "up to 2.1 GB on a rank for the answers that it samples at once"),
        ({"parallel__shard": 8}, "bf16", "and 16.0 GB for a whole copy of the policy"),
        ({"parallel__shard": 8}, "fp32", "and 32.0 GB for a whole copy of the policy"),
    ):
        knobs: dict[str, Any] = {**grpo, **layout, "precision__compute": compute}
        recipe = small_recipe(tmp_path, **knobs, train__global_batch=8)
        (told,) = judge_sampling(recipe, preset("llama-8b"), size)
        assert told.message.endswith(wanted)
        assert told.kind == "not checked"
    grpo["objective"] |= {"staleness": 3}
    recipe = small_recipe(tmp_path, **grpo, precision__compute="bf16", train__global_batch=8)
    (told,) = judge_sampling(recipe, preset("llama-8b"), size)
    wanted = "and 48.0 GB for up to 3 whole copies of the policy, beside a step's memory"
    assert told.message.endswith(wanted)
    grpo["objective"] |= {"sampler": {"url": "http://a:1"}, "old_logprobs": "recomputed"}
    recipe = small_recipe(tmp_path, **grpo, train__global_batch=8)
    assert [one.message for one in judge_sampling(recipe, preset("llama-8b"), size)] == [
        "a plan knows nothing of the time, memory and devices of objective.sampler"
    ]
    assert not list(judge_sampling(small_recipe(tmp_path), preset("llama-8b"), size))


def test_what_a_device_has_in_the_hosts_memory_takes_time_that_is_not_told(tmp_path: Path) -> None:
    for offload, wanted in (
        ({"activations": True}, "what copies to the host and back take;"),
        ({"optimizer": 0.5}, "what copies to the host and back take, and the optimizer on its"),
    ):
        recipe = small_recipe(tmp_path, memory__offload=offload)
        (told,) = judge_offload(recipe, replace(PLACE, type="cuda"))
        assert told.message.startswith(wanted)
        assert (told.kind, told.about) == ("not checked", f"memory.offload.{next(iter(offload))}")
        assert told in all_judgements(
            recipe,
            replace(PLACE, type="cuda"),
            cost(recipe, size=None),
            Unknown("nothing"),
            None,
            None,
            random=True,
        )
        assert not list(judge_offload(recipe, replace(PLACE, type="cpu")))
    assert not list(judge_offload(small_recipe(tmp_path), replace(PLACE, type="cuda")))


def test_float8_is_no_faster_where_nothing_is_compiled(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, precision__float8="rowwise")
    (told,) = judge_float8(recipe)
    assert (told.kind, told.about) == ("warning", "precision.float8")
    assert "set train.compile=true" in told.message
    assert told in all_judgements(
        recipe, PLACE, cost(recipe, size=None), Unknown("nothing"), None, None, random=True
    )
    for knobs in ({"precision__float8": "none"}, {"train__compile": True}):
        given = {"precision__float8": "rowwise", **knobs}
        assert not list(judge_float8(small_recipe(tmp_path, **given)))


def test_what_is_unknown_is_not_checked_and_never_passed(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, train__steps=None, train__epochs=1, launch__kind="gce")
    nothing = Unknown("no trace")
    found = all_judgements(
        recipe,
        PLACE,
        cost(recipe, size=None, step_s=nothing, data_bytes=nothing),
        Unknown("lengths of documents: gs:// is not here"),
        None,
        None,
        random=True,
    )
    assert {one.kind for one in found} == {"not checked"}
    about = {one.about for one in found}
    assert about >= {"data", "train", "train.optimizer.lr", "checkpoint.keep", "serve.machine"}
    assert "cloud.max_run" in about


def test_checkpoints_alone_are_held_against_the_disk_where_the_data_is_not_known(
    tmp_path: Path,
) -> None:
    recipe = small_recipe(tmp_path)
    place, unknown = replace(PLACE, disk_bytes=1e6), Unknown("`ingot ingest`")
    told = list(judge_place(recipe, place, cost(recipe, data_bytes=unknown)))
    assert "checkpoints and model alone do not fit" in told[0].message
    assert ("not checked", "checkpoint.keep") in [(one.kind, one.about) for one in told]
    assert "whether data fits" in told[1].message


def test_evaluations_see_no_more_rows_than_are_held_out(tmp_path: Path) -> None:
    recipe = small_recipe(
        tmp_path,
        data__validation={"fraction": 0.1},
        train__evaluate_every=1,
        train__evaluate_rows=10_000,
    )
    many, few = (cost(recipe, rows=Range.exactly(rows)).evaluation_s for rows in (90_000.0, 90.0))
    assert isinstance(many, Range)
    assert isinstance(few, Range)
    assert many.likely == pytest.approx(1000 * few.likely, rel=0.1)
