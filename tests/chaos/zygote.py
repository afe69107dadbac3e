"""A process that has imported everything and forks children from itself: what each fault costs is
the fault, not starting torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

Ready = Callable[[Path], Callable[[], Any]]
"""Builds what an action needs in a folder, and returns what does it."""
PATIENCE_S = 60.0
PRELOADED = ("torch._dynamo", "ingot.checkpoints.writer")
"""What a training imports when it comes to it, and the children need not import each."""
_SUBREAPER = 36


class Child:
    """One fork of the zygote: it has built what it needs, and waits for `go`."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe, self.pid = pipe, pid

    def go(self) -> None:
        self._pipe.send("go")

    @property
    def has_ended(self) -> bool:
        """That it has something to say, or is gone."""
        return self._pipe.poll()

    def end(self) -> tuple[int, Any]:
        """(status as of os.waitpid, what the action returned or None). Waits for every process that
        the child started, too.
        """
        said = None
        while True:
            if not self._pipe.poll(PATIENCE_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(
                    f"process {self.pid} neither ended nor said anything in {PATIENCE_S:g} s"
                )
            kind, value = self._pipe.recv()
            if kind == "ended":
                return value, said
            said = value


class Zygote:
    """Forks children, one at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def fork(self, ready: Ready, folder: Path) -> Child:
        self._pipe.send((ready, folder))
        kind, value = self._pipe.recv() if self._pipe.poll(PATIENCE_S) else ("silent", None)
        if kind != "ready":
            raise AssertionError(f"a child did not become ready for {ready}: {kind} {value}")
        return Child(self._pipe, value)

    def run(self, ready: Ready, folder: Path) -> Any:
        """What the action returns in a process of its own, undisturbed."""
        child = self.fork(ready, folder)
        child.go()
        status, said = child.end()
        assert status == 0, f"the undisturbed action ended with status {status}: {said}"
        return said


@contextlib.contextmanager
def zygote() -> Iterator[Zygote]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield Zygote(ours)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Processes whose parent was killed become ours, so that we can wait for them.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    while True:
        try:
            ready, folder = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        pid = os.fork()
        if pid == 0:
            _be_child(pipe, ready, folder)
        status = os.waitpid(pid, 0)[1]
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(("ended", status))


def _be_child(pipe: Connection, ready: Ready, folder: Path) -> None:
    """Never returns: everything that would run at exit belongs to the zygote."""
    sys.stderr = (
        io.StringIO()
    )  # progress tells nothing here, and its number of writes depends on the clock
    try:
        act = ready(folder)
        pipe.send(("ready", os.getpid()))
        pipe.recv()
        pipe.send(("result", act()))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        os._exit(1)
    os._exit(0)
