"""Every wrapper, in one order: compile, then DDP.

Compile comes first so that DDP's hooks stay outside the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ingot.parallel.mesh import Mesh


def apply_wrappers(model: nn.Module, mesh: Mesh, *, compiled: bool) -> nn.Module:
    """The module to call in training. `model` itself stays the owner of the parameters, under their own names."""
    if compiled:
        model.compile()
    return model if mesh.world == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)


def sum_factor(module: nn.Module, mesh: Mesh) -> float:
    """What turns the gradients that a wrapper leaves into sums over all ranks.

    The step needs sums (a mean of means is wrong where ranks hold unequal numbers of targets), and DDP leaves averages.
    Multiplying back is exact for powers of two. A hook that sums instead would run Python in the threads of the backend.
    """
    return float(mesh.world) if isinstance(module, DistributedDataParallel) else 1.0


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
