"""How much memory this machine has, or this process's control groups if they are given less."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil

from ingot.base.controlgroups import ROOT, own_groups

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")
"""In each version the files of limit and usage, and what `memory.stat` calls the page cache that
the kernel can reclaim.
"""


class HostMemory(NamedTuple):
    """Memory in bytes that this process can have in total, and what of it is used: by this process,
    or by others that share the machine or a control group with it.
    """

    used: int
    total: int

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)


def host_memory(root: Path = ROOT) -> HostMemory:
    """The least total and the least that is free, of the machine and the control groups that this
    process is in: a container, a job of Slurm, a service. `root` is where their files are.
    """
    machine = psutil.virtual_memory()
    found = [HostMemory(machine.total - machine.available, machine.total)]
    found += [
        memory
        for group in own_groups("memory", root)
        for names in (V2, V1)
        if (memory := _limited(group, *names)) is not None
    ]
    total = min(memory.total for memory in found)
    return HostMemory(total - min(memory.free for memory in (*found, HostMemory(0, total))), total)


def _limited(group: Path, limit: str, usage: str, cache: str) -> HostMemory | None:
    """Usage and limit of a control group, if it has one. Page cache that the kernel can reclaim is
    not counted as used.
    """
    with contextlib.suppress(OSError, ValueError):
        total, used = int((group / limit).read_text()), int((group / usage).read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return HostMemory(max(0, used - int(kept.get(cache, 0))), total)
    return None
