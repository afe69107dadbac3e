"""Available memory and peak memory use: of the accelerator, or of the host for a process on the
CPU. And the knobs on which the use depends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import torch

from ingot.base.hostmemory import host_memory
from ingot.models.device import peak_memory_bytes

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK_RSS = "5"
"""Value written to `clear_refs` to reset the kernel's peak resident set size."""

MEMORY_KNOBS = (
    "model",
    "objective",
    "parallel",
    "memory",
    "precision",
    "data.seq_len",
    "data.target_len",
    "train.global_batch",
    "train.compile",
    "train.optimizer.kind",
)
"""What determines how much memory a micro-batch takes, beside its size."""


def total_bytes(device: torch.device) -> int:
    """The memory of the device; for a CPU, what the processes of a node share."""
    if device.type == "cpu":
        return host_memory().total
    return torch.accelerator.get_memory_info(device)[1]


def room_bytes(device: torch.device, local_world: int) -> int:
    """The most memory that this process may hold, including what it holds now; on a CPU the
    processes of a node share what is free.
    """
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free + torch.accelerator.memory_reserved(device))
    return int(psutil.Process().memory_info().rss) + host_memory().free // local_world


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `peak_bytes` reports; where the system cannot, it remains the peak over
    the life of the process.
    """
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        CLEAR.write_text(_PEAK_RSS)


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this process since `forget_peak`."""
    if device.type == "cpu":
        with contextlib.suppress(OSError, StopIteration, ValueError):
            line = next(
                line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")
            )
            return int(line.split()[1]) * 1024
    return peak_memory_bytes(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU torch says so only in the message."""
    return isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
