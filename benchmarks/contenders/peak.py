"""The fastest matrix product of this machine: what the others' shares of the peak are taken
of.
"""

from __future__ import annotations

import math
import time

import torch

from benchmarks.contenders.turnstile import Turnstile, read_task

SIZES = (1024, 2048)
SECONDS = 1.0


def fastest(seconds: float, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest product of square matrices of a dtype within so much time for each of
    `SIZES`: 2 * size^3 / seconds.
    """
    best = 0.0
    for size in SIZES:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        least, until = math.inf, time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            a @ b
            least = min(least, time.perf_counter() - began)
        best = max(best, 2 * size**3 / least)
    return best


def main() -> None:
    task = read_task()
    torch.set_num_threads(task["threads"])
    turnstile = Turnstile(task["steps"])
    dtype = torch.bfloat16 if task["compute"] == "bf16" else torch.float32
    while True:
        turnstile.wait()
        turnstile.answer(flops=fastest(SECONDS, dtype), versions={"torch": torch.__version__})


if __name__ == "__main__":
    main()
