"""`python -m ingot.launch.limit SECONDS COMMAND ...`: a command that is asked to end when its time
is over, and killed if it does not; as by GNU's `timeout`, which macOS lacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from ingot.base.processes import hear_of_children
from ingot.launch.attempt import STOP_SIGNALS

KILL_AFTER_S = 60.0
"""How long the command may take to end when it is asked to."""
MAX_S = 1e8
"""Three years: macOS takes no longer timer."""
OVER_TIME = 124
"""The exit code of a command that was asked to end, whatever its own is."""


class LimitedCommand:
    """Hands requests to stop that this process gets on to the command. At the time limit it ends
    the whole process group if this process leads it (a session of its own), else the command alone.
    """

    def __init__(self, command: Sequence[str], limit_s: float) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: list[int] = []
        self._is_late = False
        hear_of_children()
        for each in (*STOP_SIGNALS, signal.SIGALRM):
            signal.signal(each, self._hand_on)
        self._process = subprocess.Popen(command)
        for number in self._asked:  # while it was being started
            self._hand_on(number, None)
        signal.setitimer(signal.ITIMER_REAL, min(limit_s, MAX_S), KILL_AFTER_S)

    def wait(self) -> int:
        """The exit code as a shell reports it, or OVER_TIME."""
        assert self._process is not None
        code = self._process.wait()
        return OVER_TIME if self._is_late else 128 - code if code < 0 else code

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is None:
            self._asked.append(number)
        elif number == signal.SIGALRM:
            self._end(self._process)
        else:
            self._process.send_signal(number)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Once its time is over, and again each time that it has had to end."""
        request, self._is_late = signal.SIGKILL if self._is_late else signal.SIGTERM, True
        if os.getpgrp() != os.getpid():
            process.send_signal(request)
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group's other processes are to end
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(0, request)


if __name__ == "__main__":
    sys.exit(LimitedCommand(sys.argv[2:], float(sys.argv[1])).wait())
