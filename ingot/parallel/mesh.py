"""Ranks are counted here and nowhere else: process groups, sums over them, who writes."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.base.environment import Ranks, ranks
from ingot.config.sections.layout import Parallel
from ingot.config.shape import AXES, Degrees, degrees_of
from ingot.models.device import backend, keep_freed_memory, pick_device, use_all_cores

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job, or of one part of it, as one of them sees them, and this rank's device.

    `mesh.data` are the ranks that each take a share of the batch and are alike otherwise,
    `mesh.tensor` those that share this rank's matrices. A part of one rank never communicates.
    """

    ranks: Ranks
    device: torch.device
    degrees: Degrees = field(default_factory=Degrees)
    group: dist.ProcessGroup | None = None
    """The process group; None for a single rank, or for the whole job (the default group)."""
    parts: Mapping[str, Mesh] = field(default_factory=dict)
    weights: DeviceMesh | None = None
    """Axes `pipeline, replicate, shard, tensor`, for weights that are spread; None for one process.
    """

    @property
    def world(self) -> int:
        return self.ranks.world

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    def part(self, name: str) -> Mesh:
        """One of `PARTS`; this rank alone where its degree is 1."""
        return self.parts.get(name) or (self if self.world == 1 else Mesh(Ranks(), self.device))

    @property
    def data(self) -> Mesh:
        """The ranks that take a share of the batch each."""
        return self.part("data")

    @property
    def context(self) -> Mesh:
        """The ranks that share each row."""
        return self.part("context")

    @property
    def tensor(self) -> Mesh:
        """The ranks that share each matrix."""
        return self.part("tensor")

    @property
    def pipeline(self) -> Mesh:
        """The ranks that share the layers."""
        return self.part("pipeline")

    @property
    def losses(self) -> Mesh:
        """The ranks whose losses add up to that of the global batch: all but those that share
        matrices, which have the same.
        """
        return self.part("losses")

    @property
    def ends(self) -> Mesh:
        """The first and the last rank of this rank's pipeline; a middle rank alone."""
        return self.part("ends")

    @property
    def replicas(self) -> Mesh:
        """The ranks among which gradients are summed: shares of the batch, and of rows."""
        return self.part("replicas")

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return tensor

    def agree(self, *numbers: float) -> list[float]:
        """The sums over all ranks of a few numbers of the host; waits for the other hosts, never
        for a device.
        """
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
        value_and_error: list[Any] = [None, None]
        if self.is_main:
            try:
                value_and_error[0] = call()
            except Exception as error:
                value_and_error[1] = error
        dist.broadcast_object_list(
            value_and_error, group_src=0, group=self.group, device=torch.device("cpu")
        )
        if value_and_error[1] is not None:
            raise value_and_error[1]
        value: T = value_and_error[0]
        return value

    def barrier(self) -> None:
        self.agree(0.0)

    def side_channel(self) -> Mesh:
        """The same ranks with a process group of their own, so that a thread can communicate beside
        the main one; for numbers and objects on the host only.

        Collective; each call makes another group. The result has no parts and no weights.
        """
        if self.world == 1:
            return Mesh(self.ranks, torch.device("cpu"), self.degrees)
        group = dist.new_group(
            dist.get_process_group_ranks(self.group or dist.group.WORLD),
            backend="gloo",
            timeout=TIMEOUT,
            use_local_synchronization=True,
        )
        _never_free(group)
        return Mesh(self.ranks, torch.device("cpu"), self.degrees, group)


PARTS: dict[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),
    "context": ("context",),
    "tensor": ("tensor",),
    "pipeline": ("pipeline",),
    "losses": ("pipeline", "replicate", "shard", "context"),
    "replicas": ("replicate", "shard", "context"),
}
"""The parts of a mesh, by the axes that their ranks differ in."""


@contextlib.contextmanager
def running_mesh(parallel: Parallel = Parallel()) -> Iterator[Mesh]:  # noqa: B008 (frozen)
    """Join the other processes that torchrun started, and leave them at the end; alone where there
    are none.

    Raises:
        WrongInput: the degrees do not fit the number of processes.
    """
    here = ranks()
    degrees = degrees_of(parallel, here.world)
    device = pick_device(here.local_rank)
    use_all_cores(here.local_world)
    if device.type == "cpu":
        keep_freed_memory()
    owns_group = here.world > 1 and not dist.is_initialized()
    if owns_group:
        dist.init_process_group(backend(device), timeout=TIMEOUT)
        _never_free(dist.group.WORLD)
    mesh = make_mesh(here, device, degrees)
    try:
        yield mesh
        # No rank leaves while another one still communicates.
        mesh.barrier()
    finally:
        if owns_group:
            dist.destroy_process_group()


def make_mesh(here: Ranks, device: torch.device, degrees: Degrees) -> Mesh:
    """The mesh of a job whose processes have met; all of them call it."""
    grid = np.arange(here.world).reshape([getattr(degrees, axis) for axis in AXES])
    parts = {}
    for name, axes in PARTS.items():
        along = [AXES.index(axis) for axis in axes]
        size = math.prod(grid.shape[place] for place in along)
        if size == here.world > 1:
            parts[name] = Mesh(here, device, group=dist.group.WORLD)
        elif size > 1:
            parts[name] = _part(
                here, device, np.moveaxis(grid, along, range(-len(along), 0)).reshape(-1, size)
            )
    if degrees.pipeline > 1:
        columns = grid.reshape(degrees.pipeline, -1).T
        parts["ends"] = _part(here, device, columns[:, [0, -1]])
    return Mesh(here, device, degrees, None, parts, _weights(device, degrees))


def _part(here: Ranks, device: torch.device, members: np.ndarray) -> Mesh:
    """This rank's group of those that `members` lists, a row each; every rank makes all of them, in
    one order. Alone where it is in none.
    """
    mine = Mesh(Ranks(), device)
    for row in members.tolist():
        group = dist.new_group(row)
        _never_free(group)
        if here.rank in row:
            mine = Mesh(
                Ranks(row.index(here.rank), len(row), here.local_rank, here.local_world),
                device,
                group=group,
            )
    return mine


def _weights(device: torch.device, degrees: Degrees) -> DeviceMesh | None:
    """For sharding, ranks that share rows count as more ranks that share weights; without, as more
    copies.
    """
    if degrees.world == 1:
        return None
    copies, shards = (
        (degrees.replicate, degrees.shard * degrees.context)
        if degrees.shard > 1
        else (degrees.replicate * degrees.context, 1)
    )
    mesh = init_device_mesh(
        device.type,
        (degrees.pipeline, copies, shards, degrees.tensor),
        mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
    )
    for group in mesh.get_all_groups():
        _never_free(group)
    return mesh


def _never_free(group: object) -> None:
    """Leak one reference, so that a process group is never destroyed.

    Its destructor waits for gloo's threads while it holds the GIL, and a gloo thread wants the GIL
    to let go of a tensor
    that Python has seen: whichever object frees the group last (DDP, the interpreter) could then
    hang for ever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
