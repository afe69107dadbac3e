"""What a search found, against money and time: which of the layouts that fit is fastest, which is
cheapest, and which stay within a budget and a deadline. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees
from ingot.config.recipe import Recipe
from ingot.plan.as_json import plain
from ingot.plan.assemble import (
    ModelKnown,
    data_sample,
    timed,
    traceable,
    with_vocabulary,
)
from ingot.plan.data_sample import LengthSample
from ingot.plan.layouts import ALL_FREE, Candidate, Freedom
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range
from ingot.plan.run_cost import ON_DEMAND, SPOT, RunInputs, cost_of
from ingot.plan.search import Judged, most_rows, search
from ingot.plan.seconds import StepSeconds
from ingot.plan.storage import model_size
from ingot.plan.tracing.memory import RankMemory, highest_peak
from ingot.plan.unknown import Estimate, Unknown


class UnknownSeconds(WrongInput):
    """What layouts would be compared by is not known."""


@dataclass(frozen=True)
class Limits:
    """US dollars and seconds at the most; None for no limit."""

    budget: float | None
    deadline: float | None


@dataclass(frozen=True)
class Option:
    """A layout that fits, with what the whole training comes to.

    mark: `=` if it cannot be told from the fastest, `-` if it may exceed a limit.
    """

    judged: Judged
    seconds: Estimate
    dollars: Estimate
    mark: str


@dataclass(frozen=True)
class Choice:
    """The options, the fastest first, those within the limits before the others."""

    recipe: Recipe
    place: PlannedPlace
    options: list[Option]
    perhaps: list[tuple[Candidate, Range]]
    """What may fit, with the highest use of memory of a rank; the smallest first."""
    others: list[tuple[str, str]]

    @property
    def within(self) -> list[Option]:
        """The options that stay within the limits even at the upper end of their ranges."""
        return [one for one in self.options if one.mark != "-"]

    @property
    def fastest(self) -> Option | None:
        return next(iter(self.within), None)

    @property
    def cheapest(self) -> Option | None:
        """None where prices are unknown."""
        priced = [
            (one.dollars.likely, number)
            for number, one in enumerate(self.within)
            if not isinstance(one.dollars, Unknown)
        ]
        return self.within[min(priced)[1]] if priced else None


def choose(
    recipe: Recipe,
    place: PlannedPlace,
    model: ModelKnown,
    devices: str | None,
    limits: Limits,
    free: Freedom = ALL_FREE,
) -> Choice:
    """Search for the layouts of a recipe that is already resolved for training.

    Args:
        devices: how many, such as `8` or `8..64`; None for those of the place.

    Raises:
        WrongInput: the place does not tell what its devices are, or nothing is known of the model.
    """
    has = _memory(place)
    asked, config, sample = _asked(recipe, place, model)
    worlds = _worlds(devices, place)

    def seconds(changed: Recipe, world: int, memory: tuple[RankMemory, ...]) -> StepSeconds:
        try:
            found = timed(changed, _of_size(place, world), memory, sample)
        except WrongInput as error:
            raise UnknownSeconds(str(error)) from None
        if isinstance(found, Unknown):
            raise UnknownSeconds(f"the time of a step is not known without {found.needs}")
        return found

    result = search(asked, config, worlds, place.processes, place.type, has, seconds, free)
    rows = None if isinstance(sample, Unknown) else sample.rows
    size, options = model_size(recipe, config), []
    for one in result.found:
        inputs = RunInputs(
            one.candidate.of(recipe),
            _of_size(place, one.candidate.layout.world),
            size,
            rows,
            one.step.total,
            Unknown("prepared data"),
        )
        cost = cost_of(inputs)
        used = place.price is not None and place.price.uses_spot
        dollars = cost.money.get(SPOT if used else ON_DEMAND, Unknown("prices"))
        exceeds = _exceeds(dollars, limits.budget) or _exceeds(cost.total_s, limits.deadline)
        mark = "-" if exceeds else "=" if one.is_tied(result.found[0]) else ""
        options.append(Option(one, cost.total_s, dollars, mark))
    options.sort(key=lambda one: one.mark == "-")
    perhaps = [(one, highest_peak(memory)) for one, memory in result.perhaps]
    return Choice(recipe, place, options, perhaps, result.others)


def rows_that_fit(
    recipe: Recipe, place: PlannedPlace, model: ModelKnown, layout: Degrees, share: float
) -> int | None:
    """Rows of a micro-batch that surely fit into a share of the device's memory; None if none."""
    return most_rows(_asked(recipe, place, model)[0], layout, place.type, _memory(place) * share)


def _memory(place: PlannedPlace) -> Range:
    if place.device_bytes is None:
        raise WrongInput(
            f"the memory of {place.device_name} is not known; name what ranks run on with --device"
        )
    return place.device_bytes


def _asked(
    recipe: Recipe, place: PlannedPlace, model: ModelKnown
) -> tuple[Recipe, dict[str, Any], LengthSample | Unknown]:
    """The recipe as it is traced, the configuration of the model to train, and of data."""
    if model.config is None:
        raise WrongInput("the model's configuration is not known; check model.source")
    sample = data_sample(recipe, quick=True)
    config = with_vocabulary(recipe, model, sample)
    assert config is not None
    return traceable(recipe, place, config["vocab_size"] if model.random else None), config, sample


def choice_json(choice: Choice) -> dict[str, Any]:
    """The choice as plain values, as `plan_json` has them."""
    return {
        "schema": 1,
        "name": choice.recipe.name,
        "options": [
            {
                "layout": one.judged.candidate.text(),
                "knobs": one.judged.candidate.overrides,
                "peak_bytes": plain(one.judged.peak),
                "step_s": plain(one.judged.step.total),
                "seconds": plain(one.seconds),
                "dollars": plain(one.dollars),
                "within_limits": one.mark != "-",
                "as_good_as_the_fastest": one.mark == "=",
            }
            for one in choice.options
        ],
        "others": [{"layout": what, "reason": reason} for what, reason in choice.others],
    }


def _exceeds(value: Estimate, limit: float | None) -> bool:
    """Whether it may be more than a limit; what is not known does not keep one."""
    return limit is not None and (isinstance(value, Unknown) or value.high > limit)


def _worlds(devices: str | None, place: PlannedPlace) -> list[int]:
    """The numbers of devices to try: doubling from the first to the last."""
    if devices is None:
        return [place.world]
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", devices)
    first, last = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not 0 < first <= last:
        raise WrongInput(f"--devices {devices}: give a number, or two such as 8..64")
    worlds = [first]
    while worlds[-1] * 2 <= last:
        worlds.append(worlds[-1] * 2)
    node = place.processes
    if uneven := [world for world in worlds if world > node and world % node]:
        raise WrongInput(
            f"--devices {devices}: {uneven[0]} are not whole nodes of {node}; give at most {node},"
            " or a multiple of it"
        )
    return worlds


def _of_size(place: PlannedPlace, world: int) -> PlannedPlace:
    """The place with as many nodes as `world` ranks need, and their price."""
    nodes = -(-world // place.processes)
    factor, price = nodes / place.nodes, place.price
    if price is not None:
        price = replace(
            price,
            on_demand=None if price.on_demand is None else price.on_demand * factor,
            spot=None if price.spot is None else price.spot * factor,
        )
    return replace(place, nodes=nodes, processes=min(world, place.processes), price=price)
