"""Requests to stop: signals, and notices that this machine will be taken away.

While steps are done a request is only noted, and the loop ends at the next boundary. Where nothing
is at stake (loading, exporting) it is
followed at once. A second one leaves at once, wherever it comes. A small process watches that the
first is followed in time: it does not depend on this one's interpreter, which may be stuck in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ingot.base.errors import Stopped
from ingot.base.progress import say

# Ctrl-C reaches a process from the terminal and again from its launcher: both are one request.
SAME_REQUEST_S = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STACKS = signal.SIGUSR2
"""Asks a rank to write down where all its threads are."""

# Reads the numbers of signals that have come to its parent, and ends when its parent does.
_WATCHDOG = """
import os, select, signal, sys, time
parent, grace, asking, stacks = int(sys.argv[1]), float(sys.argv[2]), set(map(int, sys.argv[3].split(","))), int(sys.argv[4])
[signal.signal(number, signal.SIG_IGN) for number in asking]  # Slurm and service managers send them to all processes of a job
end = None
while True:
    left = None if end is None else max(end - time.monotonic(), 0)
    if select.select([0], [], [], left)[0]:
        numbers = os.read(0, 64)
        if not numbers:
            sys.exit()
        if end is None and asking & set(numbers):
            end = time.monotonic() + grace
    elif end is not None and time.monotonic() >= end:
        sys.stderr.write(f"process {parent} did not follow the signal within {grace:g} s (checkpoint.grace_s) and is killed\\n")
        sys.stderr.flush()
        os.kill(parent, stacks)
        time.sleep(0.5)
        os.kill(parent, signal.SIGKILL)
        sys.exit()
"""


@contextlib.contextmanager
def stacks_on_demand(logs: Path, rank: int) -> Iterator[None]:
    """While entered, `STACKS` makes this process append the stacks of its threads to
    `stacks-rankN.txt`, even if it is stuck in C.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"stacks-rank{rank}.txt").open("a") as file:
        faulthandler.register(STACKS, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS)


class Leave(BaseException):
    """Training is left at once, from wherever it is, with a checkpoint committed (its step) or
    none. Not an Exception, so that nothing on the way takes it for a failure.
    """

    def __init__(self, signum: int, committed: int | None) -> None:
        super().__init__(signum, committed)
        self.signum, self.committed = signum, committed


class StopSignals:
    """While entered, SIGTERM, SIGINT and SIGUSR1 ask to stop; `signum` is the first that came, 0
    while none has.

    When a stop was followed they stay without effect: the process is about to end with the exit
    code that says so, and another rank, or whoever hands the request to each node, may have been
    quicker than the signal.
    """

    def __init__(self, grace_s: float) -> None:
        self.signum, self._since, self._grace_s = 0, 0.0, grace_s
        self._leaving, self._followed = True, False
        self._committed: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        arguments = [
            str(os.getpid()),
            str(self._grace_s),
            ",".join(str(int(number)) for number in SIGNALS),
            str(int(STACKS)),
        ]
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG, *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._watchdog.stdin is not None
        told = self._watchdog.stdin.fileno()
        os.set_blocking(told, False)
        # The number goes to the watchdog from within the handler in C, before the interpreter comes
        # to hear of it.
        self._fd_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def leave_at_once(self, committed: int | None) -> None:
        """From here on there is nothing to save beyond the checkpoint `committed`: a signal raises
        Leave, also one that has come already.
        """
        self._leaving, self._committed = True, committed
        if self.signum:
            raise Leave(self.signum, committed)

    def leave_between_steps(self) -> None:
        """From here on a signal is only noted in `signum`."""
        self._leaving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._followed:
            return
        if self.signum and time.monotonic() - self._since > SAME_REQUEST_S:
            # Whatever is half-written has no marker, so leaving now loses only what was not
            # committed.
            os._exit(128 + number)
        if self.signum:
            return
        self.signum, self._since = number, time.monotonic()
        if self._leaving:
            raise Leave(number, self._committed)
        say(
            f"{signal.Signals(number).name}: stopping after this step; send it again to leave at"
            " once"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._followed = kind is not None and issubclass(kind, (Leave, Stopped))
        for number, handler in self._before.items() if not self._followed else ():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
