"""Runs a function on N ranks over gloo, as torchrun would, in processes forked by tests/forks.py."""

from __future__ import annotations

import faulthandler
import io
import select
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ingot.serve.http.listen import kept_port
from tests.forks import Process, start_call
from tests.patience import PATIENCE_S

DONE, FAILED = b"+", b"-"
GRACE_S = 2
"""How long the others have, once a rank has failed, to fail too: the first of them is shown."""


def free_port() -> int:
    """One that no server of another test is given before the first rank listens on it."""
    return kept_port("127.0.0.1")


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = PATIENCE_S
) -> list[Any]:
    """`function(*arguments)` on each of `world` ranks (a function of a module, picklable
    arguments); results in the order of ranks.

    An exception on any rank fails the test with that rank's traceback.
    """
    port = free_port()
    ranks = [
        start_call(
            _run,
            timeout_s,
            function,
            arguments,
            modules=(function.__module__,),
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(world)
    ]
    try:
        _wait(ranks, timeout_s + 10)
        results, silent = [], []
        for number, rank in enumerate(ranks):
            if rank.returncode is None:
                silent.append(number)
                continue
            answer = rank.result()
            assert answer, (
                f"rank {number} of {world} ended with {rank.returncode}, without a result"
            )
            value = torch.load(io.BytesIO(answer[1:]), weights_only=False)
            assert answer[:1] == DONE, f"rank {number} of {world} failed:\n{value}"
            results.append(value)
        assert not silent, f"rank {silent[0]} of {world} gave no result in {timeout_s} s"
        return results
    finally:
        for rank in ranks:
            rank.kill()


def _wait(ranks: list[Process], timeout_s: float) -> None:
    """Until all have ended, or one has failed and the others have had a moment."""
    deadline = time.monotonic() + timeout_s
    running = list(ranks)
    while running and time.monotonic() < deadline:
        ready, _, _ = select.select(running, [], [], deadline - time.monotonic())
        for rank in ready:
            running.remove(rank)
            rank.wait()
            if rank.result()[:1] != DONE:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _run(timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    # The server that this process was forked from had read the environment before.
    torch.set_num_threads(1)
    # A rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    packed = io.BytesIO()
    try:
        torch.save(function(*arguments), packed)
    except BaseException:
        packed = io.BytesIO()
        torch.save(traceback.format_exc(), packed)
        return FAILED + packed.getvalue()
    return DONE + packed.getvalue()
