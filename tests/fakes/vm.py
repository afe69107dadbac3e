"""A machine of Google Cloud that really runs: its start-up script, by bash, with stand-ins for what
a machine has (metadata, Docker, curl).

It has a folder of its own and nothing else; what it shares with others is the bucket. Docker's
stand-in runs the container's command here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-machine"
TOOLS = (
    "curl",
    "docker",
    "docker-credential-gcr",
    "sleep",
    "shutdown",
    "mount",
    "cos-extensions",
    "iptables",
    "timeout",
)


class Machine:
    """Runs from now on. `folder` becomes its disk; `calls` are the tools that it called, with their
    arguments.
    """

    def __init__(self, name: str, metadata: Mapping[str, str], folder: Path) -> None:
        self.name, self.folder, bin = name, folder, folder / "bin"
        bin.mkdir(parents=True)  # the folder may be there, and hold what the tools are told by it
        (folder / "work").mkdir()
        for tool in TOOLS:
            (bin / tool).write_text(
                f'#!/bin/bash\nexec {sys.executable} -m tests.fakes.vmtools {tool} "$@"\n'
            )
            (bin / tool).chmod(0o755)
        script = metadata["startup-script"].replace("HOME=/var/lib/ingot", f"HOME={folder}/home")
        (folder / "startup.sh").write_text(script)
        (folder / "about.json").write_text(
            json.dumps({"name": name, "attributes": dict(metadata), "token": TOKEN})
        )
        environ = {
            **os.environ,
            "PATH": f"{bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(PROJECT),
            "VM_FOLDER": str(folder),
        }
        self._log = (folder / "serial.txt").open("wb")
        self.process = subprocess.Popen(
            ["bash", str(folder / "startup.sh")],
            env=environ,
            cwd=folder / "work",
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def serial(self) -> str:
        return (self.folder / "serial.txt").read_text(errors="replace")

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pull_the_plug(self) -> None:
        """It is gone at once, with all that runs on it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [top := psutil.Process(self.process.pid), *top.children(recursive=True)]
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(30)
        self._log.close()
