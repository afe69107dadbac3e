"""Does rows one after the other within so many minutes, each in a process of its own, and beside
them those that need the host's processor alone. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import CUT_OFF, ROOT, Results, read
from benchmarks.gpu.rows import ROWS, Row
from ingot.base.processes import preexec_die_with_parent

RESERVE_S = 5.0
"""Left at the end for writing down and showing."""
TOO_LONG = 3
"""A row that takes so many times its estimate hangs."""
LEAST_S = 120.0
"""No row is said to hang before."""
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

    def left_s(self) -> float:
        return self.ends - time.monotonic() - RESERVE_S

    def run(self, rows: Sequence[Row]) -> list[str]:
        """Why rows were not begun, one line each."""
        beside = [row for row in rows if row.beside]
        told: list[str] = []
        thread = threading.Thread(target=self._all, args=(beside, told), name="beside")
        thread.start()
        try:
            self._all([row for row in rows if not row.beside], told)
        finally:
            thread.join()
        return told

    def _all(self, rows: Sequence[Row], told: list[str]) -> None:
        for row in rows:
            if self.results.is_done(row):
                continue
            if why := self.why_not(row):
                told.append(f"{row.name}: {why}")
                continue
            self.show(row, self.results.add(row, self._outcome(row)))

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

    def _outcome(self, row: Row) -> dict[str, Any]:
        """What a row's process wrote, and how it ended."""
        began = time.monotonic()
        patience = max(LEAST_S, TOO_LONG * self.results.estimate_s(row))
        timeout = max(1.0, min(self.left_s(), patience))
        with tempfile.TemporaryDirectory(prefix="ingot-gpu-") as name:
            into, said = Path(name) / "row.jsonl", Path(name) / "said.txt"
            code = self._start(row, into, said, timeout)
            lines = read(into) if into.exists() else []
            words = said.read_text(encoding="utf-8", errors="replace")
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

    def _start(self, row: Row, into: Path, said: Path, timeout: float) -> int | None:
        """The exit code; None if it was ended, with all that it had started."""
        arguments = [row.name, "--device", self.device, "--into", str(into)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
            ),
            "PYTHONUNBUFFERED": "1",
            "BENCHMARK_DEVICE": self.planned,
            # Its own: a row that is ended leaves half a file behind, and later ones would fail.
            "TORCHINDUCTOR_CACHE_DIR": str(into.parent / "inductor"),
        }
        with said.open("wb") as stream:
            child = subprocess.Popen(
                [*self.command, *arguments, *(["--tiny"] if self.tiny else [])],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=preexec_die_with_parent(),
            )
            try:
                return child.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


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
