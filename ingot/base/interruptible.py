"""Calls of native code that a signal can interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
LOOK_EVERY_S = 0.1


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
