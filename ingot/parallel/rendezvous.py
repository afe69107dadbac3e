"""How the processes of a job find each other: torch's rendezvous by torchrun's variables, which
hears no signal while it waits for a rank, made one that can be left.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from ingot.base.environment import AS_ONE_PROCESS, Ranks
from ingot.base.progress import say

TELL_S = 10.0
"""How long a rank waits for the others before it says so."""


def meet(here: Ranks, timeout: timedelta) -> dist.Store:
    """Wait until all ranks are there; the store through which they form the process group.

    Waiting is left to a thread: a signal that comes meanwhile is handled by this one, and its
    handler may raise.
    """
    met: Future[dist.Store] = Future()
    waiting = threading.Thread(target=_wait, args=(here, timeout, met), name="meet", daemon=True)
    waiting.start()
    waiting.join(TELL_S)
    if not met.done():
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        say(
            f"rank {here.rank} of {here.world} waits for the others at {at}; if it should be alone,"
            f" {AS_ONE_PROCESS}"
        )
    waiting.join()  # no thread is left behind, as what follows may fork
    return met.result()


def _wait(here: Ranks, timeout: timedelta, met: Future[dist.Store]) -> None:
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        # Ranks that have found the first one would form the group at once, and wait there, deaf,
        # for those that have not.
        arrived = dist.PrefixStore("arrived", store)
        if arrived.add("ranks", 1) == here.world:
            arrived.set("all", "")
        arrived.wait(["all"])
        met.set_result(dist.PrefixStore("default_pg", store))  # the prefix that torch itself gives
    except BaseException as error:  # whatever it is, it is for the one who waits
        met.set_exception(error)
