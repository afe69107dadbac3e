"""The two ceilings that all else is a share of: a large bf16 matrix product and a copy within the
device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.record import Asked, Record

TIMES, WARM_UP = 20, 5


def run(asked: Asked, record: Record) -> None:
    size, copied = (8192, 2**32) if asked.cuda else (64, 2**20)
    draw = torch.Generator(asked.device).manual_seed(0)

    def matrix(dtype: torch.dtype) -> torch.Tensor:
        # Random numbers: a device clocks higher on constant ones.
        made = torch.randn(size, size, device=asked.device, generator=draw)
        return made.to(dtype)

    a, b = matrix(torch.bfloat16), matrix(torch.bfloat16)
    record.figures(bf16_flops=2 * size**3 / seconds(lambda: a @ b, asked))
    if asked.cuda and torch.cuda.get_device_capability() >= (8, 9):
        with record.trying("float8 product"):
            record.figures(float8_flops=2 * size**3 / seconds(float8_product(matrix), asked))
    else:
        record.not_run("float8 product")
    source = torch.empty(copied, dtype=torch.uint8, device=asked.device)
    target = torch.empty_like(source)
    # Read and written.
    record.figures(copy_bytes_s=2 * copied / seconds(lambda: target.copy_(source), asked))
    if asked.cuda:
        host = torch.empty(copied // 4, dtype=torch.uint8, pin_memory=True)
        part = source[: copied // 4]
        to_host = seconds(lambda: host.copy_(part, non_blocking=True), asked)
        to_device = seconds(lambda: part.copy_(host, non_blocking=True), asked)
        record.figures(to_host_bytes_s=len(host) / to_host, from_host_bytes_s=len(host) / to_device)
    else:
        record.not_run("copies to and from the host")


def float8_product(matrix: Callable[[torch.dtype], torch.Tensor]) -> Callable[[], torch.Tensor]:
    kind = torch.float8_e4m3fn
    a, b = matrix(kind), matrix(kind)
    one = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def seconds(work: Callable[[], object], asked: Asked) -> float:
    """Of one call, the mean of `TIMES` that follow each other."""
    for _ in range(WARM_UP):
        work()
    wait(asked.device)
    began = time.perf_counter()
    for _ in range(TIMES):
        work()
    wait(asked.device)
    return (time.perf_counter() - began) / TIMES


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
