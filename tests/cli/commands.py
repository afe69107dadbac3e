"""Runs `python -m ingot ...` as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def ingot(
    *arguments: str, cwd: Path | None = None, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished command, with what it printed. `environment` is added to this process's, without
    its knobs.
    """
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ingot", *arguments]


def clean_environment(**more: str) -> dict[str, str]:
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("INGOT_", "AIP_"))
        },
        **more,
    }
