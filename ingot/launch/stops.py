"""Requests to stop, noted by whoever waits for a job's ranks and handed on to them."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

# A terminal, a launcher and a service manager may all tell of one request, each with a signal of
# its own.
SAME_REQUEST_S = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stops:
    """While entered, SIGINT, SIGTERM, SIGHUP and SIGUSR1 are only noted: `first` is the one that
    came first (0: none), `again` that another followed.
    """

    def __init__(self) -> None:
        self.first, self.again = 0, False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stops:
        for number in SIGNALS:
            # What was ignored stays so: `nohup ingot run` goes on when the terminal is closed.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.first:
            self.first, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > SAME_REQUEST_S:
            self.again = True

    @property
    def asked(self) -> int:
        """What the ranks are told: a closed terminal is a request to stop in good order."""
        return signal.SIGTERM if self.first == signal.SIGHUP else self.first

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
