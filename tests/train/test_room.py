"""Memory as the system counts it: what is held is seen, peaks can be forgotten, a container's limit
counts.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from ingot.base.hostmemory import HostMemory, host_memory
from ingot.train.micro_batch.memory import (
    forget_peak,
    is_out_of_memory,
    peak_bytes,
    room_bytes,
)

CPU = torch.device("cpu")
MB = 1_000_000


def test_a_peak_is_seen_and_forgotten() -> None:
    forget_peak(CPU)
    before = peak_bytes(CPU)
    # Straight from the system: the allocator may have kept that much of what earlier tests gave
    # back.
    with mmap.mmap(-1, 200 * MB) as held:
        for _ in range(200):
            held.write(b"x" * MB)
        assert peak_bytes(CPU) - before > 150 * MB
    high = peak_bytes(CPU)
    forget_peak(CPU)
    assert peak_bytes(CPU) <= high


def test_room_is_what_is_held_and_a_share_of_what_is_free() -> None:
    alone, shared, free = room_bytes(CPU, 1), room_bytes(CPU, 4), host_memory().free
    assert alone - shared == pytest.approx(0.75 * free, rel=0.1)


V1, V2 = (
    "memory/memory.limit_in_bytes memory/memory.usage_in_bytes memory/memory.stat",
    "memory.max memory.current memory.stat",
)


def container(folder: Path, files: str, *contents: str) -> Path:
    for name, content in zip(files.split(), contents, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")
    return folder


def test_the_limit_of_a_container_counts_without_the_files_it_would_give_back(
    tmp_path: Path,
) -> None:
    assert host_memory(
        container(tmp_path / "v2", V2, "100", "60", "anon 5\ninactive_file 20")
    ) == HostMemory(40, 100)
    assert host_memory(
        container(tmp_path / "v1", V1, "100", "90", "total_inactive_file 0")
    ) == HostMemory(90, 100)


def test_a_container_without_a_limit_is_the_machine(tmp_path: Path) -> None:
    machine = host_memory(tmp_path / "none")
    assert machine.total > 10**8
    assert (
        host_memory(container(tmp_path / "v2", V2, "max", "60", "inactive_file 20")).total
        == machine.total
    )


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate"
                " memory: you tried"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("x"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


def test_torch_says_so_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52)
    assert is_out_of_memory(caught.value)
