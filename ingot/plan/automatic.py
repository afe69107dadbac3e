"""What `parallel: auto` and `train.micro_batch: auto` come to by the search of `ingot plan`: before
a training for people, and at its start for rank 0. Imports no torch: ranks are traced in processes.

Everything that the recipe gives is kept: its recomputation, its micro-batch where it is a number.
Where too little is known of the devices to compare layouts, weights are shared by all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ingot.base.errors import Failed, WrongInput
from ingot.config.automatic import ChosenLayout, StartDevices, sharded_over_all
from ingot.config.degrees import Degrees, degrees_of
from ingot.config.models.source import config_folder, source_config, starts_random
from ingot.config.recipe import Recipe
from ingot.plan.assemble import ModelKnown, known_coefficients
from ingot.plan.choose import Choice, Limits, UnknownSeconds, choose, rows_that_fit
from ingot.plan.layouts import Freedom, possible_layouts
from ingot.plan.place import PlannedPlace, place_of_start
from ingot.plan.ranges import Range, gib

MARGIN = 0.9
"""The share of the memory with which trials of micro-batches begin."""


class SearchingPlanner:
    """The planner of a training: the search, for the devices that its ranks found."""

    def layout(self, recipe: Recipe, devices: StartDevices) -> ChosenLayout:
        place = place_of_start(recipe.at("train"), devices)
        return automatic_layout(recipe, place, _model(recipe))

    def micro_batch(self, recipe: Recipe, devices: StartDevices) -> int | None:
        if devices.type == "cpu":  # where the fastest is sought, and the smallest is tried first
            return None
        place = place_of_start(recipe.at("train"), devices)
        layout = degrees_of(recipe.parallel, devices.world)
        try:
            return rows_that_fit(recipe, place, _model(recipe), layout, MARGIN)
        except (WrongInput, Failed):  # trials tell what is wrong, in their own words
            return None


def automatic_layout(recipe: Recipe, place: PlannedPlace, model: ModelKnown) -> ChosenLayout:
    """What `parallel: auto` comes to at a place.

    Raises:
        WrongInput: no layout fits, or none is possible.
    """
    if place.world == 1:
        return ChosenLayout(Degrees(), "there is only one", searched=False)
    if unknown := _unknown(place, model):
        return sharded_over_all(place.world, unknown)
    try:
        choice = choose(recipe, place, model, None, Limits(None, None), freedom_of(recipe))
    except Failed as error:
        return sharded_over_all(place.world, f"memory cannot be told ({error})")
    except UnknownSeconds as error:
        return sharded_over_all(place.world, str(error))
    if choice.options:
        best = choice.options[0].judged
        return ChosenLayout(
            best.candidate.layout,
            f"the fastest of {len(choice.options)} that fit {place.about}, about"
            f" {best.step.total.text('{:.3g}'.format)} s a step ({best.step.total.origin})",
        )
    if choice.perhaps:
        one, peak = choice.perhaps[0]
        return ChosenLayout(
            one.layout,
            f"of those that may fit {place.about} the one that takes least,"
            f" {peak.text(gib)} of {gib(_has(place))} GiB",
        )
    raise WrongInput(
        f"parallel: auto finds no layout of {place.about} that fits: {_nearest(choice)}"
    )


def no_layout(recipe: Recipe, place: PlannedPlace, config: Mapping[str, Any]) -> str:
    """Why `parallel: auto` has no layout to choose among at a place, by arithmetic alone; empty if
    it has one.
    """
    has = place.device_bytes or Range.exactly(math.inf)
    others: list[tuple[str, str]] = []
    free, per_node = freedom_of(recipe), place.processes
    if any(possible_layouts(recipe, config, place.world, per_node, has, free, others)):
        return ""
    message = "; ".join(f"{what}: {reason}" for what, reason in others[:3])
    return f"parallel: auto finds no layout of {place.about}: {message}"


def planned_layout(
    recipe: Recipe, place: PlannedPlace, model: ModelKnown, *, searching: bool
) -> tuple[Recipe, str]:
    """The recipe with a number for every degree, and what is to be said of `parallel: auto`; empty
    if the recipe gives the degrees. `searching` False assumes what takes no trace.

    Raises:
        WrongInput: no layout fits.
    """
    if recipe.parallel.degrees == "given":
        return recipe, ""
    if searching:
        chosen = automatic_layout(recipe, place, model)
        return chosen.of(recipe), f"parallel: auto would be {chosen.text()}"
    chosen = sharded_over_all(place.world, "it is decided when training starts")
    message = "parallel: auto is decided when training starts; counted with weights shared by all"
    return chosen.of(recipe), message


def freedom_of(recipe: Recipe) -> Freedom:
    """What a recipe leaves to the search beside the layout."""
    size = recipe.train.micro_batch
    return Freedom((recipe.memory.recompute.kind,), None if size == "auto" else size)


def _unknown(place: PlannedPlace, model: ModelKnown) -> str:
    """Why layouts cannot be compared; empty if they can."""
    if model.config is None:
        return "the model's configuration is not known"
    if place.device_bytes is None:
        return f"the memory of {place.device_name} is not known"
    if not known_coefficients(place):
        return f"the speed of {place.device_name} is not known (`ingot bench --calibrate` tells it)"
    return ""


def _nearest(choice: Choice) -> str:
    """The reasons, those of memory first, and what may help."""
    reasons = sorted(choice.others, key=lambda one: "does not fit" not in one[1])
    message = "; ".join(f"{what}: {reason}" for what, reason in reasons[:3])
    again = choice.recipe.memory.recompute.kind
    more = "" if again == "full" else "set memory.recompute.kind=full, "
    return f"{message}; {more}lower train.micro_batch or data.seq_len, or take more devices"


def _model(recipe: Recipe) -> ModelKnown:
    """What is known of the model; only its configuration is downloaded."""
    model = recipe.model
    try:
        folder = config_folder(model)
    except Failed:  # the hub does not answer
        return ModelKnown(None, random=False)
    return ModelKnown(source_config(model, folder), starts_random(model, folder))


def _has(place: PlannedPlace) -> float:
    return 0.0 if place.device_bytes is None else place.device_bytes.likely
