from __future__ import annotations

import faulthandler
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType

import pytest
import torch.distributed as dist

from ingot.base.environment import Ranks
from ingot.base.errors import leave
from ingot.parallel import meeting, mesh
from tests import forks
from tests.ranks import free_port

LEFT = 7


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """What ranks meet through."""
    found = dist.HashStore()
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(found, 1, 3)]))
    return found


AT_ONCE, PATIENT = timedelta(milliseconds=10), timedelta(seconds=60)


def met(first: int = 0, world: int = 3) -> list[dist.Store]:
    """What each rank is given where rank `first` comes before the others."""
    with ThreadPoolExecutor(world) as threads:
        turns = [first, *(one for one in range(world) if one != first)]
        waiting = {one: threads.submit(meeting.meet, Ranks(one, world), PATIENT) for one in turns}
        return [waiting[one].result() for one in range(world)]


def test_a_rank_goes_on_once_all_are_there(store: dist.Store) -> None:
    """To form the group sooner is to wait there for the rest, where no signal is heard."""
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match="timeout"):
            meeting.meet(Ranks(rank, 3), AT_ONCE)
    stores = met()
    stores[0].set("key", "1")
    assert all(one.check(["key"]) for one in stores)


@pytest.mark.parametrize("first", [0, 1])
def test_an_attempt_finds_nothing_of_an_earlier_one(first: int, store: dist.Store) -> None:
    """torchrun keeps its store when it starts ranks again: who is there is asked anew, and
    addresses of ranks that have ended are not read.
    """
    met()[0].set("address", "1")
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match="timeout"):
            meeting.meet(Ranks(rank, 3), AT_ONCE)
    stores = met(first)
    assert not any(one.check(["address"]) for one in stores)
    stores[0].set("key", "1")
    assert all(one.check(["key"]) for one in stores)


class Asked(BaseException):
    pass


def _ask(number: int, frame: FrameType | None) -> None:
    raise Asked


def _join() -> None:
    faulthandler.dump_traceback_later(30, exit=True)
    meeting.TELL_S = 0.0
    signal.signal(signal.SIGTERM, _ask)
    try:
        with mesh.running_mesh():
            pass
    except Asked:
        leave(LEFT)


@pytest.mark.parametrize(
    ("world", "present"), [(2, [1]), (2, [0]), (3, [0, 1])], ids=["no first", "alone", "one lacks"]
)
def test_a_rank_that_waits_for_others_says_so_and_can_be_stopped(
    world: int, present: list[int]
) -> None:
    """As with variables that a shell kept: no other rank will ever come."""
    port = free_port()
    waiting = [
        forks.start_call(
            _join,
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
        )
        for rank in present
    ]
    for rank, process in zip(present, waiting, strict=True):
        assert process.stderr is not None
        told = f"rank {rank} of {world} waits for the others at 127.0.0.1:{port}; if it should be"
        assert process.stderr.readline().startswith(told)
    for process in reversed(waiting):  # the first one takes the store with it
        process.terminate()
        assert process.wait(60) == LEFT
