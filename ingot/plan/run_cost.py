"""The arithmetic of a whole training: steps, saves, evaluations, starts and restarts, and what they
come to in hours, money, energy and space, and the time of preparing the data. Imports no torch and
asks nobody.

What cannot be known is `Unknown` with what would tell it, never a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.base.environment import usable_cores
from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.config.degrees import degrees_of
from ingot.config.length import steps_of
from ingot.config.recipe import Recipe
from ingot.config.sections.data import ValidationShare
from ingot.config.sections.engines import LocalEngineSettings
from ingot.config.sections.loop import Every, seconds_of
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range, largest
from ingot.plan.storage import (
    LISTED,
    RENDEZVOUS,
    VERIFIED,
    ModelSize,
    PerRank,
    Space,
    checkpoint_bytes,
    host_copy,
    rank_costs,
    saving,
    spaces,
    tokens_of_row,
)
from ingot.plan.unknown import Estimate, Unknown, ends, mapped, over, plus, times

ON_DEMAND, SPOT = "on demand", "spot"
"""The ways to rent a machine."""
DAY_S, HOUR_S = 86_400.0, 3_600.0
FORWARD_SHARE = Range(0.25, 0.34, 0.5, "modelled")
"""Of a step's time, what its forward pass takes: a third of the floating-point operations, a
quarter where activations are computed again.
"""
TASKS = Range(0.5, 5.0, 60.0, "guessed")
"""What a task of `train.evaluate_tasks` takes, beside the loss on the validation rows: it compares
or writes texts whose number and lengths are not known.
"""
PROCESS_START_S = Range(3.0, 12.0, 60.0, "guessed")
"""Starting Python, importing torch, building the model."""
MACHINES_START_S = {
    "local": Range.exactly(0.0),
    "ssh": Range(1.0, 3.0, 20.0, "guessed"),
    "gce": Range(90.0, 240.0, 900.0, "guessed"),
    "vertex": Range(120.0, 420.0, 1_800.0, "guessed"),
    "tpu": Range(120.0, 360.0, 1_800.0, "guessed"),
}
"""Until machines are there with their image, by place. Waiting in a queue is not in it."""
LOST = Range(0.4, 0.5, 0.6, "modelled")
"""Of what is done between two saves, what a restart repeats: a half on average over several."""
FAILURES_DEVICE_DAY = Range(1e-4, 4.7e-4, 1e-3, "guessed")
"""Unexpected ends of a job, for each device and day. Likely: 419 in 54 days on 16,384 devices (The
Llama 3 Herd of Models, section 3.3.4, https://arxiv.org/abs/2407.21783); the rest is a guess.
"""
PREEMPTIONS_NODE_DAY = Range(0.02, 0.15, 1.0, "guessed")
"""How often a spot machine is taken away in a day. A guess: it depends on machine type, zone and
day, and the cloud's console shows its history.
"""
LOAD = Range(0.4, 0.75, 1.0, "guessed")
"""Of a device's highest power, what it takes on average; hosts and cooling are not in it."""
HARDLY = 0.95
"""The largest share of the time that restarts may take in the arithmetic; more is not a plan."""
TEXT_BYTES_S = Range(1.5e6, 30e6, 80e6, "guessed")
"""Text that one core ingests and prepares in a second. The upper end is 2 GB without cleaning, the
lower one a tokenizer that has no fast encoder; both were measured, of other machines nothing is.
"""
CHAT_BYTES_S = Range(1e6, 4e6, 8e6, "guessed")
"""The same of chats, whose template is rendered for each of them."""
DATA_START_S = Range(2.0, 6.0, 30.0, "guessed")
"""Imports, the choice of the encoder, the start of worker processes."""


@dataclass(frozen=True)
class RunInputs:
    """What the arithmetic starts from.

    rows: training rows, if known. step_s: seconds of an optimizer step. data_bytes: prepared and
    ingested data. flops_per_token: of forward and backward, for the share of a device's peak, which
    is `peak_flops` a second.
    """

    recipe: Recipe
    place: PlannedPlace
    size: ModelSize | None
    rows: Range | None
    step_s: Estimate
    data_bytes: Estimate
    flops_per_token: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class RunCost:
    """What a training comes to. Times in seconds, money in US dollars, energy in kWh."""

    steps: Estimate
    epochs: Estimate
    tokens: Estimate
    step_s: Estimate
    tokens_per_s: Estimate
    share_of_peak: Estimate
    saves: Estimate
    save_waits_s: Estimate
    """Of one save, what training waits for it."""
    save_s: Estimate
    """Of one save, until it is committed."""
    evaluations: Estimate
    evaluation_s: Estimate
    start_s: Estimate
    restarts: Estimate
    restart_s: Estimate
    """What one restart costs: starting again, verifying, and the steps since the last save."""
    total_s: Estimate
    machine_hours: Estimate
    money: Mapping[str, Estimate]
    """By `on demand` and `spot`."""
    energy_kwh: Estimate
    host_copy_bytes: Estimate
    """Memory that saving takes of each node, as a copy of the state."""
    checkpoint_bytes: Estimate
    spaces: tuple[Space, ...]
    per_rank: tuple[PerRank, ...]


def cost_of(inputs: RunInputs) -> RunCost:
    """The whole run, from what one step takes."""
    recipe, place, step_s = inputs.recipe, inputs.place, inputs.step_s
    steps = planned_steps(recipe, inputs.rows)
    rows_a_step = float(recipe.train.global_batch / recipe.objective.samples_per_row)
    tokens_a_step = recipe.train.global_batch * tokens_of_row(recipe)
    work_s = times(steps, step_s)
    beside = _saves_beside(recipe.checkpoint.every, steps, inputs.rows, rows_a_step, work_s)
    saves = plus(beside, Range.exactly(1.0))  # the last one, or that of a signal
    every = recipe.train.evaluate_every
    none = Range.exactly(0.0)
    evaluations = occurrences(every, steps, inputs.rows, rows_a_step, work_s) if every else none
    checkpoint = checkpoint_bytes(recipe, inputs.size)
    waits_s, save_s = saving(recipe, place, checkpoint, _gap(work_s, saves))
    held_out = held_out_rows(recipe, inputs.rows)
    evaluation_s = times(step_s, evaluation_share(recipe, place.world, held_out))
    per_rank = rank_costs(place, checkpoint)
    start_s = _start(recipe, per_rank)
    pause_s = plus(times(saves, waits_s), times(evaluations, evaluation_s))
    restart_s = _restart(start_s, per_rank, _gap(work_s, saves))
    busy_s = plus(work_s, pause_s)
    rates = {way: _ends_a_second(place, spot=way == SPOT) for way in (ON_DEMAND, SPOT)}
    wholes = {way: _whole(busy_s, start_s, restart_s, rate) for way, rate in rates.items()}
    is_spot = place.price is not None and place.price.uses_spot
    total_s, restarts = wholes[SPOT if is_spot else ON_DEMAND]
    tokens_per_s = over(Range.exactly(float(tokens_a_step)), step_s)
    return RunCost(
        steps=steps,
        epochs=_epochs(steps, inputs.rows, rows_a_step),
        tokens=times(steps, Range.exactly(float(tokens_a_step))),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        share_of_peak=_share_of_peak(inputs, tokens_per_s),
        saves=saves,
        save_waits_s=waits_s,
        save_s=save_s,
        evaluations=evaluations,
        evaluation_s=evaluation_s,
        start_s=start_s,
        restarts=restarts,
        restart_s=restart_s,
        total_s=total_s,
        machine_hours=times(total_s, Range.exactly(place.nodes / HOUR_S)),
        money={way: _money(place, way, whole) for way, (whole, _) in wholes.items()},
        energy_kwh=_energy(inputs, total_s),
        host_copy_bytes=host_copy(recipe, place, checkpoint, beside),
        checkpoint_bytes=checkpoint,
        spaces=spaces(recipe, place, inputs.size, inputs.data_bytes, checkpoint),
        per_rank=per_rank,
    )


def planned_steps(recipe: Recipe, rows: Range | None) -> Estimate:
    """Optimizer steps of the whole training."""
    train = recipe.train
    if train.steps is not None or train.tokens is not None:
        return Range.exactly(float(steps_of(recipe, 0)), "measured")
    if rows is None or not rows.low:
        return Unknown("`ingot prepare`, or train.steps: epochs depend on the number of rows")
    try:
        low, likely, high = (
            float(steps_of(recipe, max(1, round(count))))
            for count in (rows.low, rows.likely, rows.high)
        )
    except WrongInput as error:
        return Unknown(str(error))
    return Range(low, likely, high, rows.origin)


def _epochs(steps: Estimate, rows: Range | None, batch: float) -> Estimate:
    if isinstance(steps, Unknown) or rows is None:
        return Unknown("`ingot prepare`, which counts the rows")
    if not rows.low:
        return Unknown("documents of which rows can be made")
    if steps.low == steps.high:
        return steps * batch / rows
    # Steps follow from the rows: the bounds of both belong together.
    passes = sorted(n * batch / of for n, of in zip(ends(steps), ends(rows), strict=True))
    return Range(passes[0], passes[1], passes[2], rows.origin)


def occurrences(
    every: Every, steps: Estimate, rows: Range | None, batch: float, work_s: Estimate
) -> Estimate:
    """How often something happens that is due every so many steps, epochs or minutes."""
    if isinstance(every, int):
        return steps if isinstance(steps, Unknown) else mapped(steps, lambda n: n // every)
    if every == "epoch":
        epochs = _epochs(steps, rows, batch)
        return epochs if isinstance(epochs, Unknown) else mapped(epochs, math.floor)
    return times(work_s, Range.exactly(1.0 / (seconds_of(every) or 1.0)))


def _saves_beside(
    every: Every, steps: Estimate, rows: Range | None, batch: float, work_s: Estimate
) -> Estimate:
    """Saves while training goes on: one that is due after the last step is the last one."""
    found = occurrences(every, steps, rows, batch, work_s)
    if isinstance(every, int) and not isinstance(steps, Unknown):
        return mapped(steps, lambda count: max(0.0, count - 1) // every)
    if every == "epoch":
        epochs = _epochs(steps, rows, batch)
        return found if isinstance(epochs, Unknown) else mapped(epochs, lambda n: math.ceil(n) - 1)
    return found


def held_out_rows(recipe: Recipe, rows: Range | None) -> float | None:
    """How many rows of validation a share of the documents comes to; None if that is not known."""
    validation = recipe.data.validation
    if rows is None or not isinstance(validation, ValidationShare):
        return None
    return rows.likely * validation.fraction / (1.0 - validation.fraction)


def evaluation_share(recipe: Recipe, world: int, held_out: float | None) -> Range:
    """The time of one evaluation while training, in steps: forward passes over the validation rows,
    of which there are `held_out` if that is known, and a guess for tasks.
    """
    try:
        ranks = degrees_of(recipe.parallel, world).data
    except WrongInput:  # which the checks report
        ranks = 1
    rows = recipe.train.evaluate_rows
    own = math.ceil((rows if held_out is None else min(rows, max(1.0, held_out))) / ranks)
    passes = FORWARD_SHARE * (own / math.ceil(recipe.train.global_batch / ranks))
    found = passes if recipe.data.holds_out else Range.exactly(0.0)
    return found + passes * TASKS * float(len(recipe.train.evaluate_tasks))


def _gap(work_s: Estimate, saves: Estimate) -> Estimate:
    """Seconds of training between two saves."""
    if isinstance(work_s, Unknown) or isinstance(saves, Unknown):
        return work_s if isinstance(work_s, Unknown) else saves
    gaps = sorted(one / max(1.0, n) for one, n in zip(ends(work_s), ends(saves), strict=True))
    return Range(gaps[0], gaps[1], gaps[2], work_s.origin)


def _start(recipe: Recipe, costs: tuple[PerRank, ...]) -> Range:
    machines = MACHINES_START_S.get(recipe.launch.kind, Range(0.0, 5.0, 120.0, "guessed"))
    compiling = Range(20.0, 60.0, 300.0, "guessed") if recipe.train.compile else Range.exactly(0.0)
    meeting = sum((cost.seconds for cost in costs if cost.what == RENDEZVOUS), Range.exactly(0.0))
    return machines + PROCESS_START_S + compiling + meeting


def _restart(start_s: Range, costs: tuple[PerRank, ...], gap_s: Estimate) -> Estimate:
    if isinstance(gap_s, Unknown):
        return gap_s
    resume = (one.seconds for one in costs if one.what in (LISTED, VERIFIED))
    verify = sum(resume, Range.exactly(0.0))
    return start_s + verify + gap_s * LOST


def _ends_a_second(place: PlannedPlace, *, spot: bool) -> Range:
    """How often a job of this size ends before it is done, in a second."""
    if place.kind == "local" and place.type == "cpu":
        return Range.exactly(0.0)
    rate = FAILURES_DEVICE_DAY * float(place.world)
    if spot:
        rate = rate + PREEMPTIONS_NODE_DAY * float(place.nodes)
    return rate / DAY_S


def _whole(
    work_s: Estimate, start_s: Range, restart_s: Estimate, rate: Range
) -> tuple[Estimate, Estimate]:
    """Seconds of the whole run, and the restarts in them: the more of them, the longer it takes,
    and the more there are.
    """
    if isinstance(work_s, Unknown) or isinstance(restart_s, Unknown):
        unknown = work_s if isinstance(work_s, Unknown) else restart_s
        return unknown, unknown
    total = []
    for work, start, again, often in zip(
        *map(ends, (work_s, start_s, restart_s, rate)), strict=True
    ):
        total.append((work + start) / (1.0 - min(HARDLY, often * again)))
    origin = largest(work_s, start_s, restart_s if rate.high else start_s).origin
    whole = Range(total[0], total[1], total[2], origin)
    return whole, whole * rate


def _money(place: PlannedPlace, way: str, total_s: Estimate) -> Estimate:
    """US dollars of the machines, rented this way; no disks, network and storage."""
    if not place.rented:
        return Unknown(f"what an hour of these machines costs you (launch.kind {place.kind})")
    if place.price is None:
        return Unknown("the machine's price in cloud.prices, US dollars an hour")
    each = place.price.spot if way == SPOT else place.price.on_demand
    if each is None:
        return Unknown("a price: cloud.prices gives that of the recipe's own choice")
    return times(total_s, Range.exactly(each / HOUR_S))


def _share_of_peak(inputs: RunInputs, tokens_per_s: Estimate) -> Estimate:
    if inputs.size is None:
        return Unknown("the model's configuration")
    if inputs.flops_per_token is None:
        return Unknown("a formula for this kind of model, which there is not")
    if inputs.peak_flops is None:
        return Unknown("the device's peak, which is not known")
    each = inputs.flops_per_token / (inputs.peak_flops * inputs.place.world)
    return times(tokens_per_s, Range.exactly(each))


def _energy(inputs: RunInputs, total_s: Estimate) -> Estimate:
    device = inputs.place.device
    if device is None or device.power_w is None:
        return Unknown(f"the power of {inputs.place.device_name}, which is not known")
    watts = LOAD * (device.power_w * inputs.place.world)
    return times(total_s, watts / (HOUR_S * 1e3))


@dataclass(frozen=True)
class PreparationCost:
    """Seconds to ingest and prepare the sources: of one core, and until it is done where the cores
    of this machine share the work.
    """

    core_s: Estimate
    seconds: Estimate


def preparation_cost(recipe: Recipe, text_bytes: Range | None) -> PreparationCost:
    """From the bytes of all texts, as far as they are known; nothing where it is done already."""
    if read_marker(recipe.folder.columns, "manifest.json") is not None:
        return PreparationCost(Range.exactly(0.0, "measured"), Range.exactly(0.0, "measured"))
    if text_bytes is None:
        unknown = Unknown("`ingot ingest`")
        return PreparationCost(unknown, unknown)
    rate = CHAT_BYTES_S if recipe.documents in CHAT_TEMPLATED else TEXT_BYTES_S
    work, engine = text_bytes / rate, recipe.data.engine
    if not isinstance(engine, LocalEngineSettings):
        how_many = Unknown(f"the number of workers that data.engine.kind={engine.kind} has")
        return PreparationCost(DATA_START_S + work, how_many)
    workers = engine.workers or usable_cores()
    return PreparationCost(DATA_START_S + work, DATA_START_S + work / float(workers))
