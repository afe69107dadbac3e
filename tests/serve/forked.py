"""`ingot` commands in forks of a process that has imported what serving needs: the seconds that
torch takes to import are paid once for all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ingot.base.processes import die_with_parent
from ingot.cli.app import main
from ingot.cli.model import serve_model
from ingot.serve import server as run
from ingot.serve.engines import child

DEADLINE_S = 90.0
IMPORTED = (serve_model, run)  # what the command line imports only where it is needed


@dataclass
class Process:
    """One command that runs. `code` is known once it has ended."""

    pid: int
    code: int | None
    _pipe: Connection

    def poll(self, timeout_s: float = 0.0) -> int | None:
        if self.code is None and self._pipe.poll(timeout_s):
            self.code = self._pipe.recv()
        return self.code

    def wait(self) -> int:
        code = self.poll(DEADLINE_S)
        assert code is not None, f"process {self.pid} did not end in {DEADLINE_S:g} s"
        return code

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """Starts commands, one at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextlib.contextmanager
    def running(
        self,
        arguments: list[str],
        environment: dict[str, str],
        log: Path,
        grace_s: float = child.GRACE_S,
    ) -> Iterator[Process]:
        """`ingot ARGUMENTS` with its stderr in `log`, killed at the end of the block. `grace_s`:
        what an engine gets to end in.
        """
        log.touch()
        self._pipe.send((arguments, environment, log, grace_s))
        process = Process(self._pipe.recv(), None, self._pipe)
        try:
            yield process
        finally:
            process.send(signal.SIGKILL)
            process.wait()


def wait_until(true: Callable[[], object], what: object = "") -> None:
    until = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@contextlib.contextmanager
def forks() -> Iterator[Forks]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Forks(ours)
    finally:
        ours.close()
        process.join(DEADLINE_S)


def _serve(pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            return
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(me)
            _be(*command)
        pipe.send(pid)
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _be(arguments: list[str], environment: dict[str, str], log: Path, grace_s: float) -> None:
    """Never returns: what would run at exit belongs to the process that was forked."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_TRUNC), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv, child.GRACE_S = ["ingot", *arguments], grace_s
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)
