"""Does rows within so many minutes, each in a process of its own: one after the other, those that
measure no time at once, and beside them those that need the host's processor alone. Imports no
torch.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.process import RowProcess
from benchmarks.gpu.results import CUT_OFF, ROOT, Results
from benchmarks.gpu.rows import ROWS, Row
from ingot.base.environment import usable_cores

RESERVE_S = 5.0
"""Left at the end for writing down and showing."""
TOO_LONG = 3
"""A row that takes so many times its estimate hangs."""
LEAST_S = 120.0
"""No row is said to hang before."""
CORES_OF_A_ROW = 3
"""A row that compiles keeps some busy."""
THREADS = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
LAST_WORDS = 400
SIGKILL_CODE = -signal.SIGKILL


@dataclass
class Runner:
    """`device`: cuda or cpu; `planned`: the device that plans are made for."""

    results: Results
    device: str
    tiny: bool
    ends: float
    """By the monotonic clock."""
    planned: str = "cpu"
    show: Callable[[Row, dict[str, Any]], None] = lambda row, line: None
    command: Sequence[str] = (sys.executable, "-m", "benchmarks.gpu.one_row")

    def __post_init__(self) -> None:
        self._cache = tempfile.TemporaryDirectory(prefix="ingot-gpu-compiled-")

    def left_s(self) -> float:
        return self.ends - time.monotonic() - RESERVE_S

    def run(self, rows: Sequence[Row]) -> list[str]:
        """Why rows were not begun, one line each."""
        beside = [row for row in rows if row.beside]
        told: list[str] = []
        thread = threading.Thread(target=self._in_turn, args=(beside, told), name="beside")
        thread.start()
        try:
            alone = (row for row in rows if not row.beside)
            for shared, some in itertools.groupby(alone, lambda row: row.shared):
                (self._at_once if shared else self._in_turn)(list(some), told)
        finally:
            thread.join()
        return told

    def _in_turn(self, rows: Sequence[Row], told: list[str]) -> None:
        """One after the other; the process of the next one starts while one works. What one
        compiled, later ones find.
        """
        ready: RowProcess | None = None
        try:
            for place, row in enumerate(rows):
                if not self._is_due(row, told):
                    continue
                process, ready = ready or self._process(), None
                if not all(map(self.results.is_done, rows[place + 1 :])):
                    ready = self._process()
                self._do(row, process, None if row.beside else Path(self._cache.name))
        finally:
            if ready is not None:
                ready.close()

    def _at_once(self, rows: Sequence[Row], told: list[str]) -> None:
        """As many as the host has cores for: they share the device."""
        due, cores = [row for row in rows if self._is_due(row, told)], usable_cores()
        workers = max(1, min(len(due), cores // CORES_OF_A_ROW))
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda row: self._do(row, self._process(cores // workers)), due):
                pass

    def _is_due(self, row: Row, told: list[str]) -> bool:
        if self.results.is_done(row):
            return False
        if why := self.why_not(row):
            told.append(f"{row.name}: {why}")
        return not why

    def _do(self, row: Row, process: RowProcess, cache: Path | None = None) -> None:
        try:
            self.show(row, self.results.add(row, self._outcome(row, process, cache)))
        finally:
            process.close()

    def why_not(self, row: Row) -> str:
        """Why a row is not begun; empty if it is."""
        if not self._is_wanted(row):
            return f"not needed, or not known yet, as {row.unless_measured} did not run out"
        estimate = self.results.estimate_s(row)
        if not self.tiny and estimate > self.left_s():
            return f"takes about {estimate:.0f} s, and {max(0.0, self.left_s()):.0f} s are left"
        return "" if self.left_s() > 0 else "no time is left"

    def _is_wanted(self, row: Row) -> bool:
        """A smaller row is, where all larger ones ran out of memory; in miniature all are."""
        larger = next((one for one in ROWS if one.name == row.unless_measured), None)
        if larger is None or self.tiny:
            return True
        known = self.results.of(larger)
        return known is not None and known["status"] == "out of memory"

    def _outcome(self, row: Row, process: RowProcess, cache: Path | None) -> dict[str, Any]:
        """What a row's process wrote, and how it ended."""
        began = time.monotonic()
        patience = max(LEAST_S, TOO_LONG * self.results.estimate_s(row))
        timeout = max(1.0, min(self.left_s(), patience))
        code = process.do(row, timeout, cache)
        if cache is not None and (code is None or code < 0):
            # A row that is ended leaves half a file behind, and later ones would fail.
            self._cache = tempfile.TemporaryDirectory(prefix="ingot-gpu-compiled-")
        lines, words = process.lines, process.words
        seconds = time.monotonic() - began
        found: dict[str, Any] = {"seconds": round(seconds, 1), "figures": {}, "checks": []}
        for line in lines:
            found["figures"].update(line.get("figures", {}))
            found["checks"] += [line] if "check" in line else []
        ended = next((line for line in lines if "status" in line), None)
        if ended is not None:
            found |= ended
            if ended["status"] == "failed":
                found["said"] = words[-LAST_WORDS * 5 :]
        elif code is None and timeout < patience:
            found |= {"status": CUT_OFF, "reason": f"the minutes ended after {seconds:.0f} s"}
        elif code is None:
            found |= {"status": "failed", "reason": f"took longer than {timeout:.0f} s"}
        elif code == SIGKILL_CODE:
            found |= {"status": "out of memory", "reason": "the host's: killed by the system"}
        else:
            found |= {"status": "failed", "reason": last_line(words) or f"exit code {code}"}
        return found

    def _process(self, threads: int | None = None) -> RowProcess:
        """`threads`: how many it computes and compiles with, where the host is shared."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        return RowProcess(
            [*self.command, "--device", self.device, *(["--tiny"] if self.tiny else [])],
            {
                **({} if threads is None else dict.fromkeys(THREADS, str(threads))),
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
                "BENCHMARK_DEVICE": self.planned,
            },
        )


def last_line(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1][-LAST_WORDS:] if lines else ""


def in_words(line: dict[str, Any]) -> str:
    """A row in one line."""
    checks = [check for check in line["checks"] if check["holds"] is not None]
    parts = [line["status"]]
    if line["reason"]:
        parts.append(line["reason"])
    if checks:
        parts.append(f"{sum(check['holds'] for check in checks)} of {len(checks)} checks hold")
    if rate := line["figures"].get("tokens_per_s"):
        parts.append(f"{rate:,.0f} tokens/s")
    return f"{line['seconds']:6.1f} s  {line['row']}: {', '.join(parts)}"
