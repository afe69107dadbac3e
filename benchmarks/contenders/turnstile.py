"""How a training that owns its loop takes turns: it is stopped between two steps until it is told
to go on. Knows no library but the standard one.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_task() -> dict[str, Any]:
    """What the program is to do, from the file named on its command line."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    return task


class Turnstile:
    """Reads `go` from the standard input before each turn, and answers each with a line of JSON on
    the standard output.

    Whatever a library prints goes to the standard error.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._losses = steps, 0, list[float]()
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = self._cpu = 0.0

    def wait(self) -> None:
        """Before the first step, and between turns. Leaves the program when there is no further
        one.
        """
        if sys.stdin.readline().strip() != "go":
            # Whatever would follow (checkpoints, exports) is not what is measured.
            os._exit(0)
        self._began, self._cpu = time.perf_counter(), cpu_seconds()

    def step(self, loss: float) -> None:
        """After each step; the last one of a turn answers, and waits for the next turn."""
        self._done += 1
        self._losses.append(loss)
        if self._done % self._steps == 0:
            self.answer(losses=self._losses)
            self._losses = []
            self.wait()

    def answer(self, **found: Any) -> None:
        """End a turn."""
        seconds, cpu = time.perf_counter() - self._began, cpu_seconds() - self._cpu
        self._answers.write(
            json.dumps(
                {
                    "seconds": seconds,
                    "cpu_seconds": cpu,
                    "memory_bytes": peak_bytes(),
                    "device_bytes": device_bytes(),
                    **found,
                }
            )
            + "\n"
        )
        self._answers.flush()


def cpu_seconds() -> float:
    """Of this process and of the children that it has waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def peak_bytes() -> int:
    """Most memory that this process has held since it was started, libraries included; `ru_maxrss`
    would count its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) * 1024
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def device_bytes() -> int:
    """Most that torch allocated on a GPU; 0 where it was not used."""
    torch = sys.modules.get("torch")
    return (
        torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_available() else 0
    )


def knobs_of(task: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's knobs, under torch's names."""
    return {name: task[name] for name in ("lr", "betas", "eps", "weight_decay")}
