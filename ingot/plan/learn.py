"""Learns from a training that is over how long its device really takes: the plan that was kept for
it against its steps, where nothing disturbed them. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.exact_json import as_object
from ingot.base.masking import knobs_hidden
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.config.identity import changes
from ingot.config.load import load_recipe
from ingot.plan.assemble import RECORDED
from ingot.plan.devices.coefficients import (
    Coefficients,
    coefficients_of,
    cpu_coefficients,
    cpu_name,
)
from ingot.plan.devices.learned import Correction, keep
from ingot.plan.devices.types import device_type
from ingot.plan.ranges import Range

RATE = "train/examples_per_s"
LEAST = 3
"""Undisturbed lines of metrics below which nothing is learned."""
DISTURBING = ("straggler", "restart", "lost", "failure", "skip")
"""Events after which the steps of a line of metrics are no measure of the device."""
KEEP_ANEW = "keep one with `ingot plan RECIPE --keep`; it may be made after the training, too"


@dataclass(frozen=True)
class Lesson:
    """What a training taught: seconds of a step as planned and as they came, and the correction,
    which is stored in `path` for the device called `device`.
    """

    device: str
    planned: Range
    came: Range
    correction: Correction
    path: Path


def learn(run: RunFolder) -> Lesson:
    """Correct the coefficients of the device that a training ran on by what its steps took.

    Raises:
        WrongInput: the run has no plan, its plan is for other machines or knobs, or too few of its
            steps are a measure.
    """
    plan = _kept_plan(run)
    devices = _devices(run)
    known, planned = as_object(plan.get("coefficients")), _planned_step(run, plan)
    device, place = _device_name(devices), as_object(plan.get("place"))
    if (device, devices["world"]) != (known.get("name"), place.get("world")):
        raise WrongInput(
            f"{run.root} ran on {devices['world']} x {device}, and its plan is for"
            f" {place.get('world')} x {known.get('name')}; {KEEP_ANEW}"
        )
    recipe = load_recipe([run.recipe], environ={}, dotenv=None).at("train")
    trained_with = knobs_hidden(recipe.select(RECORDED))
    if different := changes(as_object(plan.get("knobs")), trained_with):
        raise WrongInput(f"{run.root} has other knobs than its plan: {different[0]}; {KEEP_ANEW}")
    now = _coefficients(devices)
    if now is None or now.basis != known.get("basis"):
        raise WrongInput(f"{device} was calibrated anew since the plan of {run.root}; {KEEP_ANEW}")
    came = _came(run, recipe.train.global_batch)
    before = as_object(known.get("learned"))
    earlier = float(before["likely"]) if before else 1.0
    factor = came * (earlier / planned.likely)
    correction = Correction(
        str(run.root.resolve()),
        time.strftime("%Y-%m-%d"),
        now.basis,
        Range(factor.low, factor.likely, factor.high, "learned"),
    )
    return Lesson(device, planned, came, correction, keep(device, correction))


def _kept_plan(run: RunFolder) -> dict[str, Any]:
    try:
        plan = json.loads(run.plan.read_bytes())
    except FileNotFoundError:
        raise WrongInput(f"{run.root} has no plan to learn from; {KEEP_ANEW}") from None
    except ValueError as error:
        raise WrongInput(f"{run.plan} cannot be read ({error}); {KEEP_ANEW}") from None
    if not isinstance(plan, dict) or "coefficients" not in plan:
        raise WrongInput(f"{run.plan} is no plan; {KEEP_ANEW}")
    return plan


def _planned_step(run: RunFolder, plan: Mapping[str, Any]) -> Range:
    planned = as_object(as_object(plan.get("step")).get("total"))
    if not planned:
        raise WrongInput(f"the plan of {run.root} does not tell the seconds of a step; {KEEP_ANEW}")
    return Range.of([planned["low"], planned["likely"], planned["high"]], planned["origin"])


def _devices(run: RunFolder) -> dict[str, Any]:
    """What the ranks ran on, as each start recorded it."""
    starts = [event for event in read_lines(run.events) if event.get("kind") == "start"]
    if not starts:
        raise WrongInput(f"{run.root} has trained nothing yet; run `ingot train` first")
    found = [as_object(event.get("devices")) for event in starts]
    if not all(found):
        raise WrongInput(f"{run.events} does not tell what {run.root} ran on; train it again")
    if any(one != found[0] for one in found):
        raise WrongInput(
            f"{run.root} ran on several kinds of machines, so that its steps are a measure of none"
        )
    return dict(found[0])


def _device_name(devices: Mapping[str, Any]) -> str:
    """The name under which coefficients of these devices are stored."""
    if devices["type"] == "cpu":
        return cpu_name(devices["threads"], devices["per_node"], devices["name"])[0]
    return device_type(devices["name"]).name


def _coefficients(devices: Mapping[str, Any]) -> Coefficients | None:
    """What is known of these devices now."""
    if devices["type"] == "cpu":
        return cpu_coefficients(devices["threads"], devices["per_node"], devices["name"])
    return coefficients_of(device_type(devices["name"]))


def _came(run: RunFolder, global_batch: int) -> Range:
    """Seconds of a step: the quartiles over the lines of metrics that nothing disturbed."""
    seconds = undisturbed(run, global_batch)
    if len(seconds) < LEAST:
        raise WrongInput(
            f"{run.root} has {len(seconds)} logged steps that nothing disturbed, and {LEAST} are"
            " needed; train longer, or lower track.every"
        )
    low, likely, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Range(low, likely, high, "measured")


def undisturbed(run: RunFolder, global_batch: int) -> Sequence[float]:
    """Seconds of a step in each line of metrics, without the first line after each start, whose
    steps warm up, and without those in which something went wrong.
    """
    rates: dict[int, float] = {}
    for line in read_lines(run.metrics):
        step, rate = line.get("step"), line.get(RATE)
        if isinstance(step, int) and isinstance(rate, int | float) and rate > 0:
            rates[step] = float(rate)
    disturbed = []
    for event in read_lines(run.events):
        step = event.get("step")
        if isinstance(step, int) and event.get("kind") in (*DISTURBING, "start"):
            disturbed.append(step + 1 if event["kind"] == "start" else step)
    steps = sorted(rates)
    return [
        global_batch / rates[last]
        for first, last in zip([0, *steps], steps, strict=False)
        if not any(first < at <= last for at in disturbed)
    ]
