"""Runs `ingot ...` as a person would: in a process forked by tests/forks.py, or, where it matters
how an interpreter starts and ends, in a new one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import forks
from tests.patience import PATIENCE_S


def ingot(
    *arguments: str, cwd: Path | None = None, timeout_s: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The finished command, with what it printed. `environment` is added to this process's, without
    its knobs.
    """
    variables = clean_environment(**environment)
    if not forks.can_fork(variables):
        return ingot_afresh(*arguments, cwd=cwd, timeout_s=timeout_s, **environment)
    # Files and not pipes: processes that the command leaves behind would hold a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = forks.start(arguments, cwd=cwd, env=variables, stdout=out, stderr=err)
        try:
            process.wait(timeout_s)
        finally:
            process.kill()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read())
    return subprocess.CompletedProcess(command(*arguments), process.wait(), *texts)


def start_ingot(
    *arguments: str,
    cwd: Path | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
    **environment: str,
) -> forks.Process:
    """The command while it runs, much as subprocess.Popen gives it."""
    return forks.start(
        arguments,
        cwd=cwd,
        env=clean_environment(**environment),
        stdout=stdout,
        stderr=stderr,
        start_new_session=start_new_session,
    )


def ingot_afresh(
    *arguments: str, cwd: Path | None = None, timeout_s: float = PATIENCE_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """As `ingot`, in a new interpreter."""
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
