"""Signals ask the loop to stop at the next step boundary; a second one leaves at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Any

from ingot.base.progress import say

# Ctrl-C reaches a process from the terminal and again from its launcher: both are one request.
SAME_REQUEST_S = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """While entered, SIGTERM, SIGINT and SIGUSR1 are only noted; `signum` is the first that came, 0 while none has."""

    def __init__(self) -> None:
        self.signum, self._since = 0, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signum and time.monotonic() - self._since > SAME_REQUEST_S:
            # Whatever is half-written has no marker, so leaving now loses only what was not committed.
            os._exit(128 + number)
        if self.signum:
            return
        self.signum, self._since = number, time.monotonic()
        say(f"{signal.Signals(number).name}: stopping after this step; send it again to leave at once")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
