"""Runs a function on N ranks over gloo, as torchrun would; starting torch is paid once for all
tests of a process.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch.nn.parallel",
        "ingot.train.run",
    ]
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60
) -> list[Any]:
    """`function(*arguments)` on each of `world` ranks (a function of a module, picklable
    arguments); results in the order of ranks.

    An exception on any rank fails the test with that rank's traceback.
    """
    port = free_port()
    pipes: list[Connection] = []
    processes = []
    for rank in range(world):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_run,
            args=(rank, world, port, timeout_s, theirs, function, arguments),
            daemon=True,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout_s + 10):
                raise AssertionError(f"rank {rank} of {world} gave no result in {timeout_s} s")
            ok, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            if not ok:
                raise AssertionError(f"rank {rank} of {world} failed:\n{value}")
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _run(
    rank: int,
    world: int,
    port: int,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(
        1
    )  # the server that this process was forked from had read the environment before
    # A rank that hangs shows where, and ends.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # As bytes: tensors sent as they are would be shared memory that ends with this process.
    packed = io.BytesIO()
    torch.save(answer, packed)
    pipe.send_bytes(packed.getvalue())
