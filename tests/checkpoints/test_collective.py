"""What one rank cannot do, all ranks know of; and a thread speaks on a line of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from ingot.base.environment import Ranks
from ingot.base.errors import Failed
from ingot.checkpoints.collective import run_on_all
from ingot.parallel.mesh import Mesh, running_mesh
from tests.ranks import run_ranks


class Unsendable(Exception):
    def __init__(self, lock: object, other: object) -> None:
        super().__init__("of another world")
        self.lock = lock


def joined(values: Sequence[int]) -> str:
    return "+".join(map(str, values))


def failing(rank: int, where: int, error: Exception) -> int:
    if rank == where:
        raise error
    return 10 + rank


def all_cases() -> list[str]:
    """What this rank learns of each case; all are tried on one line, one after the other, so that
    none leaves anything behind.
    """
    with running_mesh() as mesh:
        line, learnt = mesh.side_channel(), []

        def refuse(values: Sequence[int]) -> str:
            raise OSError(28, "No space left on device", "x")

        for mine, main in (
            (lambda: 10 + mesh.rank, joined),
            (lambda: failing(mesh.rank, 1, Failed("disk full")), joined),
            (lambda: failing(mesh.rank, 0, OSError(5, "Input/output error")), joined),
            (lambda: failing(mesh.rank, 1, Unsendable(threading.Lock(), 0)), joined),
            (lambda: 0, refuse),
            (lambda: 20 + mesh.rank, joined),
        ):
            try:
                learnt.append(run_on_all(line, mine, main))
            except (Failed, OSError, RuntimeError) as error:
                learnt.append(f"{type(error).__name__}: {error}")
        return learnt


def test_all_ranks_learn_the_same() -> None:
    everyone = run_ranks(2, all_cases)
    assert (
        everyone[0]
        == everyone[1]
        == [
            "10+11",
            "Failed: disk full",
            "OSError: [Errno 5] Input/output error",
            "RuntimeError: Unsendable: of another world",
            "OSError: [Errno 28] No space left on device: 'x'",
            "20+21",
        ]
    )


def test_alone_it_is_a_plain_call() -> None:
    line = Mesh(Ranks(), torch.device("cpu")).side_channel()
    assert run_on_all(line, lambda: 3, joined) == "3"
    with pytest.raises(Failed, match="no"):
        run_on_all(line, lambda: failing(0, 0, Failed("no")), joined)


def crossing() -> tuple[list[str], list[float]]:
    """A thread speaks while this one does; the ranks begin in opposite orders, so that a shared
    line would cross their words.
    """
    with running_mesh() as mesh:
        line, heard = mesh.side_channel(), list[str]()
        assert (line.world, line.rank, line.degrees) == (2, mesh.rank, mesh.degrees)
        assert line.group is not None
        assert line.group is not dist.group.WORLD

        def speak() -> None:
            for number in range(50):
                heard.append(
                    run_on_all(line, lambda number=number: number * 10 + mesh.rank, joined)
                )  # type: ignore[misc]

        thread = threading.Thread(target=speak)
        sums = []
        if mesh.rank == 0:
            thread.start()
            thread.join(0.2)
        sums += [mesh.agree(float(number), mesh.rank + 1.0)[0] for number in range(200)]
        if mesh.rank == 1:
            thread.start()
        thread.join()
        return heard, sums


def test_a_thread_speaks_beside_the_others() -> None:
    for heard, sums in run_ranks(2, crossing):
        assert heard == [f"{number * 10}+{number * 10 + 1}" for number in range(50)]
        assert sums == [2.0 * number for number in range(200)]
