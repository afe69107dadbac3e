"""Local processes, connected by gloo, that run one function after another on all ranks, so that
torch starts only once.

Not a pool: all ranks run each call, and one that fails or hangs ends them all, since the others
wait for it. The next call starts new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ingot.base.errors import Failed
from ingot.base.forkserver import start_fork_server
from ingot.base.processes import without_main_module
from ingot.serve.http.listen import LOOPBACK, kept_port

P = ParamSpec("P")
T = TypeVar("T")
REPORT_GRACE_S = 3.0
"""How long the other ranks may take to report after one has failed."""
HANG_SLACK_S = 15.0
"""A rank that hangs dumps its stack and exits by itself; after this additional time it is
killed.
"""
MAX_FRAMES = 5
"""The number of stack frames in an error message."""


class RankFailed(Failed):
    """A call did not complete on every rank. `trace` is the traceback of the first rank that
    failed, with a line for each other one.
    """

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message)
        self.trace = trace
        self.add_note(trace)


class LayoutProcesses:
    """`world` ranks, started at the first call.

    Args:
        preload: modules that the calls need; imported once, in the process that all ranks are
            forked from.
    """

    def __init__(self, world: int, preload: Sequence[str] = ("torch", "torch.distributed")) -> None:
        self.world, self._preload = world, tuple(preload)
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> list[T]:
        """Call `function(*arguments)` on every rank (a module-level function, picklable arguments);
        returns the results in rank order.
        """
        return self.run_named(function.__name__, 60.0, function, *arguments, **named)

    def run_named(
        self,
        what: str,
        timeout_s: float,
        function: Callable[P, T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[T]:
        """The same with a name for messages and a limit of `timeout_s` seconds.

        Raises:
            RankFailed: a rank raised, died, or was not done in time; names `what` and the rank, and
                holds its stack.
        """
        if not self._processes:
            self._start()
        call = pickle.dumps((timeout_s, function, arguments, named))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers: dict[int, Any] = {}
        try:
            self._listen(what, timeout_s, answers)
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(self.world)]

    def _listen(self, what: str, timeout_s: float, answers: dict[int, Any]) -> None:
        deadline, failed = time.monotonic() + timeout_s + HANG_SLACK_S, dict[int, str]()
        silent = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while silent and time.monotonic() < deadline:
            for ready in wait(list(silent), timeout=0.5):
                assert isinstance(ready, Connection)
                rank = silent.pop(ready)
                try:
                    done, value = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionError):
                    done, value = False, self._last_words(rank)
                if done:
                    answers[rank] = value
                    continue
                if not failed:
                    deadline = min(deadline, time.monotonic() + REPORT_GRACE_S)
                failed[rank] = value
        if not failed:
            failed = {rank: self._last_words(rank) for rank in silent.values()}
        if failed:
            error_lines = [
                f"rank {rank} of {self.world} {_failure_line(trace, timeout_s)}"
                for rank, trace in failed.items()
            ]
            raise RankFailed(
                f"{what}: {error_lines[0]}",
                "\n".join([next(iter(failed.values())), *error_lines[1:]]),
            )

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ingot-ranks-")
        context, port = multiprocessing.get_context("forkserver"), kept_port(LOOPBACK)
        start_fork_server(*self._preload)
        with without_main_module():
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world, port, theirs, str(self._stack(rank))),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def _stack(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"rank-{rank}.txt"

    def _last_words(self, rank: int) -> str:
        """The dumped stack of a rank that ended without an answer."""
        with contextlib.suppress(OSError):
            if text := self._stack(rank).read_text(encoding="utf-8", errors="replace"):
                return text
        return "the process died, perhaps for want of memory"

    def close(self) -> None:
        """End the processes. A later call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _failure_line(trace: str, timeout_s: float) -> str:
    """One line on why a rank gave no result: the last line of a traceback, or the innermost frames
    where it hung.
    """
    if not trace.startswith("Timeout"):
        return f"failed: {trace.strip().splitlines()[-1]}"
    # faulthandler prints the calling thread last.
    frames = [
        line.strip() for line in trace.rpartition("Thread ")[2].splitlines()[1 : 1 + MAX_FRAMES]
    ]
    return f"was not done in {timeout_s:g} s; it stood in {' < '.join(frames)}"


def _serve(rank: int, world: int, port: int, pipe: Connection, stack: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    warnings.simplefilter("ignore")  # every rank would print them
    # The fork server read the environment before it was changed.
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    with Path(stack).open("w", encoding="utf-8") as file:
        while True:
            try:
                call = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                # Exit without cleaning up: gloo's threads would be waited for.
                os._exit(0)
            try:
                timeout_s, function, arguments, named = pickle.loads(call)
                faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)
                # Pickled to bytes: tensors sent directly would be in shared memory that ends with
                # this process.
                answer = pickle.dumps((True, function(*arguments, **named)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)
