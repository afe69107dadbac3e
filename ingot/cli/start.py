"""Where `ingot` begins: sees to streams that are closed, and listens to signals before it imports
the verbs, which takes a third of a second, in which Ctrl-C is likely.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line; stopped before that has its own handlers, end as it would."""
    open_closed_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    from ingot.cli.app import main as run

    run()


def open_closed_streams() -> None:
    """Give what was started without stdin, stdout or stderr (`>&-`) an empty one: there would be
    nothing to flush, and the next file that is opened would get its number, and what is meant for
    the stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: `number`
            os.set_inheritable(descriptor, True)
            # Open to the end, also where another stream takes its place.
            mode = "w" if number else "r"
            stream = os.fdopen(
                descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False
            )
            setattr(sys, name, stream)


def _stop(number: int, frame: FrameType | None) -> None:
    """Say in a line what stopped this process, as `guarded` does, and leave: half-imported modules
    have nothing to clean up, and may not survive an exception.
    """
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"rank {rank}: "
    try:
        os.write(2, f"{who}stopped by {signal.Signals(number).name}\n".encode())
    finally:
        os._exit(128 + number)
