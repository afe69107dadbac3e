"""How the ranks of a job find each other before they form their process group."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable
from datetime import timedelta
from functools import partial

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ingot.base.environment import AS_ONE_PROCESS, Ranks
from ingot.base.interruptible import interruptible
from ingot.base.progress import say

TELL_S = 10.0
"""How long a rank waits for the others to come before it says so."""
FIRST = "first"
"""Where the first rank of the newest attempt has written its attempt's name."""


def meet(here: Ranks, timeout: timedelta) -> Store:
    """Wait until all ranks are there, by torchrun's variables, and say so where that takes long.
    Returns the store through which they form the process group.
    """
    at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    message = (
        f"rank {here.rank} of {here.world} waits for the others at {at}; if it should be alone,"
        f" {AS_ONE_PROCESS}"
    )
    late = threading.Timer(TELL_S, say, [message])
    late.daemon = True
    late.start()
    try:
        return interruptible(partial(_met, here, timeout))
    finally:
        late.cancel()
        late.join()  # what follows may fork, which no thread should live to see


def _met(here: Ranks, timeout: timedelta) -> Store:
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    # Ranks that have found the first one would form the group at once, and wait there, deaf to
    # signals, for those that have not.
    arrived = PrefixStore("arrived", store)
    attempt = _called(arrived, here.world) if here.is_main else _joined(arrived, here.rank)
    # torchrun's store outlives an attempt, and with it the addresses of ranks that are dead.
    # Restarts are no name for attempts: each node of torchrun's counts its own.
    return PrefixStore(f"default_pg/{attempt}", store)


def _called(arrived: Store, world: int) -> str:
    """Begin an attempt, and wait until all other ranks have joined it. Its name is new."""
    attempt = uuid.uuid4().hex
    before = arrived.get(FIRST).decode() if arrived.check([FIRST]) else None
    arrived.set(FIRST, attempt)
    others = range(1, world)
    if before is not None:  # ranks that were sooner than this one wait there
        joined = [one for one in others if arrived.check([f"{before}/{one}"])]
        _answer(arrived, before, joined, attempt)
    arrived.wait([f"{attempt}/{one}" for one in others])
    _answer(arrived, attempt, others, attempt)
    return attempt


def _answer(arrived: Store, joined: str, ranks: Iterable[int], attempt: str) -> None:
    """Tell those that have joined an attempt which one they belong to."""
    for one in ranks:
        arrived.set(f"{joined}/{arrived.get(f'{joined}/{one}').decode()}", attempt)


def _joined(arrived: Store, rank: int) -> str:
    """Join the newest attempt, and wait until all ranks have. An answer is for one process, by a
    name that is new: those of an earlier attempt were for others.
    """
    name = uuid.uuid4().hex
    attempt = arrived.get(FIRST).decode()
    while True:
        arrived.set(f"{attempt}/{rank}", name)
        # Asked again, as a first rank that came meanwhile may not have seen this one here.
        newest = arrived.get(FIRST).decode()
        if newest == attempt:
            newest = arrived.get(f"{attempt}/{name}").decode()
            if newest == attempt:
                return attempt
        attempt = newest
