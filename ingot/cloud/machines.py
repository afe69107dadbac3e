"""Machine types and accelerators of Compute Engine for training, preparing and serving: what each
has, and which can be combined.

A table and arithmetic over it; `ingot doctor --cloud` asks Google for actual availability by zone
and quota.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ingot.config.sections.deployment import Cloud
from ingot.config.sections.launch import Machine

ZONES = "abcdf"
"""Zone letters that are tried. No region has all of them, and few have an `e`."""


@dataclass(frozen=True)
class MachineType:
    """A machine type; `accelerator` is the built-in one under Compute Engine's name, `accelerators`
    their number.
    """

    name: str
    vcpus: int
    memory_gb: float
    accelerator: str | None = None
    accelerators: int = 0

    @property
    def family(self) -> str:
        """`n1`, `a2`, ..."""
        return self.name.partition("-")[0]

    @property
    def is_tpu(self) -> bool:
        return (self.accelerator or "").startswith("tpu")


@dataclass(frozen=True)
class Accelerator:
    """An accelerator under both names, its memory and, if it can be attached to n1 machines, the
    possible counts with the most vCPUs for each.
    """

    name: str
    vertex: str
    memory_gb: int
    vcpus_by_count: tuple[tuple[int, int], ...] = ()

    @property
    def counts(self) -> list[int]:
        return [count for count, _ in self.vcpus_by_count]


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("nvidia-tesla-t4", "NVIDIA_TESLA_T4", 16, ((1, 48), (2, 48), (4, 96))),
        Accelerator("nvidia-tesla-p4", "NVIDIA_TESLA_P4", 8, ((1, 24), (2, 48), (4, 96))),
        Accelerator("nvidia-tesla-p100", "NVIDIA_TESLA_P100", 16, ((1, 16), (2, 32), (4, 96))),
        Accelerator(
            "nvidia-tesla-v100", "NVIDIA_TESLA_V100", 16, ((1, 12), (2, 24), (4, 48), (8, 96))
        ),
        Accelerator("nvidia-tesla-a100", "NVIDIA_TESLA_A100", 40),
        Accelerator("nvidia-a100-80gb", "NVIDIA_A100_80GB", 80),
        Accelerator("nvidia-l4", "NVIDIA_L4", 24),
        Accelerator("nvidia-rtx-pro-6000", "NVIDIA_RTX_PRO_6000", 96),
        Accelerator("nvidia-h100-80gb", "NVIDIA_H100_80GB", 80),
        Accelerator("nvidia-h100-mega-80gb", "NVIDIA_H100_MEGA_80GB", 80),
        Accelerator("nvidia-h200-141gb", "NVIDIA_H200_141GB", 141),
        Accelerator("nvidia-b200", "NVIDIA_B200", 180),
    )
}
_BY_VERTEX = {accelerator.vertex: accelerator.name for accelerator in ACCELERATORS.values()}

# Machine series without accelerators: GB of memory per vCPU, and the sizes in vCPUs.
_SERIES: dict[str, tuple[float, tuple[int, ...]]] = {
    "n1-standard": (3.75, (1, 2, 4, 8, 16, 32, 64, 96)),
    "n1-highmem": (6.5, (2, 4, 8, 16, 32, 64, 96)),
    "n1-highcpu": (0.9, (2, 4, 8, 16, 32, 64, 96)),
    "n2-standard": (4, (2, 4, 8, 16, 32, 48, 64, 80, 96, 128)),
    "n2-highmem": (8, (2, 4, 8, 16, 32, 48, 64, 80, 96, 128)),
    "n2-highcpu": (1, (2, 4, 8, 16, 32, 48, 64, 80, 96)),
    "c3-standard": (4, (4, 8, 22, 44, 88, 176)),
    "c3-highmem": (8, (4, 8, 22, 44, 88, 176)),
    "c3-highcpu": (2, (4, 8, 22, 44, 88, 176)),
    "e2-standard": (4, (2, 4, 8, 16, 32)),
    "e2-highmem": (8, (2, 4, 8, 16)),
    "e2-highcpu": (1, (2, 4, 8, 16, 32)),
}
# Machine types with built-in accelerators: vCPUs, GB, accelerator, count.
_WITH_ACCELERATORS: dict[str, tuple[int, float, str, int]] = {
    "a2-highgpu-1g": (12, 85, "nvidia-tesla-a100", 1),
    "a2-highgpu-2g": (24, 170, "nvidia-tesla-a100", 2),
    "a2-highgpu-4g": (48, 340, "nvidia-tesla-a100", 4),
    "a2-highgpu-8g": (96, 680, "nvidia-tesla-a100", 8),
    "a2-megagpu-16g": (96, 1360, "nvidia-tesla-a100", 16),
    "a2-ultragpu-1g": (12, 170, "nvidia-a100-80gb", 1),
    "a2-ultragpu-2g": (24, 340, "nvidia-a100-80gb", 2),
    "a2-ultragpu-4g": (48, 680, "nvidia-a100-80gb", 4),
    "a2-ultragpu-8g": (96, 1360, "nvidia-a100-80gb", 8),
    "a3-highgpu-1g": (26, 234, "nvidia-h100-80gb", 1),
    "a3-highgpu-2g": (52, 468, "nvidia-h100-80gb", 2),
    "a3-highgpu-4g": (104, 936, "nvidia-h100-80gb", 4),
    "a3-highgpu-8g": (208, 1872, "nvidia-h100-80gb", 8),
    "a3-edgegpu-8g": (208, 1872, "nvidia-h100-80gb", 8),
    "a3-megagpu-8g": (208, 1872, "nvidia-h100-mega-80gb", 8),
    "a3-ultragpu-8g": (224, 2952, "nvidia-h200-141gb", 8),
    "a4-highgpu-8g": (224, 3968, "nvidia-b200", 8),
    "g2-standard-4": (4, 16, "nvidia-l4", 1),
    "g2-standard-8": (8, 32, "nvidia-l4", 1),
    "g2-standard-12": (12, 48, "nvidia-l4", 1),
    "g2-standard-16": (16, 64, "nvidia-l4", 1),
    "g2-standard-24": (24, 96, "nvidia-l4", 2),
    "g2-standard-32": (32, 128, "nvidia-l4", 1),
    "g2-standard-48": (48, 192, "nvidia-l4", 4),
    "g2-standard-96": (96, 384, "nvidia-l4", 8),
    "g4-standard-48": (48, 180, "nvidia-rtx-pro-6000", 1),
    "g4-standard-96": (96, 360, "nvidia-rtx-pro-6000", 2),
    "g4-standard-192": (192, 720, "nvidia-rtx-pro-6000", 4),
    "g4-standard-384": (384, 1440, "nvidia-rtx-pro-6000", 8),
    "ct5lp-hightpu-1t": (24, 48, "tpu-v5e", 1),
    "ct5lp-hightpu-4t": (112, 192, "tpu-v5e", 4),
    "ct5lp-hightpu-8t": (224, 384, "tpu-v5e", 8),
    "ct5p-hightpu-1t": (52, 112, "tpu-v5p", 1),
    "ct5p-hightpu-2t": (104, 224, "tpu-v5p", 2),
    "ct5p-hightpu-4t": (208, 448, "tpu-v5p", 4),
    "ct6e-standard-1t": (44, 176, "tpu-v6e", 1),
    "ct6e-standard-4t": (180, 720, "tpu-v6e", 4),
    "ct6e-standard-8t": (180, 1440, "tpu-v6e", 8),
}
NOT_ON_DEMAND = (
    "a3-ultragpu-8g",
    "a4-highgpu-8g",
    "a3-highgpu-1g",
    "a3-highgpu-2g",
    "a3-highgpu-4g",
)
"""Machine types available only as Spot, by flex-start or (the large ones) with a reservation, never
on demand.
"""
MACHINES = {
    **{
        f"{series}-{size}": MachineType(f"{series}-{size}", size, size * memory)
        for series, (memory, sizes) in _SERIES.items()
        for size in sizes
    },
    **{name: MachineType(name, *values) for name, values in _WITH_ACCELERATORS.items()},
}


def zones_of(cloud: Cloud) -> list[str]:
    """The zones to try, in order."""
    return [cloud.zone] if cloud.zone else [f"{cloud.region}-{letter}" for letter in ZONES]


def machine_type(name: str) -> MachineType | None:
    """The machine type of this name, including custom ones such as `n2-custom-8-16384` (vCPUs, MB);
    None if unknown.
    """
    if custom := re.fullmatch(r"(?:(?:n1|n2|e2)-)?custom-(\d+)-(\d+)(?:-ext)?", name):
        return MachineType(
            name if not name.startswith("custom") else f"n1-{name}",
            int(custom[1]),
            int(custom[2]) / 1024,
        )
    return MACHINES.get(name)


def accelerator_name(name: str) -> str | None:
    """Compute Engine's name of an accelerator given in either spelling: `nvidia-tesla-t4` for
    `NVIDIA_TESLA_T4`. None if unknown.
    """
    return name if name in ACCELERATORS else _BY_VERTEX.get(name.upper().replace("-", "_"))


def vertex_accelerator(name: str) -> str:
    """Vertex AI's name of an accelerator: `NVIDIA_TESLA_T4` for `nvidia-tesla-t4`. Raises KeyError
    if it is unknown.
    """
    return ACCELERATORS[accelerator_name(name) or name].vertex


def accelerators_of(machine: Machine) -> tuple[str | None, int]:
    """The accelerator of a machine, built-in or attached, under Compute Engine's name, and
    the count.
    """
    known = machine_type(machine.type)
    if known is not None and known.accelerator is not None:
        return known.accelerator, known.accelerators
    if machine.accelerator is None:
        return None, 0
    return accelerator_name(machine.accelerator) or machine.accelerator, machine.accelerators or 1


def check_machine(machine: Machine) -> list[str]:
    """The reasons why there is no such machine, each naming the nearest one that exists; [] if
    there is.
    """
    known = machine_type(machine.type)
    if known is None:
        return [
            f"machine type {machine.type} is not known; the nearest is"
            f" {_nearest(machine.type, MACHINES)} (launch.machine.type)"
        ]
    reasons = []
    if machine.spot and machine.flex_start:
        reasons.append(
            "spot and flex_start are two ways to get capacity; set one of them (launch.machine)"
        )
    if machine.spot and machine.reservation:
        reasons.append(
            "a reservation holds no spot machines; set one of spot and reservation (launch.machine)"
        )
    if machine.accelerator is None:
        if machine.accelerators and machine.accelerators != known.accelerators:
            reasons.append(
                _wrong_accelerator(known, machine.accelerators)
                if known.accelerator
                else (
                    f"accelerators {machine.accelerators} of which kind? set"
                    " launch.machine.accelerator, such as nvidia-tesla-t4"
                )
            )
        return reasons
    name = accelerator_name(machine.accelerator)
    if name is None:
        spelt = machine.accelerator.lower().replace("_", "-")
        return [
            *reasons,
            (
                f"accelerator {machine.accelerator} is not known; the nearest is"
                f" {_nearest(spelt, ACCELERATORS)} (launch.machine.accelerator)"
            ),
        ]
    if known.accelerator is not None:
        count = machine.accelerators or known.accelerators
        same = (name, count) == (known.accelerator, known.accelerators)
        return reasons if same else [*reasons, _wrong_accelerator(known, count, name)]
    return [*reasons, *_check_attached(known, ACCELERATORS[name], machine.accelerators or 1)]


def _wrong_accelerator(known: MachineType, count: int, name: str = "") -> str:
    asked = f"{count} x {name}" if name else f"accelerators {count}"
    brought = f"{known.accelerators} x {known.accelerator}"
    return (
        f"machine type {known.name} brings {brought}, not {asked}; leave launch.machine.accelerator"
        f" empty, or {_others(name)}"
    )


def _others(name: str) -> str:
    """The machine types that have the requested accelerator."""
    bringing = [
        machine.name for machine in MACHINES.values() if name and machine.accelerator == name
    ]
    if bringing:
        return f"take {', '.join(bringing)}"
    return (
        "take an n1 machine, to which it can be attached" if name else "take another machine type"
    )


def _check_attached(known: MachineType, accelerator: Accelerator, count: int) -> list[str]:
    if not accelerator.vcpus_by_count:
        return [
            f"{accelerator.name} cannot be attached to {known.name}; {_others(accelerator.name)}"
            " (launch.machine.type)"
        ]
    if known.family != "n1":
        return [
            f"no accelerator can be attached to {known.name}; take an n1 machine for"
            f" {accelerator.name} (launch.machine.type)"
        ]
    most = dict(accelerator.vcpus_by_count).get(count)
    if most is None:
        counts = ", ".join(map(str, accelerator.counts))
        return [
            f"{count} x {accelerator.name} cannot be had; it comes {counts} to a machine"
            " (launch.machine.accelerators)"
        ]
    if known.vcpus > most:
        return [
            f"{known.name} has {known.vcpus} vCPUs, and {count} x {accelerator.name} go with {most}"
            " at the most; take a smaller machine or more of them"
        ]
    return []


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
