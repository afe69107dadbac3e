"""What of a training can be judged before it starts: data beside the rows, length, warm-up,
learning rate, evaluations, saves, limits of money and time, the server. No torch; asks nobody.

Nothing here is an error: what can never work is refused by the checks of a recipe and by training.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import yaml

from ingot.base.errors import WrongInput
from ingot.base.progress import duration
from ingot.cloud.machines import accelerators_of, machine_type
from ingot.cloud.prices import time_limit_s
from ingot.config.models.family import sizes
from ingot.config.models.source import trained_kind
from ingot.config.recipe import Recipe
from ingot.config.sections.grpo import GRPOSettings
from ingot.config.sections.launch import Machine
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.sections.training import AdamSettings
from ingot.plan.data_sample import LengthSample
from ingot.plan.devices.types import device_of_machine
from ingot.plan.place import GIB, PlannedPlace, installed_gpus
from ingot.plan.ranges import Range
from ingot.plan.run_cost import RunCost
from ingot.plan.storage import ModelSize
from ingot.plan.unknown import Unknown, times
from ingot.train.optim.schedules import warmup_steps

FindingKind = Literal["warning", "known", "not checked"]
MUCH_LOST, MUCH_PADDED, MUCH_EVALUATED, MUCH_REPEATED = 0.01, 0.5, 0.1, 0.2
"""Shares from which on a finding is a warning."""
MUCH_S = 60.0
"""Less time than this is never much."""
MANY_EPOCHS = 4.0
"""Passes over the same texts that are nearly as good as new ones (Muennighoff et al. 2023, Scaling
Data-Constrained Language Models, https://arxiv.org/abs/2305.16264).
"""
LONG_WARMUP = 0.2
ABOVE, BELOW = 5.0, 20.0
"""How far a learning rate may lie above and below all published ones."""
REACH, REACH_OF = 10.0, {"pretrain": 4.0, "lora": 1e3, "lora_dpo": 1e3, "classify": 1e3}
"""A published training is compared with models up to this many times larger or smaller."""
MUCH_HOST = 0.6


@dataclass(frozen=True)
class PlanFinding:
    """One judgement; `about` is the knob or thing that it concerns."""

    kind: FindingKind
    about: str
    message: str


def judge_data(recipe: Recipe, sample: LengthSample) -> Iterator[PlanFinding]:
    """How documents fit into the rows."""
    name, own = next(iter(sample.columns.items()))
    each = "document" if name == "tokens" else name
    yield PlanFinding(
        "known",
        "data",
        f"{sample.about}; a {each} has {own.median:,.0f} tokens in the median,"
        f" {own.high:,.0f} at 90 % and {own.longest:,} at most; {own.longer:.1%} are longer"
        f" than {own.limit:,}",
    )
    if sample.truncated or (sample.lost_targets or 0.0) > 0.0:
        lost, message = (
            sample.lost_targets,
            f"{sample.truncated:.1%} of the documents lose their end",
        )
        if lost is not None:
            message += f", and {lost:.1%} of the trained tokens are cut away"
        much = max(sample.truncated if lost is None else lost, 0.0) > MUCH_LOST
        way = "; raise data.seq_len, or drop long documents" if much else ""
        if much and recipe.documents == "pair":
            way = "; raise data.seq_len or data.target_len"
        yield PlanFinding("warning" if much else "known", "data.seq_len", message + way)
    if sample.left_out > 0.0:
        much = sample.left_out > MUCH_LOST
        yield PlanFinding(
            "warning" if much else "known",
            "data.seq_len",
            f"{sample.left_out:.1%} of the documents are left out, since nothing that is trained"
            " remains of them",
        )
    if sample.padding > 0.0:
        much = sample.padding > MUCH_PADDED
        message = f"{sample.padding:.1%} of the positions are padding"
        if trained_kind(recipe) != "decoder" or recipe.documents in TWO_ROWS:
            message += " at most: batches are only as long as their longest document"
            much = False
        else:
            message += "; lower data.seq_len, or set data.pack to best_fit" if much else ""
        yield PlanFinding("warning" if much else "known", "data.pack", message)


def judge_length(recipe: Recipe, cost: RunCost, rows: Range | None) -> Iterator[PlanFinding]:
    """Steps, epochs and warm-up."""
    if rows is not None and rows.high < recipe.objective.rows_of(recipe.train.global_batch):
        yield PlanFinding(
            "warning",
            "train.global_batch",
            f"{rows.likely:,.0f} training rows are fewer than one batch of"
            f" {recipe.train.global_batch:,}; training will refuse it",
        )
    if isinstance(cost.steps, Unknown):
        yield PlanFinding("not checked", "train", f"number of steps: {cost.steps.needs}")
        return
    repeated = not isinstance(cost.epochs, Unknown) and cost.epochs.low > MANY_EPOCHS
    if repeated and recipe.objective.kind == "pretrain":
        yield PlanFinding(
            "warning",
            "train",
            f"more than {MANY_EPOCHS:g} passes over the same texts; up to so many are nearly as"
            " good as new ones (Muennighoff et al. 2023)",
        )
    steps = round(cost.steps.likely)
    warmup = warmup_steps(recipe.train.schedule, steps)
    if warmup >= steps:
        yield PlanFinding(
            "warning",
            "train.schedule.warmup",
            f"the warm-up of {warmup:,} steps does not end within {steps:,}: the learning rate"
            " never comes down from its peak, or never reaches it; lower train.schedule.warmup",
        )
    elif warmup > LONG_WARMUP * steps and steps > 10:
        yield PlanFinding(
            "warning",
            "train.schedule.warmup",
            f"the warm-up takes {warmup:,} of {steps:,} steps ({warmup / steps:.0%})",
        )
    else:
        yield PlanFinding("known", "train", f"{steps:,} steps, {warmup:,} of them warm-up")


@functools.cache
def published_rates() -> dict[str, Any]:
    """The table of published learning rates, with their sources."""
    text = importlib.resources.files("ingot.plan").joinpath("learning_rates.yaml")
    found: dict[str, Any] = yaml.safe_load(text.read_text(encoding="utf-8"))
    return found


def judge_rate(recipe: Recipe, size: ModelSize | None, *, random: bool) -> PlanFinding:
    """The learning rate beside those of published trainings of the same way and a similar size."""
    knob, optimizer = "train.optimizer.lr", recipe.train.optimizer
    if not isinstance(optimizer, AdamSettings):
        return PlanFinding("not checked", knob, f"no published ones are known for {optimizer.kind}")
    if size is None:
        return PlanFinding("not checked", knob, "the model's size is not known")
    way = _way(recipe, random=random)
    table, reach = published_rates(), REACH_OF.get(way, REACH)
    near = [
        (rate, source)
        for weights, rate, source in table.get(way, ())
        if 1 / reach <= size.weights / weights <= reach
    ]
    if not near:
        of = f"{size.weights / 1e6:,.3g} M weights"
        return PlanFinding("not checked", knob, f"no published ones are known for {way} of {of}")
    low, high = min(near), max(near)
    between = f"{low[0]:g}" if low[0] == high[0] else f"{low[0]:g} to {high[0]:g}"
    message = (
        f"{optimizer.lr:g}; published for {way} of about this size: {between}"
        f" ({_sources(source for _, source in near)})"
    )
    if low[0] / BELOW <= optimizer.lr <= high[0] * ABOVE:
        return PlanFinding("known", knob, message)
    side = "above" if optimizer.lr > high[0] else "below"
    return PlanFinding("warning", knob, f"{message}; this one is far {side} them")


def _way(recipe: Recipe, *, random: bool) -> str:
    kind = recipe.objective.kind
    if kind in ("seq2seq", "classify"):
        return kind
    if recipe.model.lora is not None:
        return "lora_dpo" if kind == "dpo" else "lora"
    if kind == "pretrain" and not random:
        return "continue"
    return kind


def _sources(names: Iterable[str]) -> str:
    known = published_rates()["sources"]
    return "; ".join(known[name]["title"] for name in dict.fromkeys(names))


def judge_pauses(recipe: Recipe, cost: RunCost) -> Iterator[PlanFinding]:
    """Evaluations and saves beside the steps."""
    spent = times(cost.evaluations, cost.evaluation_s)
    work = times(cost.steps, cost.step_s)
    if recipe.train.evaluate_tasks:
        names = ", ".join(recipe.train.evaluate_tasks)
        message = f"the time of {names} in each evaluation is a wide guess: texts are not known"
        yield PlanFinding("not checked", "train.evaluate_tasks", message)
    elif not isinstance(spent, Unknown) and not isinstance(work, Unknown) and work.likely:
        yield from _much(spent.likely, work.likely, "train.evaluate_every", "evaluating", "steps")
    waits = times(cost.saves, cost.save_waits_s)
    if not isinstance(waits, Unknown) and not isinstance(work, Unknown) and work.likely:
        yield from _much(
            waits.likely, work.likely, "checkpoint.every", "waiting for saves", "steps"
        )
    if isinstance(cost.restarts, Unknown) or isinstance(cost.restart_s, Unknown):
        return
    if cost.restarts.high > recipe.launch.restarts:
        yield PlanFinding(
            "warning",
            "launch.restarts",
            f"{cost.restarts.text('{:,.1f}'.format)} restarts are expected, launch.restarts allows"
            f" {recipe.launch.restarts}",
        )
    if isinstance(cost.total_s, Unknown):
        return
    again, what = cost.restarts.likely * cost.restart_s.likely, "starting again, repeating steps"
    yield from _much(again, cost.total_s.likely, "checkpoint.every", what, "the run")


def _much(spent_s: float, of_s: float, knob: str, what: str, of: str) -> Iterator[PlanFinding]:
    limit = MUCH_REPEATED if of == "the run" else MUCH_EVALUATED
    if spent_s > max(limit * of_s, MUCH_S):
        message = f"{what} comes to {spent_s / of_s:.0%} of the time of {of}"
        yield PlanFinding("warning", knob, message)


def judge_place(recipe: Recipe, place: PlannedPlace, cost: RunCost) -> Iterator[PlanFinding]:
    """Room, devices, and the limits of the cloud."""
    if place.devices and place.processes > place.devices:
        yield PlanFinding(
            "warning",
            "launch.processes",
            f"{place.processes} processes a node, which has {place.devices} x {place.device_name}",
        )
    together = next(each.bytes for each in cost.spaces if each.what.startswith("on the disk"))
    if isinstance(together, Unknown) or place.disk_bytes is None:
        need = together.needs if isinstance(together, Unknown) else "a look at the disk there"
        yield PlanFinding("not checked", "checkpoint.keep", f"room on the disk: {need}")
    elif together.high > place.disk_bytes:
        surely = "do" if together.low > place.disk_bytes else "may"
        yield PlanFinding(
            "warning",
            "checkpoint.keep",
            f"data, checkpoints and model {surely} not fit on the disk:"
            f" {together.text(_gb)} GB of {_gb(place.disk_bytes)} GB; lower checkpoint.keep, or"
            " take a larger disk",
        )
    copy = cost.host_copy_bytes
    host = place.host_bytes
    if not isinstance(copy, Unknown) and host is not None and copy.likely > MUCH_HOST * host:
        yield PlanFinding(
            "warning",
            "checkpoint.asynchronous",
            f"the copy of the state takes {copy.text(_gb)} GB of a node's {_gb(host)} GB of memory;"
            " set checkpoint.asynchronous to false",
        )
    yield from _limits(recipe, place, cost)


def _limits(recipe: Recipe, place: PlannedPlace, cost: RunCost) -> Iterator[PlanFinding]:
    """`cloud.max_run` and `cloud.max_cost`, held against the upper end."""
    if not place.rented:
        return
    try:
        limit_s = time_limit_s(recipe)
    except WrongInput as error:
        yield PlanFinding("warning", "cloud.max_cost", str(error))
        return
    by_cost = recipe.cloud.max_cost is not None and limit_s < recipe.cloud.max_run
    knob = "cloud.max_cost" if by_cost else "cloud.max_run"
    if isinstance(cost.total_s, Unknown):
        yield PlanFinding("not checked", knob, f"whether it suffices: {cost.total_s.needs}")
    elif cost.total_s.high > limit_s:
        surely = "ends" if cost.total_s.low > limit_s else "may end"
        yield PlanFinding(
            "warning",
            knob,
            f"it {surely} the training after {duration(limit_s)}, which takes"
            f" {cost.total_s.text(duration)}",
        )


def judge_sampling(
    recipe: Recipe, config: Mapping[str, Any] | None, size: ModelSize | None
) -> Iterator[PlanFinding]:
    """What a training on rewards needs beside its steps, which is all that is planned."""
    objective, layout = recipe.objective, recipe.parallel
    if not isinstance(objective, GRPOSettings):
        return
    message = "a plan knows the optimizer steps, and neither the time nor the memory of sampling"
    if config is not None and size is not None:
        # Never both at once, unless the rollout is one of later steps.
        wide = 1 if recipe.precision.compute == "bf16" else 2
        held = wide * objective.sample_rows * _cache_bytes(recipe, config).likely
        axes = ("shard", "tensor", "pipeline", "context", "expert")
        spread = any(getattr(layout, axis) != 1 for axis in axes)
        copies = objective.staleness or int(spread)
        copy = 2 * wide * size.weights * copies
        message += f": up to {_gb(held)} GB on a rank for the answers that it samples at once"
        if copies:
            times = "a whole copy" if copies == 1 else f"up to {copies} whole copies"
            message += f", and {_gb(copy)} GB for {times} of the policy"
        message += ", beside a step's memory" if objective.staleness else ""
    if objective.sampler is not None:
        message = "a plan knows nothing of the time, memory and devices of objective.sampler"
    yield PlanFinding("not checked", "objective.sample_rows", message)


def judge_server(
    recipe: Recipe, config: Mapping[str, Any] | None, size: ModelSize | None
) -> PlanFinding:
    """The model beside the memory of what will serve it."""
    knob = "serve.machine"
    if size is None or config is None:
        return PlanFinding("not checked", knob, "the model's size is not known")
    memory, where = _serving_memory(recipe)
    if memory is None:
        return PlanFinding("not checked", knob, f"the memory of {where} is not known")
    each = 4 if recipe.precision.export == "fp32" else 2
    needed = Range(1.0, 1.1, 1.4, "modelled") * float(size.weights * each)
    needed = needed + _cache_bytes(recipe, config) * float(recipe.serve.max_batch)
    message = f"{needed.text(_gb)} GB of {where}'s {_gb(memory)} GB, with {recipe.serve.max_batch}"
    message += " requests at once"
    if needed.low > memory:
        return PlanFinding("warning", knob, f"the model does not fit: {message}")
    if needed.high > memory:
        return PlanFinding(
            "warning", knob, f"the model may not fit: {message}; see serve.max_batch"
        )
    return PlanFinding("known", knob, message)


def _serving_memory(recipe: Recipe) -> tuple[float | None, str]:
    if recipe.registry.kind != "vertex":
        if gpus := installed_gpus():
            return gpus[0][1], f"this machine's {gpus[0][0]}"
        return float(psutil.virtual_memory().total), "this machine"
    machine: Machine = recipe.serve.machine
    name, count = accelerators_of(machine)
    if name is not None:
        device, _ = device_of_machine(machine)
        own = None if device is None else device.memory_bytes.likely * count
        return own, f"{machine.type} with {count} x {name}"
    known = machine_type(machine.type)
    return None if known is None else known.memory_gb * GIB, machine.type


def _cache_bytes(recipe: Recipe, config: Mapping[str, Any]) -> Range:
    """Keys and values of one request, in two bytes each: of a short answer, of a row of the
    training, of all positions.
    """
    if trained_kind(recipe) != "decoder":
        return Range.exactly(0.0)
    try:
        read = sizes(config)
    except (KeyError, TypeError, ValueError, WrongInput):
        return Range.exactly(0.0)
    token = 2 * 2 * read.layers * read.kv_heads * read.head_dim
    row = min(recipe.data.seq_len, read.positions)
    lengths = (min(row, 64), row, max(row, min(read.positions, 4 * row)))
    return Range.of([token * length for length in lengths], "modelled")


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e8 else f"{size / 1e9:,.3f}"


def all_judgements(
    recipe: Recipe,
    place: PlannedPlace,
    cost: RunCost,
    sample: LengthSample | Unknown,
    config: Mapping[str, Any] | None,
    size: ModelSize | None,
    *,
    random: bool,
) -> list[PlanFinding]:
    """All of the above, warnings first."""
    found: list[PlanFinding] = []
    rows = None
    if isinstance(sample, Unknown):
        found.append(PlanFinding("not checked", "data", sample.needs))
    else:
        rows = sample.rows
        found += judge_data(recipe, sample)
    found += judge_length(recipe, cost, rows)
    found.append(judge_rate(recipe, size, random=random))
    found += [*judge_pauses(recipe, cost), *judge_place(recipe, place, cost)]
    found += judge_sampling(recipe, config, size)
    found.append(judge_server(recipe, config, size))
    order = ("warning", "known", "not checked")
    return sorted(found, key=lambda finding: order.index(finding.kind))
