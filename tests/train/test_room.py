"""Memory as the system counts it: what is held is seen, peaks can be forgotten."""

from __future__ import annotations

import mmap

import pytest
import torch

from ingot.base.hostmemory import host_memory
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
