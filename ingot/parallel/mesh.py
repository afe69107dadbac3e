"""The device mesh: the only place where ranks are counted and process groups are made."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.base.environment import Ranks, ranks
from ingot.base.malloc import keep_freed_memory
from ingot.base.markers import fingerprint
from ingot.config.degrees import AXES, Degrees, degrees_of
from ingot.config.sections.layout import Parallel
from ingot.models.device import backend, pick_device, use_all_cores
from ingot.parallel.meeting import meet

T = TypeVar("T")
TIMEOUT, MARGIN = timedelta(minutes=30), timedelta(minutes=5)
"""How long ranks wait for another one at least, and how much longer than it may be silent: by then
a supervisor has noticed that it hangs, and named it.
"""
LONGEST = timedelta(days=365)
"""The longest that ranks wait: gloo counts nanoseconds, and those of centuries do not fit."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a job, or of one part of it, as seen by one of them, and that rank's device.

    `mesh.data` are the ranks that each take a share of the batch and are otherwise alike,
    `mesh.tensor` those that share this rank's matrices. A part of one rank never communicates.
    """

    ranks: Ranks
    device: torch.device
    degrees: Degrees = field(default_factory=Degrees)
    group: dist.ProcessGroup | None = None
    """The process group; None for a single rank or for the whole job (the default group)."""
    parts: Mapping[str, Mesh] = field(default_factory=dict)
    weights: DeviceMesh | None = None
    """Mesh with the axes `pipeline, replicate, shard, tensor` for sharded weights; None for one
    process.
    """
    experts: DeviceMesh | None = None
    """The same for the weights of experts: `pipeline, replicate, shard, expert`; None if no ranks
    share experts.
    """
    timeout: timedelta = TIMEOUT
    """How long these ranks wait for one of them."""

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
        """One of `PARTS`; this rank alone if its degree is 1."""
        return self.parts.get(name) or (self if self.world == 1 else Mesh(Ranks(), self.device))

    @property
    def data(self) -> Mesh:
        """The ranks that each take a share of the batch (axes replicate and shard)."""
        return self.part("data")

    @property
    def context(self) -> Mesh:
        """The ranks that share each row (context axis)."""
        return self.part("context")

    @property
    def rows(self) -> Mesh:
        """The ranks that share the rows before their experts (axes context and tensor)."""
        return self.part("rows")

    @property
    def tensor(self) -> Mesh:
        """The ranks that share each matrix (tensor axis)."""
        return self.part("tensor")

    @property
    def pipeline(self) -> Mesh:
        """The ranks that share the layers (pipeline axis)."""
        return self.part("pipeline")

    @property
    def losses(self) -> Mesh:
        """The ranks whose losses add up to that of the global batch: all axes but tensor, whose
        ranks compute the same loss.
        """
        return self.part("losses")

    @property
    def ends(self) -> Mesh:
        """The first and the last rank of this rank's pipeline; a middle rank alone."""
        return self.part("ends")

    @property
    def replicas(self) -> Mesh:
        """The ranks over which gradients are summed: axes replicate, shard and context."""
        return self.part("replicas")

    @property
    def stage(self) -> Mesh:
        """The ranks that hold the same layers, whole or in shards: all axes but pipeline."""
        return self.part("stage")

    @property
    def unstaged(self) -> Mesh:
        """This mesh without its pipeline axis, for a model that each stage holds whole."""
        parts = {name: part for name, part in self.parts.items() if name not in STAGED}
        return replace(self, degrees=replace(self.degrees, pipeline=1), parts=parts)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return tensor

    def agree(self, *numbers: float) -> list[float]:
        """Sums of a few host numbers over all ranks; waits for the other hosts, never for a
        device.
        """
        if self.world == 1:
            return list(numbers)
        return [float(value) for value in self.all_sum(torch.tensor(numbers, dtype=torch.float64))]

    def gather(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank, in rank order; the same on all. On the host, as `agree`."""
        if self.world == 1:
            return [numbers]
        rows = torch.zeros(self.world, len(numbers), dtype=torch.float64)
        rows[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        everyone: list[list[float]] = self.all_sum(rows).tolist()
        return everyone

    def is_same(self, value: object) -> bool:
        """Whether every rank gives the same; the same answer on all. On the host, as `agree`."""
        mine = float(int(fingerprint(value)[:12], 16))
        return all(row == [mine] for row in self.gather([mine]))

    def from_main(self, call: Callable[[], T]) -> T:
        """Call on rank 0 and return the result on every rank; an exception is raised on
        every rank.
        """
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
        """The same ranks with a process group of their own, so that a background thread can
        communicate independently of the main thread; for host numbers and objects only.

        Collective; each call makes another group. The result has no parts and no weights.
        """
        if self.world == 1:
            return Mesh(self.ranks, torch.device("cpu"), self.degrees)
        group = dist.new_group(
            dist.get_process_group_ranks(self.group or dist.group.WORLD),
            backend="gloo",
            timeout=self.timeout,
            use_local_synchronization=True,
        )
        _never_free(group)
        return Mesh(self.ranks, torch.device("cpu"), self.degrees, group)


PARTS: dict[str, tuple[str, ...]] = {
    "data": ("replicate", "shard"),
    "context": ("context",),
    "tensor": ("tensor",),
    "rows": ("context", "tensor"),
    "pipeline": ("pipeline",),
    "losses": ("pipeline", "replicate", "shard", "context"),
    "replicas": ("replicate", "shard", "context"),
    "stage": ("replicate", "shard", "context", "tensor"),
}
"""The parts of a mesh, by the axes along which their ranks differ."""
STAGED = ("pipeline", "ends")
"""The parts that only a pipeline has."""


@contextlib.contextmanager
def running_mesh(
    parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
    *,
    start_s: float = 0.0,
) -> Iterator[Mesh]:
    """Join the processes that torchrun started, and leave the group unless there is an exception; a
    mesh of one rank if there are no others. `start_s`: how long a rank may be silent while the
    others wait for it, such as rank 0 while it verifies a checkpoint (`launch.start_s`).

    Raises:
        WrongInput: the degrees do not fit the number of processes.
    """
    here = ranks()
    degrees = degrees_of(parallel, here.world)
    device = pick_device(here.local_rank)
    use_all_cores(here.local_world)
    if device.type == "cpu":
        keep_freed_memory()
    silent = timedelta(seconds=min(start_s, LONGEST.total_seconds()))
    timeout = max(TIMEOUT, silent + MARGIN)
    owns_group = here.world > 1 and not dist.is_initialized()
    if owns_group:
        store = meet(here, timeout)
        dist.init_process_group(
            backend(device), store=store, rank=here.rank, world_size=here.world, timeout=timeout
        )
        _never_free(dist.group.WORLD)
    mesh = make_mesh(here, device, degrees, timeout=timeout)
    yield mesh
    # No rank leaves while another still communicates.
    mesh.barrier()
    # Not after an exception: NCCL would wait for collectives in which others wait for this rank,
    # and nobody would ever be told what failed.
    if owns_group:
        dist.destroy_process_group()


def make_mesh(
    here: Ranks, device: torch.device, degrees: Degrees, *, timeout: timedelta = TIMEOUT
) -> Mesh:
    """The mesh of a job whose process group is initialised. Collective."""
    grid = np.arange(here.world).reshape([getattr(degrees, axis) for axis in AXES])
    parts = {}
    for name, axes in PARTS.items():
        along = [AXES.index(axis) for axis in axes]
        size = math.prod(grid.shape[place] for place in along)
        if size == here.world > 1:
            parts[name] = Mesh(here, device, group=dist.group.WORLD, timeout=timeout)
        elif name == "stage" and degrees.tensor == 1 and size > 1:
            parts[name] = parts["replicas"]
        elif name == "rows" and size > 1 and 1 in (degrees.context, degrees.tensor):
            parts[name] = parts["tensor" if degrees.context == 1 else "context"]
        elif size > 1:
            members = np.moveaxis(grid, along, range(-len(along), 0)).reshape(-1, size)
            parts[name] = _part(here, device, members, timeout)
    if degrees.pipeline > 1:
        columns = grid.reshape(degrees.pipeline, -1).T
        parts["ends"] = _part(here, device, columns[:, [0, -1]], timeout)
    return Mesh(
        here,
        device,
        degrees,
        None,
        parts,
        None if degrees.world == 1 else _weights(device, degrees, timeout),
        None if degrees.expert == 1 else _experts(device, degrees, timeout),
        timeout,
    )


def _part(here: Ranks, device: torch.device, members: np.ndarray, timeout: timedelta) -> Mesh:
    """This rank's group among the rows of `members`; a rank in no row is alone. Collective: every
    rank makes all groups, in the same order.
    """
    mine = Mesh(Ranks(), device)
    for row in members.tolist():
        group = dist.new_group(row, timeout=timeout)
        _never_free(group)
        if here.rank in row:
            mine = Mesh(
                Ranks(row.index(here.rank), len(row), here.local_rank, here.local_world),
                device,
                group=group,
                timeout=timeout,
            )
    return mine


def _weights(device: torch.device, degrees: Degrees, timeout: timedelta) -> DeviceMesh:
    """The mesh for sharded weights."""
    copies = degrees.data * degrees.context // degrees.shards
    return _device_mesh(
        device,
        timeout,
        pipeline=degrees.pipeline,
        replicate=copies,
        shard=degrees.shards,
        tensor=degrees.tensor,
    )


def _experts(device: torch.device, degrees: Degrees, timeout: timedelta) -> DeviceMesh:
    """The mesh for the weights of experts: neighbours along replicate, shard, context and tensor
    share them, and what is left of shards and replicas has copies.
    """
    return _device_mesh(
        device,
        timeout,
        pipeline=degrees.pipeline,
        replicate=degrees.expert_copies,
        shard=degrees.expert_shards,
        expert=degrees.expert,
    )


def _device_mesh(device: torch.device, timeout: timedelta, **axes: int) -> DeviceMesh:
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        # Made with torch's default. A backend without timeouts, as that of a plan, has none to set.
        with contextlib.suppress(RuntimeError):
            group.set_timeout(timeout)
        _never_free(group)
    return mesh


def _never_free(group: object) -> None:
    """Leak one reference, so that a process group is never destroyed.

    Its destructor waits for gloo's threads while holding the GIL, and a gloo thread needs the GIL
    to release a tensor that Python has seen: whichever object frees the group last (DDP, the
    interpreter) could deadlock.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
