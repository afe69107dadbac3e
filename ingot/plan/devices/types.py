"""Types of devices: what vendors state, what is guessed of them, and which machines have them.
A table; what a device does in a second is in `coefficients`. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ingot.base.errors import WrongInput
from ingot.cloud.machines import accelerators_of
from ingot.cloud.prices import tpu_chips
from ingot.config.sections.launch import Machine
from ingot.plan.ranges import GIB, Range

GUESSES = (
    "matmul",
    "attention",
    "memory",
    "within",
    "between",
    "kernel_s",
    "within_s",
    "between_s",
    "hop_s",
    "exposed",
    "compiled",
)
"""What of a device is guessed until it is calibrated; `devices.yaml` says what each means."""


@dataclass(frozen=True)
class FigureSource:
    """The document in which a figure stands."""

    title: str
    url: str


@dataclass(frozen=True)
class DeviceType:
    """A type of accelerator, of which a machine has several.

    name: short, such as `h100`; title: the vendor's.
    machines: those that have it, of clouds where no place starts any.
    kind: as torch calls the type of device, `cuda`; `tpu` where torch has no name.
    memory_bytes: of one device, as torch tells it.
    peak_flops: FLOP/s of dense matrix products, by dtype; `tfloat32` where float32 may be rounded.
    bandwidth: bytes/s of the device's memory; link: bytes/s to other devices of the node, one
        direction; network: bits/s that machines with these devices usually have; power_w: watts at
        the most, None if not stated.
    guesses: shares of the peaks that are reached, and latencies in seconds.
    unconfirmed: figures whose source was not seen.
    """

    name: str
    title: str
    kind: str
    cuda_names: tuple[str, ...]
    accelerators: tuple[str, ...]
    machines: tuple[str, ...]
    memory_bytes: Range
    peak_flops: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    power_w: float | None
    guesses: Mapping[str, Range]
    sources: tuple[FigureSource, ...]
    unconfirmed: tuple[str, ...]


@dataclass(frozen=True)
class Allowances:
    """Device memory that no tensor accounts for, in bytes."""

    context: Range
    cublas: Range
    nccl: Range


@functools.cache
def _table() -> dict[str, Any]:
    file = importlib.resources.files("ingot.plan.devices").joinpath("devices.yaml")
    found: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


@functools.cache
def device_types() -> Mapping[str, DeviceType]:
    """All known types by name."""
    table = _table()
    return {name: _device(name, row, table) for name, row in table["devices"].items()}


def _device(name: str, row: dict[str, Any], table: dict[str, Any]) -> DeviceType:
    kind = table["kinds"][row["kind"]]
    sources = dict.fromkeys([*row["sources"], *kind["sources"]])
    return DeviceType(
        name,
        row["title"],
        row["kind"],
        tuple(row.get("cuda_names", ())),
        tuple(row.get("accelerators", ())),
        tuple(row.get("machines", ())),
        # Seen in messages of torch, but on machines of others.
        Range.of(row["memory_gib"], "modelled") * GIB,
        {dtype: tflops * 1e12 for dtype, tflops in row["peak_tflops"].items()},
        row["bandwidth_gb_s"] * 1e9,
        row["link_gb_s"] * 1e9,
        row.get("network_gbit", table["usual_network_gbit"]) * 1e9,
        row.get("power_w"),
        {what: Range.of(row.get(what, kind[what]), "guessed") for what in GUESSES},
        tuple(FigureSource(**table["sources"][source]) for source in sources),
        tuple(row.get("unconfirmed", ())),
    )


def allowances(kind: str) -> Allowances | None:
    """What a process takes beside its tensors on a device of this kind; None where nothing is known
    or, as on a CPU, nothing is taken.
    """
    row = _table()["allowances"].get(kind)
    if row is None:
        return None
    context, cublas, nccl = (
        Range.of(row[name], "guessed") * GIB for name in ("context_gib", "cublas_gib", "nccl_gib")
    )
    return Allowances(context, cublas, nccl)


def device_type(name: str) -> DeviceType:
    """The type called `name` here, by Google Cloud or by CUDA, or the one that the machine type
    `name` has.

    Raises:
        WrongInput: there is no such type.
    """
    for device in device_types().values():
        if name in (device.name, *device.accelerators, *device.cuda_names, *device.machines):
            return device
    raise WrongInput(
        f"device {name} is not known; choose among {', '.join(device_types())}, or measure it on"
        " its machine with `ingot bench --calibrate`"
    )


def device_of_machine(machine: Machine) -> tuple[DeviceType | None, int]:
    """The device type of a machine of Compute Engine and how many it has; None for a machine
    without accelerators, or with one of which nothing is known.
    """
    name, count = accelerators_of(machine)
    return _find(name), count


def device_of_tpu(kind: str) -> tuple[DeviceType | None, int]:
    """The same for a TPU's accelerator type, such as `v5litepod-8`."""
    return _find(kind.partition("-")[0]), tpu_chips(kind) or 0


def _find(accelerator: str | None) -> DeviceType | None:
    having = (one for one in device_types().values() if accelerator in one.accelerators)
    return next(having, None)


def network_bytes_s(device: DeviceType, machine_type: str | None, devices: int) -> Range:
    """Bytes/s between nodes for one of the `devices` of a machine of this type, one direction; a
    guess where the type is not known.
    """
    networks = _table()["networks"]
    found = [start for start in networks if (machine_type or "").startswith(start)]
    if not found:
        each = device.network / 8 / max(1, devices)
        return Range(each / 4, each, each * 2, "guessed")
    total = networks[max(found, key=len)] * 1e9
    return Range.exactly(total / 8 / max(1, devices), "modelled")
