"""Requests to stop: signals, and preemption notices that the machine will be reclaimed.

During a step a request is only recorded, and the loop ends at the next step boundary. During
loading and exporting, where nothing can be lost, it takes effect at once. A second request ends the
process anywhere. A watchdog process kills this one if the first request is not honoured within the
grace period; it is separate because this interpreter may be blocked in C code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

from ingot.base.errors import Stopped
from ingot.base.interruptible import ImportsFirst
from ingot.base.progress import say

# Ctrl-C reaches a process from the terminal and again through its launcher; both are one request.
SAME_REQUEST_S = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STACKS = signal.SIGUSR2
"""Makes a rank write the stacks of all its threads."""

# Reads the numbers of the signals that its parent received, and exits when its parent does.
_WATCHDOG = """
import os, select, signal, sys, time
parent, grace, stacks = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[4])
asking = set(map(int, sys.argv[3].split(",")))
for number in asking:  # Slurm and service managers send these to all processes of a job
    signal.signal(number, signal.SIG_IGN)
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
        try:
            sys.stderr.write(
                f"process {parent} did not follow the signal within {grace:g} s"
                " (checkpoint.grace_s) and is killed\\n"
            )
            sys.stderr.flush()
        except OSError:  # nobody reads it any more
            pass
        os.kill(parent, stacks)
        time.sleep(0.5)
        os.kill(parent, signal.SIGKILL)
        sys.exit()
"""


@contextlib.contextmanager
def stacks_on_demand(logs: Path, rank: int) -> Iterator[None]:
    """While entered, the signal `STACKS` makes this process append the stacks of its threads to
    `stacks-rankN.txt`, even while it is blocked in C code.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"stacks-rank{rank}.txt").open("a") as file:
        faulthandler.register(STACKS, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACKS)


class LeaveNow(BaseException):
    """Unwinds training at once from wherever it is; `committed` is the step of the newest
    checkpoint, None without one. Not an Exception, so that no handler mistakes it for a failure.
    """

    def __init__(self, signum: int, committed: int | None) -> None:
        super().__init__(signum, committed)
        self.signum, self.committed = signum, committed


class StopSignals:
    """While entered, SIGTERM, SIGINT, SIGHUP and SIGUSR1 request a stop; `signum` is the first one
    received, 0 until then. SIGHUP, the end of the terminal, stays ignored where it is (`nohup`).

    Once a stop has been honoured the handlers stay installed and ignore further signals: the
    process is about to end with the exit code for it, and the same request may still arrive through
    another rank or the node's launcher.
    """

    def __init__(self, grace_s: float) -> None:
        self.signum, self._since, self._grace_s = 0, 0.0, grace_s
        self._leaving, self._followed = True, False
        self._committed: int | None = None
        self._before: dict[int, Any] = {}
        self._imports = ImportsFirst()

    def __enter__(self) -> StopSignals:
        hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        asking = [number for number in SIGNALS if number != signal.SIGHUP or hears_hangup]
        arguments = [
            str(os.getpid()),
            str(self._grace_s),
            ",".join(str(int(number)) for number in asking),
            str(int(STACKS)),
        ]
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG, *arguments],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._watchdog.stdin is not None
        wakeup_fd = self._watchdog.stdin.fileno()
        os.set_blocking(wakeup_fd, False)
        # The wakeup fd is written by the C-level handler, so the watchdog hears of the signal even
        # if the interpreter never gets to run.
        self._fd_before = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for number in asking:
            self._before[number] = signal.signal(number, self._note)
        return self

    def leave_at_once(self, committed: int | None) -> None:
        """From now on a signal raises LeaveNow, including one that was already received: there is
        nothing to save beyond the checkpoint `committed`.
        """
        self._leaving, self._committed = True, committed
        if self.signum:
            raise LeaveNow(self.signum, committed)

    def leave_between_steps(self) -> None:
        """From now on a signal is only recorded in `signum`."""
        self._leaving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._followed:
            return
        if self._leaving and not self.signum and self._imports.put_off(number, frame):
            return
        if self.signum and time.monotonic() - self._since > SAME_REQUEST_S:
            # A half-written checkpoint has no marker, so exiting now loses only uncommitted work.
            os._exit(128 + number)
        if self.signum:
            return
        self.signum, self._since = number, time.monotonic()
        if self._leaving:
            raise LeaveNow(number, self._committed)
        say(
            f"{signal.Signals(number).name}: stopping after this step; send it again to leave at"
            " once"
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._followed = kind is not None and issubclass(kind, (LeaveNow, Stopped))
        if not self._followed:
            for number, handler in self._before.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()


POLL_S = 1.0
WAIT_S = 60.0
"""Long-poll timeout of the metadata server, and the pause before it is asked again after a failure.
"""
PREEMPTED = "/computeMetadata/v1/instance/preempted"


class PreemptionNotice:
    """While entered, a thread waits for a preemption notice; its own failures never stop a run."""

    def __init__(self, where: str | None) -> None:
        self._where = where
        self._over = threading.Event()

    def __enter__(self) -> PreemptionNotice:
        if self._where is not None:
            threading.Thread(target=self._look, name="notice", daemon=True).start()
        return self

    def _look(self) -> None:
        assert self._where is not None
        comes = (
            _told_by_server
            if self._where == "gce"
            else lambda over: _appears(Path(str(self._where)), over)
        )
        if comes(self._over) and not self._over.is_set():
            say(
                f"notice: this machine will be taken away, as {self._where} says"
                " (checkpoint.notice)"
            )
            os.kill(os.getpid(), signal.SIGTERM)

    def __exit__(self, *_: object) -> None:
        self._over.set()


def _appears(path: Path, over: threading.Event) -> bool:
    """Wait until `path` exists; False if `over` is set first."""
    while not path.exists():
        if over.wait(POLL_S):
            return False
    return True


def _told_by_server(over: threading.Event) -> bool:
    """Wait until Compute Engine's metadata server reports that the machine is being preempted;
    False if `over` is set first. $GCE_METADATA_HOST overrides its address.

    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    """
    url = f"http://{os.environ.get('GCE_METADATA_HOST', 'metadata.google.internal')}{PREEMPTED}"
    straight = urllib.request.build_opener(
        urllib.request.ProxyHandler({})
    )  # the metadata server is local and not reachable through a proxy
    request = urllib.request.Request(
        f"{url}?wait_for_change=true&timeout_sec={int(WAIT_S)}",
        headers={"Metadata-Flavor": "Google"},
    )
    warned = False
    while not over.is_set():
        began = time.monotonic()
        try:
            with straight.open(request, timeout=WAIT_S + 10) as answer:
                if answer.read().strip() == b"TRUE":
                    return True
            failed = ""
        except (OSError, HTTPException) as error:
            failed = str(error) or type(error).__name__
        if failed and not warned:
            warned = True
            say(f"warning: no notices of pre-emption from {url} ({failed}); trying on")
        # Pause even after an immediate answer, so that a server that does not block is not polled
        # in a tight loop.
        over.wait(max(POLL_S - (time.monotonic() - began), WAIT_S if failed else 0.0))
    return False
