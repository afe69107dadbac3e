"""Where a signal takes effect: also within a call of native code, but not within an import."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")
LOOK_EVERY_S = 0.1
IMPORT_PATIENCE_S, IMPORT_PAUSE_S = 10.0, 0.05
"""How long a signal that comes within an import waits for its end, and how often it looks for it.
"""


class ImportsFirst:
    """For handlers that raise: what is raised within an import may leave the import lock taken, so
    that other threads wait for ever, or be swallowed, as torch does with whatever ends its import
    of numpy.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def put_off(self, number: int, frame: FrameType | None) -> bool:
        """Whether the signal came within an import; then it is delivered again a moment later. An
        import that takes too long is no reason any more.
        """
        began = self._since.setdefault(number, time.monotonic())
        if not _is_importing(frame) or time.monotonic() >= began + IMPORT_PATIENCE_S:
            del self._since[number]
            return False
        again = partial(signal.pthread_kill, threading.main_thread().ident or 0, number)
        later = threading.Timer(IMPORT_PAUSE_S, again)
        later.daemon = True
        later.start()
        return True


def _is_importing(frame: FrameType | None) -> bool:
    """Whether the frame, or one that called it, is Python's import system."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def interruptible(call: Callable[[], Result]) -> Result:
    """What the call returns or raises. Python acts on a signal between two of its own instructions
    in the main thread, which native code may keep it from for minutes: here another thread makes
    the call while the main thread waits. Where a signal's handler raises, the call is left behind,
    and ends with the process (see `ingot.base.errors.leave`).
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    found: list[Result] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="interruptible", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(LOOK_EVERY_S)
    if raised:
        raise raised[0]
    return found[0]
