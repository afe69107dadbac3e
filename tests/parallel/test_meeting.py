from __future__ import annotations

import faulthandler
import signal
import subprocess
from datetime import timedelta
from types import FrameType

import pytest
import torch.distributed as dist

from ingot.base.environment import Ranks
from ingot.base.errors import leave
from ingot.parallel import mesh
from tests import forks
from tests.ranks import free_port

LEFT = 7


def test_a_rank_goes_on_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """To form the group sooner is to wait there for the rest, where no signal is heard."""
    store = dist.HashStore()
    monkeypatch.setattr(mesh, "rendezvous", lambda *_, **__: iter([(store, 1, 3)]))
    at_once = timedelta(milliseconds=10)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timeout"):
            mesh.meet(Ranks(1, 3), at_once)
    mesh.meet(Ranks(1, 3), at_once).set("key", "1")
    assert dist.PrefixStore("default_pg", store).check(["key"])


class Asked(BaseException):
    pass


def _ask(number: int, frame: FrameType | None) -> None:
    raise Asked


def _join() -> None:
    faulthandler.dump_traceback_later(30, exit=True)
    mesh.TELL_S = 0.0
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
