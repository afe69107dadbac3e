"""A place: processes of this machine that give way to all others (`nice`)."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.processes import start_ticks
from ingot.config.recipe import Recipe
from ingot.launch.job import Handle, Job, JobState


class NicedLauncher:
    """`launch.kind: niced`; `launch.options: {level: 10}` says how much they give way."""

    poll_s = 0.2
    shares_disk = True
    paid_by_use = False

    def __init__(self, recipe: Recipe) -> None:
        self._folder = recipe.folder.root / "jobs"
        self._level = recipe.launch.options.get("level", 10)
        if not isinstance(self._level, int) or not 0 <= self._level <= 19:
            raise WrongInput(f"launch.options.level is {self._level!r}; give a number from 0 to 19")

    def can(self, job: Job) -> list[str]:
        return ["niced runs on this machine alone; set launch.nodes=1"] if job.nodes > 1 else []

    def _command(self, job: Job) -> list[str]:
        return ["nice", "-n", str(self._level), sys.executable, "-m", "ingot", *job.argv]

    def render(self, job: Job) -> str:
        return shlex.join(self._command(job)) + "\n"

    def submit(self, job: Job) -> Handle:
        if reasons := self.can(job):
            raise WrongInput("; ".join(reasons))
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self._folder / f"niced.{job.name}.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                self._command(job), stdout=stream, stderr=stream, start_new_session=True
            )
        about = {"started": start_ticks(process.pid) or ""}
        return Handle(job.name, "niced", str(process.pid), job.argv, time.time(), str(log), about)

    def status(self, handle: Handle) -> JobState:
        alive = start_ticks(int(handle.id)) == handle.about["started"]
        return "running" if alive else "succeeded"

    def log(self, handle: Handle) -> NicedLog:
        return NicedLog(Path(handle.log))

    def signal(self, handle: Handle, number: int) -> None:
        if self.status(handle) == "running":
            os.killpg(int(handle.id), number)

    def cancel(self, handle: Handle) -> None:
        self.signal(handle, signal.SIGKILL)
        while self.status(handle) == "running":
            time.sleep(self.poll_s)


class NicedLog:
    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> bytes:
        """What was added since the last call."""
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            added = stream.read()
        self._at += len(added)
        return added
