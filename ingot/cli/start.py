"""Where `ingot` begins: sees to streams that are closed, and listens to signals before it imports
the verbs, which takes a third of a second, in which Ctrl-C is likely.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from ingot.base.progress import open_closed_streams


def main() -> None:
    """Run the command line; stopped before that has its own handlers, end as it would."""
    open_closed_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    from ingot.base.processes import hear_of_children
    from ingot.cli.app import main as run

    hear_of_children()
    run()


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
