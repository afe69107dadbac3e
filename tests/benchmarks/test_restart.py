"""The benchmark of restarts runs: one kill, one process."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_one_kill() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.restart", "--rounds", "1", "--processes", "1"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert re.fullmatch(r"1 process: \d+\.\d s \(.*\)\n", found.stdout)
