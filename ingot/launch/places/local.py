"""This machine: in the foreground, as for `ingot run`, or detached with a handle that finds the job
again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ingot.base.errors import EXIT_DONE, EXIT_STOPPED, EXIT_WRONG_INPUT, Failed, WrongInput
from ingot.base.processes import machine_id, own_python, start_ticks
from ingot.base.progress import say
from ingot.base.runfolder import folder_lock
from ingot.base.storage import write_atomic
from ingot.launch.attempt import NON_FAILURE_CODES, StopRequests, follow
from ingot.launch.job import Handle, Job, JobState
from ingot.launch.node.ranks import LocalRanks, environment, rank_command

KIND = "local"


def command(job: Job) -> list[str]:
    """The command line of a job on one node: `python -m ingot ...`, or the starter of several ranks
    if the job has several processes.
    """
    return (
        rank_command(job)
        if job.processes == 1
        else [*own_python(), "-m", "ingot.launch", str(job.processes), *job.argv]
    )


def limited(limit_s: float) -> list[str]:
    """What stands before a command to limit its time."""
    return [*own_python(), "-m", "ingot.launch.limit", f"{limit_s:.15g}"]


@dataclass(frozen=True)
class JobExit:
    """How a job ended: its exit code (128 + signal if one killed it), and the signal by which we
    were asked to stop, or 0.
    """

    code: int
    signum: int


def foreground(job: Job, *, results: TextIO | None = None) -> JobExit:
    """Run `job` once and wait. Its messages go to our stderr, and so do its results unless
    `results` is given.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 are forwarded and waited for; a second one after a while
    kills the job. If this process is killed, the kernel kills the job.
    """
    if reasons := LocalLauncher(Path()).can(job):
        raise WrongInput(f"{job.name} cannot run here: {'; '.join(reasons)}")
    with StopRequests() as stops:
        end = follow(LocalRanks(job, results=results), stops)
    # Each rank explains an exit code of 2 itself; any other failure is reported once, for the rank
    # that failed first.
    unexplained = end.code not in (*NON_FAILURE_CODES, EXIT_WRONG_INPUT)
    if job.processes > 1 and not stops.first and unexplained:
        say(f"{end.describe()} and the others were ended")
    return JobExit(end.shell_code, stops.first)


class LocalLauncher:
    """Jobs as detached processes of this machine. `folder` is the run folder: handles in `jobs/`,
    output in `logs/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def can(self, job: Job) -> list[str]:
        """See `Launcher`."""
        reasons = []
        if job.nodes != 1:
            reasons.append(f"{job.nodes} nodes are asked for and this machine is one")
        if job.image is not None:
            reasons.append(
                f"image {job.image} is asked for and the local launcher runs the installed ingot"
            )
        return reasons

    def render(self, job: Job) -> str:
        """A shell script that runs the job and writes its exit code to a file; secrets come from
        the environment and are not in it.
        """
        lines = ["#!/bin/sh", f"# {job.name}", f"cd {shlex.quote(str(Path.cwd()))}"]
        lines += [
            f"export {name}={shlex.quote(value)}"
            for name, value in sorted(environment(job).items())
            if name not in job.secrets
        ]
        limit = limited(job.time_limit_s) if job.time_limit_s else []
        exit_file = shlex.quote(str(self._path(job.name, "jobs", "exit").absolute()))
        # The shell forwards signals and outlives the job to write the exit code.
        lines += [
            f"{shlex.join([*limit, *command(job)])} &",
            "job=$!",
            'trap "kill -TERM $job" INT TERM HUP',
            "wait $job",
            "code=$?",
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
        log, script = self._path(job.name, "logs", "log"), self._path(job.name, "jobs", "sh")
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._cleared(job):
            write_atomic(script, self.render(job))
            with log.open("ab") as output:
                process = subprocess.Popen(
                    ["sh", str(script)],
                    env={**os.environ, **job.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            return self._store(job, process.pid, str(log))

    def begin(self, job: Job) -> Handle:
        """A handle for this process, which runs the job itself; it has no log, since its messages
        go to the terminal.

        Raises:
            Failed: a job of this name is running already.
        """
        with self._cleared(job):
            return self._store(job, os.getpid(), "")

    def end(self, handle: Handle, code: int) -> None:
        """Record how a job that this process ran itself has ended."""
        write_atomic(self._path(handle.name, "jobs", "exit"), f"{code}\n")

    @contextlib.contextmanager
    def _cleared(self, job: Job) -> Iterator[None]:
        """Without what an earlier job of this name left, and locked until the new one has its
        handle: of two that start at once one would go on under the handle of the other, where
        nobody finds it.
        """
        with folder_lock(self.folder / "jobs", f"{job.name}.{KIND}.lock"):
            if (earlier := self.find(job.name)) is not None and self.status(earlier) == "running":
                raise Failed(
                    f"{job.name} is running already (process {earlier.id}); cancel it, or wait for"
                    " it"
                )
            for ending in ("exit", "cancelled"):
                self._path(job.name, "jobs", ending).unlink(missing_ok=True)
            yield

    def _store(self, job: Job, process: int, log: str) -> Handle:
        about = {"machine": machine_id() or "", "started": start_ticks(process) or ""}
        handle = Handle(job.name, KIND, str(process), job.argv, time.time(), log, about)
        write_atomic(self._path(job.name, "jobs", "json"), handle.to_json())
        return handle

    def handles(self) -> list[Handle]:
        """The handles of all local jobs started in this run folder, newest first."""
        # VERB.KIND.json is the handle of a job at another place.
        files = (self.folder / "jobs").glob("*.json")
        names = [path.stem for path in files if "." not in path.stem]
        found = [handle for name in names if (handle := self.find(name)) is not None]
        return sorted(found, key=lambda handle: handle.started, reverse=True)

    def find(self, name: str) -> Handle | None:
        """The handle of the job last submitted under `name`."""
        try:
            return Handle.from_json(self._path(name, "jobs", "json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def status(self, handle: Handle) -> JobState:
        """See `Launcher`."""
        code = self._exit_code(handle)
        if code is None and self._is_alive(handle):
            return "running"
        if code == EXIT_DONE:
            return "succeeded"
        if self._path(handle.name, "jobs", "cancelled").exists():
            return "cancelled"
        if code is None:
            return "unknown"
        return "preempted" if code == EXIT_STOPPED else "failed"

    def cancel(self, handle: Handle, *, grace_s: float = 60.0) -> None:
        """Ask the job to stop, wait for it, and kill it after `grace_s` seconds."""
        if not self._is_alive(handle):
            return
        self._path(handle.name, "jobs", "cancelled").touch()
        os.kill(int(handle.id), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._is_alive(handle):
            if time.monotonic() > deadline:
                say(f"{handle.name} did not stop in {grace_s:g} s and is killed")
                self._kill(int(handle.id))
                return
            time.sleep(0.05)

    @staticmethod
    def _kill(process: int) -> None:
        """Kill a process with its process group if it leads one. A job in a terminal does not; the
        kernel then kills its ranks.
        """
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process) == process:
                os.killpg(process, signal.SIGKILL)
            os.kill(process, signal.SIGKILL)

    def _path(self, name: str, folder: str, ending: str) -> Path:
        return self.folder / folder / f"{name}.{ending}"

    def _exit_code(self, handle: Handle) -> int | None:
        try:
            return int(self._path(handle.name, "jobs", "exit").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _is_alive(self, handle: Handle) -> bool:
        """Whether the process that was started still runs on this machine, identified by its start
        in clock ticks since boot: the wall clock may have been changed since.
        """
        return (
            handle.about.get("machine") == (machine_id() or "")
            and start_ticks(int(handle.id)) == handle.about["started"]
        )
