"""This machine: in the foreground for `ingot run`, or detached with a handle that finds the job again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from ingot.base.errors import EXIT_DONE, EXIT_STOPPED, Failed, WrongInput
from ingot.base.processes import started_at, tied_to_me
from ingot.base.progress import say
from ingot.base.storage import write_atomic
from ingot.launch.job import Handle, Job, State

KIND = "local"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(job: Job) -> list[str]:
    """The command line of a job on one node: `python -m ingot ...`, through torchrun where it has several processes."""
    if job.processes == 1:
        return [sys.executable, "-m", "ingot", *job.argv]
    # The address is given, so that a machine whose own name does not resolve can still run two processes.
    torchrun = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={job.processes}", "--max-restarts=0"]
    return [sys.executable, "-m", "ingot.launch.elastic", *torchrun, "-m", "ingot", *job.argv]


def environment(job: Job) -> dict[str, str]:
    """What is added to this process's environment. The cores are shared out, which torchrun would not do."""
    added = dict(job.environment)
    if job.processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        added.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.processes)))
    return added


@dataclass(frozen=True)
class Ended:
    """How a foreground job ended: its exit code (128 + signal where one killed it), and the signal that we were asked to stop by, or 0."""

    code: int
    signum: int


def foreground(job: Job, *, results: TextIO | None = None) -> Ended:
    """Run `job` and wait. Its messages go to our stderr, and so do its results unless `results` says where to.

    SIGINT, SIGTERM and SIGHUP are handed on and waited for; the second one kills. The job has a process group of its
    own, so that Ctrl-C reaches it once (from here) and not twice; when we are killed, the kernel ends it.
    """
    if reasons := LocalLauncher(Path()).can(job):
        raise WrongInput(f"{job.name} cannot run here: {'; '.join(reasons)}")
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(_translated(number) if len(received) == 1 else signal.SIGKILL)

    with _handling(hand_on):
        child = subprocess.Popen(
            command(job), env={**os.environ, **environment(job)}, stdin=subprocess.DEVNULL, stdout=(results or sys.stderr).fileno(),
            process_group=0, preexec_fn=tied_to_me(),
        )
        if received:
            child.send_signal(_translated(received[0]))
        code = child.wait()
    return Ended(128 - code if code < 0 else code, received[0] if received else 0)


def _translated(number: int) -> int:
    """A closed terminal is a request to stop in good order."""
    return signal.SIGTERM if number == signal.SIGHUP else number


@contextlib.contextmanager
def _handling(handler: signal._HANDLER) -> Iterator[None]:
    # What was ignored stays so: `nohup ingot run` goes on when the terminal is closed.
    heard = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class LocalLauncher:
    """Jobs as detached processes of this machine. `folder` is the run folder: handles in `jobs/`, output in `logs/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def can(self, job: Job) -> list[str]:
        reasons = []
        if job.nodes != 1:
            reasons.append(f"{job.nodes} nodes are asked for and this machine is one")
        if job.image is not None:
            reasons.append(f"image {job.image} is asked for and the local launcher runs the installed ingot")
        return reasons

    def render(self, job: Job) -> str:
        """A shell script that runs the job and notes its exit code; secrets come from the environment and are not in it."""
        lines = ["#!/bin/sh", f"# {job.name}", f"cd {shlex.quote(str(Path.cwd()))}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment(job).items()) if name not in job.secrets]
        limit = ["timeout", "--foreground", "--signal=TERM", "--kill-after=60", f"{job.time_limit_s:g}"] if job.time_limit_s else []
        exit_file = shlex.quote(str(self._path(job.name, "jobs", "exit").absolute()))
        # The shell hands signals on and outlives the job, so that the job's own exit code is noted.
        lines += [
            f"{shlex.join([*limit, *command(job)])} &", "job=$!", 'trap "kill -TERM $job" INT TERM HUP', "wait $job", "code=$?",
            "while kill -0 $job 2>/dev/null; do wait $job; code=$?; done",
            f"echo $code > {exit_file}.partial && mv {exit_file}.partial {exit_file}",
        ]
        return "\n".join(lines) + "\n"

    def submit(self, job: Job) -> Handle:
        """Start `job` detached from this terminal.

        Raises:
            WrongInput: it cannot run here.
            Failed: a job of this name is running already.
        """
        if reasons := self.can(job):
            raise WrongInput(f"{job.name} cannot run here: {'; '.join(reasons)}")
        if (old := self.find(job.name)) is not None and self.status(old) == "running":
            raise Failed(f"{job.name} is running already (process {old.id}); cancel it, or wait for it")
        for ending in ("exit", "cancelled"):
            self._path(job.name, "jobs", ending).unlink(missing_ok=True)
        log, script = self._path(job.name, "logs", "log"), self._path(job.name, "jobs", "sh")
        log.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(script, self.render(job))
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["sh", str(script)], env={**os.environ, **job.environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        handle = Handle(job.name, KIND, str(process.pid), job.argv, started_at(process.pid) or time.time(), str(log))
        write_atomic(self._path(job.name, "jobs", "json"), handle.to_json())
        return handle

    def find(self, name: str) -> Handle | None:
        """The handle of the job that was last submitted under `name`."""
        try:
            return Handle.from_json(self._path(name, "jobs", "json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def status(self, handle: Handle) -> State:
        code = self._exit_code(handle)
        if code is None and self._alive(handle):
            return "running"
        if code == EXIT_DONE:
            return "succeeded"
        if self._path(handle.name, "jobs", "cancelled").exists():
            return "cancelled"
        if code is None:
            return "unknown"
        return "preempted" if code == EXIT_STOPPED else "failed"

    def logs(self, handle: Handle) -> Path:
        return Path(handle.log)

    def cancel(self, handle: Handle, *, grace_s: float = 60.0) -> None:
        """Ask the job to stop, wait for it, and end it after `grace_s` seconds."""
        if not self._alive(handle):
            return
        self._path(handle.name, "jobs", "cancelled").touch()
        os.kill(int(handle.id), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._alive(handle):
            if time.monotonic() > deadline:
                say(f"{handle.name} did not stop in {grace_s:g} s and is killed")
                os.killpg(int(handle.id), signal.SIGKILL)
                return
            time.sleep(0.05)

    def _path(self, name: str, folder: str, ending: str) -> Path:
        return self.folder / folder / f"{name}.{ending}"

    def _exit_code(self, handle: Handle) -> int | None:
        try:
            return int(self._path(handle.name, "jobs", "exit").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _alive(self, handle: Handle) -> bool:
        began = started_at(int(handle.id))
        return began is not None and abs(began - handle.started) < 2.0
