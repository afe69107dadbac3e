"""torchrun with the exit codes of its ranks: a process of its own, `python -m ingot.launch.elastic OPTIONS -m ingot VERB ...`.

torchrun itself ends with 1 and two tracebacks whatever its ranks said, and leaves its ranks behind when it is killed. Here
a signal is handed to every rank, the first rank that fails decides the exit code, and one line says which it was.
The options are torchrun's. torch is imported only when this runs, never by importing it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

import psutil

from ingot.base.progress import say

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    for number in HANDED_ON:
        signal.signal(number, _hand_on)
    from torch.distributed import run as module
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torchrun would answer signals by ending its ranks in 30 seconds, and with a traceback: leave it one nobody sends.
    torchrun: Any = module
    options = torchrun.parse_args(["--signals-to-handle=SIGUSR2", *sys.argv[1:]])
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            code = 128 - code
            say(f"rank {rank} was ended by signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})")
        sys.exit(code)


def _hand_on(number: int, frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    if not ranks:
        os._exit(128 + number)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(rank.pid, number)


if __name__ == "__main__":
    main()
