"""How much memory there is to take, and how much was taken: on the accelerator, or of the host for
a process on the CPU.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ingot.models.device import peak_memory_bytes

CGROUPS = Path("/sys/fs/cgroup")
V1 = (
    "memory/memory.limit_in_bytes",
    "memory/memory.usage_in_bytes",
    "memory/memory.stat",
    "total_inactive_file",
)
V2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_RSS = "5"
"""What the kernel forgets the peak of the resident memory by."""


class HostMemory(NamedTuple):
    """Bytes that are used, and that there are, of this machine or of the container, whichever
    leaves less.
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
    """What a control group is held to; the pages of files that it would give back are not counted
    as used.
    """
    with contextlib.suppress(OSError, ValueError):
        total, used = int((root / limit).read_text()), int((root / usage).read_text())
        kept = dict(line.split() for line in (root / stat).read_text().splitlines())
        return HostMemory(max(0, used - int(kept.get(cache, 0))), total)
    return None


def room_bytes(device: torch.device, local_world: int) -> int:
    """The most that this process may come to hold, what it holds already included; on a CPU the
    processes share what is free.
    """
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + torch.accelerator.memory_reserved(device))
    return int(psutil.Process().memory_info().rss) + host_memory().free // local_world


def forget_peak(device: torch.device) -> None:
    """From here on `peak_bytes` is about what comes; where the system cannot forget, it stays the
    most of all time.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        CLEAR.write_text(_PEAK_RSS)


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held since `forget_peak`."""
    if device.type == "cpu":
        with contextlib.suppress(OSError, StopIteration, ValueError):
            line = next(
                line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")
            )
            return int(line.split()[1]) * 1024
    return peak_memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is memory that lacked; torch says so of a CPU in words alone."""
    return isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
