"""What a recipe's ranks run on, as far as the recipe and this machine tell: devices, memory, disk
and prices. Asks no service and imports no torch.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ingot.base.environment import usable_cores
from ingot.base.errors import WrongInput
from ingot.base.hostmemory import host_memory
from ingot.cloud.machines import accelerators_of, machine_type
from ingot.cloud.prices import hourly_price, hourly_price_of_tpu, price_table
from ingot.config.automatic import StartDevices
from ingot.config.recipe import Recipe
from ingot.plan.devices.types import DeviceType, device_of_machine, device_of_tpu, device_type
from ingot.plan.ranges import GIB, Range

PlaceType = Literal["cpu", "cuda", "tpu"]
RENTED = ("gce", "vertex", "tpu")
GB = 1e9


@dataclass(frozen=True)
class PlacePrice:
    """US dollars an hour of all machines, None where unknown; `date` of the bundled prices, empty
    where `cloud.prices` gives them.
    """

    on_demand: float | None
    spot: float | None
    date: str
    uses_spot: bool

    @property
    def used(self) -> float | None:
        """The price of the recipe's own choice."""
        return self.spot if self.uses_spot else self.on_demand


@dataclass(frozen=True)
class PlannedPlace:
    """Where ranks run. Bytes are None where they are unknown."""

    about: str
    kind: str
    """`launch.kind`."""
    nodes: int
    processes: int
    """Ranks of a node."""
    type: PlaceType
    device: DeviceType | None
    """None for CPUs, and where it is unknown."""
    device_name: str
    machine: str | None = None
    """The machine type, of rented machines."""
    devices: int | None = None
    """Accelerators of a node; None where unknown, 0 for CPUs."""
    device_bytes: Range | None = None
    """What one rank may use: of an accelerator its memory, of a CPU a share of the node's."""
    host_bytes: float | None = None
    """Memory of a node."""
    disk_bytes: float | None = None
    """Free where the run folder lies."""
    cores: int | None = None
    price: PlacePrice | None = None
    """None for machines that are not rented by the hour."""

    @property
    def world(self) -> int:
        return self.nodes * self.processes

    @property
    def rented(self) -> bool:
        return self.kind in RENTED


def place_of(recipe: Recipe, device: str | None = None) -> PlannedPlace:
    """The place of a recipe that is already resolved for its verb (`Recipe.at`).

    Args:
        device: `cpu`, or the type of device that the ranks run on, or of machine that has it, for
            places that do not tell.

    Raises:
        WrongInput: there is no such device.
    """
    kind = recipe.launch.kind
    named = None if device in (None, "cpu") else device_type(str(device))
    if kind in ("gce", "vertex"):
        return _virtual_machines(recipe)
    if kind == "tpu":
        return _tpu(recipe)
    if kind == "local" and device is None:
        return _this_machine(recipe)
    described = _described(recipe, named, is_cpu=device == "cpu")
    is_machine = named is not None and device in named.machines
    return replace(described, machine=device) if is_machine else described


def place_of_start(recipe: Recipe, devices: StartDevices) -> PlannedPlace:
    """The place of a training that has started, with the devices that its ranks found; the recipe
    tells the network between its machines and its price.
    """
    described, cpu = place_of(recipe, "cpu"), devices.type == "cpu"
    try:
        device = None if cpu else device_type(devices.name)
    except WrongInput:
        device = described.device if described.type == devices.type else None
    return replace(
        described,
        about=devices.text(),
        nodes=devices.world // devices.per_node,
        processes=devices.per_node,
        type=devices.type,
        device=device,
        device_name=devices.name,
        device_bytes=Range.exactly(float(devices.memory), "measured"),
    )


def _virtual_machines(recipe: Recipe) -> PlannedPlace:
    launch, cloud = recipe.launch, recipe.cloud
    machine, known = launch.machine, machine_type(launch.machine.type)
    (name, count), (device, _) = accelerators_of(machine), device_of_machine(machine)
    host = None if known is None else known.memory_gb * GIB
    on_demand, spot = (
        hourly_price(cloud, machine.model_copy(update={"spot": wanted}), launch.nodes)
        for wanted in (False, True)
    )
    share = None if host is None else Range.exactly(host / launch.processes)
    is_tpu = (name or "").startswith("tpu")
    return PlannedPlace(
        f"{launch.nodes} x {machine.type}{f', {count} x {name} each' if name else ''}"
        f" ({launch.kind}, {cloud.region})",
        launch.kind,
        launch.nodes,
        launch.processes,
        "cpu" if name is None else "tpu" if is_tpu else "cuda",
        device,
        name or "CPU",
        machine=machine.type,
        devices=count,
        device_bytes=share if name is None else _memory(device),
        host_bytes=host,
        disk_bytes=machine.disk_gb * GB,
        cores=None if known is None else known.vcpus,
        price=_price(on_demand, spot, recipe, uses_spot=machine.spot),
    )


def _tpu(recipe: Recipe) -> PlannedPlace:
    launch, cloud = recipe.launch, recipe.cloud
    on_demand, spot = (
        hourly_price_of_tpu(cloud, launch.tpu.type, spot=wanted) for wanted in (False, True)
    )
    device, count = device_of_tpu(launch.tpu.type)
    return PlannedPlace(
        f"{launch.tpu.type} (tpu, {cloud.region})",
        launch.kind,
        launch.nodes,
        launch.processes,
        "tpu",
        device,
        launch.tpu.type,
        devices=count or None,
        device_bytes=_memory(device),
        price=_price(on_demand, spot, recipe, uses_spot=launch.machine.spot),
    )


def _memory(device: DeviceType | None) -> Range | None:
    return None if device is None else device.memory_bytes


def _price(
    on_demand: float | None, spot: float | None, recipe: Recipe, *, uses_spot: bool
) -> PlacePrice | None:
    """A price of `cloud.prices` is what is paid, on demand or spot: the other one is unknown."""
    launch = recipe.launch
    names = (launch.machine.type, launch.machine.accelerator, launch.tpu.type)
    if any(name in recipe.cloud.prices for name in names):
        if uses_spot:
            return PlacePrice(None, spot, "", uses_spot)
        return PlacePrice(on_demand, None, "", uses_spot)
    if on_demand is None and spot is None:
        return None
    return PlacePrice(on_demand, spot, str(price_table()["date"]), uses_spot)


def _this_machine(recipe: Recipe) -> PlannedPlace:
    launch, host = recipe.launch, float(host_memory().total)
    found = installed_gpus()
    name, own = found[0] if found else ("CPU", host / launch.processes)
    try:
        device = device_type(name) if found else None
    except WrongInput:  # its memory is known nevertheless
        device = None
    return PlannedPlace(
        f"this machine, {len(found)} x {name}" if found else "this machine, CPU",
        "local",
        launch.nodes,
        launch.processes,
        "cuda" if found else "cpu",
        device,
        name,
        devices=len(found),
        device_bytes=Range.exactly(own, "measured"),
        host_bytes=host,
        disk_bytes=_free(recipe),
        cores=usable_cores(),
    )


def _described(recipe: Recipe, device: DeviceType | None, *, is_cpu: bool) -> PlannedPlace:
    """Hosts that nobody has described but by a device: ssh, Slurm, places of other packages."""
    launch = recipe.launch
    asks = launch.kind == "slurm" and launch.slurm.gpus is not None
    is_cpu = is_cpu or (device is None and asks and launch.slurm.gpus == 0)
    name = device.title if device else "CPU" if is_cpu else "an accelerator that is not named"
    return PlannedPlace(
        f"{launch.nodes} x {launch.processes} of {name} ({launch.kind})",
        launch.kind,
        launch.nodes,
        launch.processes,
        "cpu" if is_cpu else "tpu" if device and device.kind == "tpu" else "cuda",
        device,
        name,
        devices=launch.slurm.gpus if asks else None,
        device_bytes=_memory(device),
        disk_bytes=_free(recipe) if launch.kind == "local" else None,
    )


@functools.cache
def installed_gpus() -> tuple[tuple[str, float], ...]:
    """Name and bytes of memory of each NVIDIA GPU of this machine, as its driver tells. One
    that has none of its own computes in the machine's.
    """
    if shutil.which("nvidia-smi") is None:
        return ()
    ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    pairs = [line.rpartition(",") for line in said.splitlines() if "," in line]
    return tuple((name.strip(), _told_bytes(mib)) for name, _, mib in pairs)


def _told_bytes(mib: str) -> float:
    try:
        return float(mib) * 2**20
    except ValueError:  # [N/A]
        return float(host_memory().total)


def _free(recipe: Recipe) -> float | None:
    folder = recipe.folder.root.absolute()
    while not folder.exists() and folder != Path(folder.anchor):
        folder = folder.parent
    try:
        return float(shutil.disk_usage(folder).free)
    except OSError:
        return None
