"""Every wrapper, in one order: compile, then DDP.

Compile comes first so that DDP's hooks stay outside the graph. Gradients are *summed* over ranks (FACES: decision 1): the
step divides once, by the target count of the whole global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ingot.parallel.mesh import Mesh


def apply_wrappers(model: nn.Module, mesh: Mesh, *, compiled: bool) -> nn.Module:
    """The module to call in training. `model` itself stays the owner of the parameters, under their own names."""
    if compiled:
        model.compile()
    if mesh.world == 1:
        return model
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _sum_gradients)
    return wrapped


# Without annotations: DDP compares them with its own types, and here they would be text.
def _sum_gradients(_, bucket):  # type: ignore[no-untyped-def]
    """DDP averages unless told; a mean of means is wrong when ranks hold unequal numbers of targets."""
    work: Any = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, async_op=True)
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def last_micro_batch(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Gradients cross ranks with the last micro-batch only; the earlier ones add up locally."""
    if isinstance(module, DistributedDataParallel) and not is_last:
        return module.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
