"""Ranks are counted here and nowhere else: process groups, sums over them, who writes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ingot.base.environment import Ranks, ranks
from ingot.models.device import backend, keep_freed_memory, pick_device, use_all_cores

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """This process among all processes of the job, and its device."""

    ranks: Ranks
    device: torch.device

    @property
    def world(self) -> int:
        return self.ranks.world

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def agree(self, *numbers: float) -> list[float]:
        """The sums over all ranks of a few numbers of the host; waits for the other hosts, never for a device."""
        if self.world == 1:
            return list(numbers)
        return [float(value) for value in self.all_sum(torch.tensor(numbers, dtype=torch.float64))]

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank's host, in the order of ranks; the same on all."""
        if self.world == 1:
            return [numbers]
        rows = torch.zeros(self.world, len(numbers), dtype=torch.float64)
        rows[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        everyone: list[list[float]] = self.all_sum(rows).tolist()
        return everyone

    def from_main(self, call: Callable[[], T]) -> T:
        """What `call` gives on rank 0, on every rank; what it raises there is raised everywhere."""
        if self.world == 1:
            return call()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = call()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if box[1] is not None:
            raise box[1]
        value: T = box[0]
        return value

    def barrier(self) -> None:
        self.agree(0.0)


@contextlib.contextmanager
def running_mesh() -> Iterator[Mesh]:
    """Join the other processes that torchrun started, and leave them at the end; alone where there are none."""
    here = ranks()
    device = pick_device(here.local_rank)
    use_all_cores(here.local_world)
    if device.type == "cpu":
        keep_freed_memory()
    owns_group = here.world > 1 and not dist.is_initialized()
    if owns_group:
        dist.init_process_group(backend(device), timeout=TIMEOUT)
        _never_free(dist.group.WORLD)
    mesh = Mesh(here, device)
    try:
        yield mesh
        # Nobody hangs up while another one still speaks.
        mesh.barrier()
    finally:
        if owns_group:
            dist.destroy_process_group()


def _never_free(group: object) -> None:
    """Leak one reference, so that a process group is never destroyed.

    Its destructor waits for gloo's threads while it holds the GIL, and a gloo thread wants the GIL to let go of a tensor
    that Python has seen: whichever object frees the group last (DDP, the interpreter) could then hang for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
