"""How much memory this machine has, or the container if that has less."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

CGROUPS = Path("/sys/fs/cgroup")
V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)
V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")


class HostMemory(NamedTuple):
    """Memory in bytes, used and in total: of the machine, or of the container if it has
    less free.
    """

    used: int
    total: int

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)


def host_memory(cgroups: Path = CGROUPS) -> HostMemory:
    machine = psutil.virtual_memory()
    found = [HostMemory(machine.total - machine.available, machine.total)]
    found += [memory for names in (V2, V1) if (memory := _container(cgroups, *names)) is not None]
    return min(found, key=lambda memory: memory.free)


def _container(root: Path, limit: str, usage: str, stat: str, cache: str) -> HostMemory | None:
    """Usage and limit of a control group. Page cache that the kernel can reclaim is not counted as
    used.
    """
    with contextlib.suppress(OSError, ValueError):
        total, used = int((root / limit).read_text()), int((root / usage).read_text())
        kept = dict(line.split() for line in (root / stat).read_text().splitlines())
        return HostMemory(max(0, used - int(kept.get(cache, 0))), total)
    return None
