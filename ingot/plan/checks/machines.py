"""The length of a training, its pauses, the limits of its place, and what needs memory beside its
steps: sampling answers, and serving the model.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.hostmemory import host_memory
from ingot.base.progress import duration
from ingot.cloud.machines import accelerators_of, machine_type
from ingot.cloud.prices import time_limit_s
from ingot.config.models.family import is_native, sizes
from ingot.config.models.source import trained_kind
from ingot.config.recipe import Recipe
from ingot.config.sections.grpo import GRPOSettings
from ingot.config.sections.launch import Machine
from ingot.plan.checks.finding import PlanFinding, figure, gigabytes
from ingot.plan.devices.types import device_of_machine
from ingot.plan.place import PlannedPlace, installed_gpus
from ingot.plan.ranges import GIB, Range
from ingot.plan.run_cost import RunCost
from ingot.plan.storage import ModelSize
from ingot.plan.unknown import Unknown, times
from ingot.train.optim.schedules import too_short, warmup_steps

MUCH_EVALUATED, MUCH_REPEATED = 0.1, 0.2
"""Shares from which on a finding is a warning."""
MUCH_S = 60.0
"""Less time than this is never much."""
MANY_EPOCHS = 4.0
"""Passes over the same texts that are nearly as good as new ones (Muennighoff et al. 2023, Scaling
Data-Constrained Language Models, https://arxiv.org/abs/2305.16264).
"""
LONG_WARMUP = 0.2
MUCH_HOST = 0.6


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
    passes, pretrains = cost.epochs, recipe.objective.kind == "pretrain"
    if pretrains and not isinstance(passes, Unknown) and passes.low > MANY_EPOCHS:
        yield PlanFinding(
            "warning",
            "train",
            f"{passes.text(figure)} passes over the same texts; up to {MANY_EPOCHS:g} are nearly as"
            " good as new ones (Muennighoff et al. 2023)",
        )
    steps = round(cost.steps.likely)
    count = 1 if rows is None else max(1, round(rows.likely))
    for knob, why in too_short(recipe, count, recipe.train.start_step or 0, steps):
        yield PlanFinding("warning", knob, why)
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
    # Most on spot machines are no failures, which alone are counted.
    if not recipe.launch.machine.spot and cost.restarts.high > recipe.launch.restarts:
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
        share = spent_s / of_s
        told = f"{share:.0%} of" if share < 2 else f"{share:,.0f} times"
        message = f"{what} comes to {told} the time of {of}; raise {knob}"
        yield PlanFinding("warning", knob, message)


def judge_compute(dtype: str, peaks: Mapping[str, float]) -> Iterator[PlanFinding]:
    """Products in the dtype of a recipe beside those in float32: a processor without instructions
    for bf16 computes it far more slowly. `peaks`: FLOP/s by dtype, as measured or published.
    """
    known = peaks.get(dtype), peaks.get("float32")
    if known[0] is not None and known[1] is not None and known[0] < known[1]:
        yield PlanFinding(
            "warning",
            "precision.compute",
            f"products in {dtype} take {known[1] / known[0]:.1f} times as long as in float32 here;"
            " set precision.compute=fp32",
        )


def judge_place(recipe: Recipe, place: PlannedPlace, cost: RunCost) -> Iterator[PlanFinding]:
    """Room, devices, and the limits of the cloud."""
    if place.devices and place.processes > place.devices:
        yield PlanFinding(
            "warning",
            "launch.processes",
            f"{place.processes} processes a node, which has {place.devices} x {place.device_name}",
        )
    yield from _room(place, cost)
    copy = cost.host_copy_bytes
    host = place.host_bytes
    if not isinstance(copy, Unknown) and host is not None and copy.likely > MUCH_HOST * host:
        yield PlanFinding(
            "warning",
            "checkpoint.asynchronous",
            f"the copy of the state takes {copy.text(gigabytes)} GB of a node's"
            f" {gigabytes(host)} GB of memory; set checkpoint.asynchronous to false",
        )
    yield from _limits(recipe, place, cost)


def _room(place: PlannedPlace, cost: RunCost) -> Iterator[PlanFinding]:
    """Data, checkpoints and models beside what the disk has; what is known of them alone, where
    the rest is not.
    """
    spaces = [one for one in cost.spaces if one.where.startswith("disk") and not one.together]
    known = [one.bytes for one in spaces if isinstance(one.bytes, Range)]
    missing = {one.bytes.needs: one.what for one in spaces if isinstance(one.bytes, Unknown)}
    needed = sum(known, Range.exactly(0.0))
    if place.disk_bytes is None:
        message = "whether data, checkpoints and model fit on the disk: needs a look at it there"
        yield PlanFinding("not checked", "checkpoint.keep", message)
        return
    if needed.high > place.disk_bytes:
        surely = "do" if needed.low > place.disk_bytes else "may"
        what = "checkpoints and model alone" if missing else "data, checkpoints and model"
        yield PlanFinding(
            "warning",
            "checkpoint.keep",
            f"{what} {surely} not fit on the disk: {needed.text(gigabytes)} GB of"
            f" {gigabytes(place.disk_bytes)} GB; lower checkpoint.keep, or take a larger disk",
        )
    for needs, what in missing.items():
        message = f"whether {what} fits on the disk with the rest: needs {needs}"
        yield PlanFinding("not checked", "checkpoint.keep", message)


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
        each = 2 if recipe.precision.compute == "bf16" else 4
        held = objective.sample_rows * _cache_bytes(recipe, config, each).likely
        axes = ("shard", "tensor", "pipeline", "context", "expert")
        spread = any(getattr(layout, axis) != 1 for axis in axes)
        copies = objective.staleness or int(spread)
        copy = each * size.weights * copies
        message += f": up to {gigabytes(held)} GB on a rank for the answers that it samples at once"
        if copies:
            times = "a whole copy" if copies == 1 else f"up to {copies} whole copies"
            message += f", and {gigabytes(copy)} GB for {times} of the policy"
        message += ", beside a step's memory" if objective.staleness else ""
    if objective.sampler is not None:
        message = "a plan knows nothing of the time, memory and devices of objective.sampler"
    yield PlanFinding("not checked", "objective.sample_rows", message)


def judge_offload(recipe: Recipe, place: PlannedPlace) -> Iterator[PlanFinding]:
    """What a trace does not see of a device whose tensors are in the host's memory."""
    offload = recipe.memory.offload
    if place.type == "cpu":
        return
    chosen = {
        "memory.offload.activations": offload.activations,
        "memory.offload.weights": offload.weights,
        "memory.offload.optimizer": bool(offload.optimizer),
    }
    knobs = [name for name, is_set in chosen.items() if is_set]
    if knobs:
        message = "what copies to the host and back take"
        if offload.weights or offload.optimizer:
            message += ", and the optimizer on its processor"
        yield PlanFinding(
            "not checked",
            " and ".join(knobs),
            f"{message}; seconds a step, and what follows from them, are without it",
        )


def judge_float8(recipe: Recipe) -> Iterator[PlanFinding]:
    """What products in float8 cost beside themselves."""
    kind, knob = recipe.precision.float8, "precision.float8"
    if kind != "none" and not recipe.train.compile:
        yield PlanFinding(
            "warning",
            knob,
            f"{kind} without train.compile: scales and conversions are kernels of their own, which"
            " take longer than the products save; set train.compile=true, or float8 to none",
        )


def judge_server(
    recipe: Recipe, config: Mapping[str, Any] | None, size: ModelSize | None
) -> PlanFinding:
    """The model beside the memory of what will serve it."""
    knob = "serve.machine"
    if size is None or config is None:
        return PlanFinding("not checked", knob, "the model's size is not known")
    memory, where, on_device = _serving_memory(recipe)
    if memory is None:
        return PlanFinding("not checked", knob, f"the memory of {where} is not known")
    stored = 4 if recipe.precision.export == "fp32" else 2
    each = Range.exactly(stored) if on_device else _bytes_on_processor(recipe, config)
    needed = Range(1.0, 1.1, 1.4, "modelled") * each * float(size.weights)
    # A processor computes in float32, whatever the weights are kept in.
    cache = _cache_bytes(recipe, config, stored if on_device else 4)
    needed = needed + cache * float(recipe.serve.max_batch)
    sizes = f"{needed.text(gigabytes)} GB of {where}'s {gigabytes(memory)} GB"
    message = f"{sizes}, with {recipe.serve.max_batch} requests at once"
    if needed.low > memory:
        return PlanFinding("warning", knob, f"the model does not fit: {message}")
    if needed.high > memory:
        return PlanFinding(
            "warning", knob, f"the model may not fit: {message}; see serve.max_batch"
        )
    return PlanFinding("known", knob, message)


def _bytes_on_processor(recipe: Recipe, config: Mapping[str, Any]) -> Range:
    """What a weight takes where a processor serves it: float32's four, unless a decoder's are
    packed, which x86 processors can.
    """
    serve = recipe.serve
    if serve.compute == "bf16":
        return Range.exactly(2)
    if not (
        serve.pack
        and serve.engine == "native"
        and recipe.precision.export == "bf16"
        and trained_kind(recipe) == "decoder"
        and is_native(config.get("model_type", "llama"))
    ):
        return Range.exactly(4)
    if recipe.registry.kind == "vertex":
        return Range(2, 2, 4)
    return Range.exactly(2 if platform.machine() == "x86_64" else 4)


def _serving_memory(recipe: Recipe) -> tuple[float | None, str, bool]:
    """Bytes, of what, and whether that is an accelerator's own memory."""
    if recipe.registry.kind != "vertex":
        if gpus := installed_gpus():
            return gpus[0][1], f"this machine's {gpus[0][0]}", True
        return float(host_memory().total), "this machine", False
    machine: Machine = recipe.serve.machine
    name, count = accelerators_of(machine)
    if name is not None:
        device, _ = device_of_machine(machine)
        own = None if device is None else device.memory_bytes.likely * count
        return own, f"{machine.type} with {count} x {name}", True
    known = machine_type(machine.type)
    return None if known is None else known.memory_gb * GIB, machine.type, False


def _cache_bytes(recipe: Recipe, config: Mapping[str, Any], each: int) -> Range:
    """Keys and values of one request, of so many bytes each: of a short answer, of a row of the
    training, of all positions.
    """
    if trained_kind(recipe) != "decoder":
        return Range.exactly(0.0)
    try:
        read = sizes(config)
    except (KeyError, TypeError, ValueError, WrongInput):
        return Range.exactly(0.0)
    token = 2 * each * read.layers * read.kv_heads * read.head_dim
    row = min(recipe.data.seq_len, read.positions)
    lengths = (min(row, 64), row, max(row, min(read.positions, 4 * row)))
    return Range.of([token * length for length in lengths], "modelled")
