"""A process that does one row: it is begun while another works, so that the device does not wait
for imports. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import ROOT, read
from benchmarks.gpu.rows import Row
from ingot.base.processes import preexec_die_with_parent


class RowProcess:
    """Runs `command`, which takes its row from a line of JSON. It dies with the thread that made
    it: to the kernel, a thread is the parent.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ingot-gpu-")
        here = Path(self._folder.name)
        self._into, self._said, self._cache = (
            here / name for name in ("row.jsonl", "said.txt", "compiled")
        )
        with self._said.open("wb") as stream:
            self._child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=preexec_die_with_parent(),
            )

    def do(self, row: Row, timeout: float, cache: Path | None) -> int | None:
        """The exit code; None if it was ended, with all that it had started. `cache`: of compiled
        kernels; None for one of its own.
        """
        given = {"row": row.name, "into": str(self._into), "cache": str(cache or self._cache)}
        try:
            self._child.communicate(json.dumps(given).encode() + b"\n", timeout)
            return self._child.returncode
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    @property
    def lines(self) -> list[dict[str, Any]]:
        """What it wrote down."""
        return read(self._into) if self._into.exists() else []

    @property
    def words(self) -> str:
        """What it said."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def close(self) -> None:
        self.end()
        self._folder.cleanup()
