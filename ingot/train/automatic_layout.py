"""`parallel: auto` at the start of a training: rank 0 decides, since ranks of several nodes may see
other files, and all ranks take its word. What was decided is kept in the run folder: a resumed
training takes it again, and searches anew only where devices or settings changed. How a layout is
found is the planner's business (`ingot.plan.automatic`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic
from ingot.config.automatic import ChosenLayout, Planner, StartDevices, with_degrees
from ingot.config.degrees import AXES, Degrees, degrees_of
from ingot.config.identity import changes
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.models.device import device_name
from ingot.parallel.mesh import Mesh, make_mesh
from ingot.train.micro_batch.memory import MEMORY_KNOBS, total_bytes

SCHEMA = 1
AS_MUCH = 0.05
"""Memory that differs by a smaller share is the same: drivers and kernels keep some of it back."""
SETTINGS = (*MEMORY_KNOBS, "train.micro_batch", "train.sample_every", "train.evaluate_tasks")
"""The knobs that a layout is chosen for."""


def devices_of(mesh: Mesh) -> StartDevices:
    """What the ranks of a mesh run on. Collective."""
    device, here = mesh.device, mesh.ranks
    own = total_bytes(device) // (here.local_world if device.type == "cpu" else 1)
    everyone = mesh.gather([float(own), float(here.local_world)])
    per_node = math.gcd(*(int(count) for _, count in everyone))
    kind = device.type if device.type in ("cpu", "cuda") else "tpu"
    return StartDevices(
        mesh.world,
        per_node,
        kind,  # type: ignore[arg-type]
        device_name(device),
        int(min(size for size, _ in everyone)),
    )


def starting_layout(parallel: Parallel) -> Parallel:
    """The layout to meet in: the recipe's own, or any while it is not decided."""
    return Parallel() if parallel.degrees == "auto" else parallel


def decided(recipe: Recipe, mesh: Mesh, planner: Planner | None) -> tuple[Recipe, Mesh]:
    """The recipe with the degrees that `parallel: auto` means, and its mesh; both unchanged if the
    recipe gives them. Collective.

    Raises:
        WrongInput: no layout fits.
    """
    if recipe.parallel.degrees == "given":
        return recipe, mesh
    devices = devices_of(mesh)
    degrees = mesh.from_main(lambda: _decide(recipe, devices, planner))
    recipe = with_degrees(recipe, degrees)
    degrees = degrees_of(recipe.parallel, mesh.world)
    return recipe, make_mesh(mesh.ranks, mesh.device, degrees, timeout=mesh.timeout)


def _decide(recipe: Recipe, devices: StartDevices, planner: Planner | None) -> Degrees:
    """The degrees as kept, or found and kept. Rank 0 only."""
    now = {"devices": asdict(devices), "settings": recipe.select(SETTINGS) | {"pack": recipe.pack}}
    before = read_layout(recipe.folder)
    if before is not None:
        kept = Degrees(**before["degrees"])
        if not (changed := _changed(before, now)):
            say(f"parallel: auto is {kept.text() or 'one process'}, as it was decided before")
            return kept
        say(f"parallel: auto is searched anew: {'; '.join(changed)}")
    if planner is None:
        raise WrongInput("parallel: auto needs a planner; run `ingot train`, or give the degrees")
    chosen = planner.layout(recipe, devices)
    say(f"parallel: auto is {chosen.text()}")
    _keep(recipe.folder, chosen, now)
    return chosen.degrees


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two decisions' devices and settings."""
    own = dict(now["devices"])
    memory = before["devices"]["memory"]
    if abs(own["memory"] - memory) <= AS_MUCH * memory:
        own["memory"] = memory
    return [*changes(before["devices"], own), *changes(before["settings"], now["settings"])]


def read_layout(run: RunFolder) -> dict[str, Any] | None:
    """What was decided before; None if nothing was, or if it cannot be read."""
    try:
        kept: dict[str, Any] = json.loads(run.layout.read_bytes())
        whole = kept["schema"] == SCHEMA and set(kept["degrees"]) == {*AXES, "expert"}
        return kept if whole and kept["devices"]["memory"] and kept["settings"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(run: RunFolder, chosen: ChosenLayout, now: Mapping[str, Any]) -> None:
    kept = {
        "schema": SCHEMA,
        "degrees": asdict(chosen.degrees),
        "why": chosen.why,
        "searched": chosen.searched,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **now,
    }
    write_atomic(run.layout, json.dumps(kept, indent=1) + "\n")
