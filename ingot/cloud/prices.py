"""Hourly prices of machines, from the bundled table or `cloud.prices`, and how long a run may last
within its budget.

Estimates used to stop a run, not a bill: the table is approximate and dated, and excludes disks,
network and storage.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from typing import Any

import yaml

from ingot.base.errors import WrongInput
from ingot.base.progress import duration
from ingot.cloud.machines import accelerator_name, accelerators_of, machine_type
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import Cloud
from ingot.config.sections.launch import Machine

SHORTEST_RUN_S = 600.0
"""Starting machines takes minutes: a run limited to less would be paid for in vain."""


@functools.cache
def price_table() -> dict[str, Any]:
    """The bundled price table; `date` is the day of its prices."""
    text = (
        importlib.resources.files("ingot.cloud").joinpath("prices.yaml").read_text(encoding="utf-8")
    )
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def hourly_price(cloud: Cloud, machine: Machine, nodes: int) -> float | None:
    """US dollars per hour for `nodes` such machines; None if a price is unknown.

    A price in `cloud.prices` is used as given, on demand or spot; that of a machine type with
    built-in accelerators includes them.
    """
    whole = _priced(cloud, machine.type, "machines", machine.spot)
    known = machine_type(machine.type)
    if whole is None and known is not None and known.accelerator is None:
        each = _listed("vcpus", machine.type.rpartition("-")[0], machine.spot)
        whole = None if each is None else each * known.vcpus
    if whole is None:
        return None
    name, count = accelerators_of(machine)
    if name is None or (known is not None and known.accelerator is not None):
        return whole * nodes
    each = _priced(cloud, name, "accelerators", machine.spot)
    return None if each is None else (whole + each * count) * nodes


def hourly_price_of_tpu(cloud: Cloud, kind: str, *, spot: bool = False) -> float | None:
    """US dollars per hour of a TPU VM with an accelerator type such as `v5litepod-8`; None if
    unknown.
    """
    given = cloud.prices.get(kind)
    if given is not None:
        return given
    each = _listed("chips", kind.partition("-")[0], spot)
    count = tpu_chips(kind)
    return None if each is None or count is None else each * count


def tpu_chips(kind: str) -> int | None:
    """The number of chips of a TPU accelerator type: `v5litepod-8` and `v6e-8` count chips, `v2-8`
    to `v5p-8` count cores, of which a chip has two.
    """
    found = re.fullmatch(r"(v\d\w*)-(\d+)", kind)
    if found is None:
        return None
    return int(found[2]) if found[1] in ("v5litepod", "v6e") else max(1, int(found[2]) // 2)


def time_limit_s(
    recipe: Recipe, *, nodes: int | None = None, used: tuple[float, float] = (0.0, 0.0)
) -> float:
    """The seconds that a job may still run: the rest of `cloud.max_run`, or less if the rest of
    `cloud.max_cost` pays for less; zero or negative once that is used up. `nodes`: of the job,
    default `launch.nodes`; `used`: seconds and US dollars of its earlier attempts.

    Raises:
        WrongInput: `max_cost` is set, and the machine's price is unknown, or all of it pays for
            less time than starting takes.
    """
    cloud, each = recipe.cloud, hourly_price_of(recipe, nodes)
    if cloud.max_cost is None or not each:
        return cloud.max_run - used[0]
    if cloud.max_cost / each * 3600 < SHORTEST_RUN_S:
        raise WrongInput(
            f"cloud.max_cost {cloud.max_cost:g} pays for {duration(cloud.max_cost / each * 3600)}"
            f" at {each:.2f} US dollars an hour, too little to start with; raise it, or take fewer"
            " or smaller machines"
        )
    return min(cloud.max_run - used[0], (cloud.max_cost - used[1]) / each * 3600)


def hourly_price_of(recipe: Recipe, nodes: int | None = None) -> float:
    """US dollars per hour of the machines that the recipe requests; 0 if unknown and
    `cloud.max_cost` is not set. Raises WrongInput if unknown and it is set.
    """
    cloud, launch = recipe.cloud, recipe.launch
    if launch.kind == "tpu":
        each = hourly_price_of_tpu(cloud, launch.tpu.type, spot=launch.machine.spot)
        name = launch.tpu.type
    else:
        each = hourly_price(cloud, launch.machine, nodes or launch.nodes)
        name = _name(launch.machine)
    if each is None and cloud.max_cost is not None:
        raise WrongInput(
            f"cloud.max_cost {cloud.max_cost:g} cannot be kept: the price of {name} is not known;"
            " give it in cloud.prices, US dollars an hour"
        )
    return each or 0.0


def _name(machine: Machine) -> str:
    name, count = accelerators_of(machine)
    known = machine_type(machine.type)
    attached = name is not None and (known is None or known.accelerator is None)
    return f"{machine.type} with {count} x {name}" if attached else machine.type


def _priced(cloud: Cloud, name: str, part: str, spot: bool) -> float | None:
    """The price from `cloud.prices`, under either spelling of an accelerator, else from the
    table.
    """
    for key, price in cloud.prices.items():
        if key == name or accelerator_name(key) == name:
            return price
    return _listed(part, name, spot)


def _listed(part: str, name: str, spot: bool) -> float | None:
    prices = price_table()[part].get(name)
    return None if prices is None else float(prices[spot])
