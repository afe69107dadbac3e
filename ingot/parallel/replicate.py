"""torch's data parallelism without torch's compiler, which it imports in order to ask it one thing:
as long as all else that a rank does before its first step.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILER = "torch._dynamo"


def replicate(module: nn.Module, group: dist.ProcessGroup | None) -> DistributedDataParallel:
    """The module as one of replicas whose gradients `backward` averages over `group`."""
    made = DistributedDataParallel if COMPILER in sys.modules else EagerDataParallel
    return made(module, process_group=group, gradient_as_bucket_view=True)


class EagerDataParallel(DistributedDataParallel):
    """`DistributedDataParallel` of a module that nothing compiles."""

    def __init__(
        self, module: nn.Module, *, process_group: dist.ProcessGroup | None, **how: Any
    ) -> None:
        with _compiler_answers():
            super().__init__(module, process_group=process_group, **how)

    # A compiler is kept out of it by a decorator, which imports the compiler.
    _inside_ddp_forward = contextlib.contextmanager(
        inspect.unwrap(DistributedDataParallel._inside_ddp_forward)
    )


@contextlib.contextmanager
def _compiler_answers() -> Iterator[None]:
    """While entered, what `DistributedDataParallel` asks of the compiler is answered as the
    compiler does by default; to be asked anything else is an error.
    """
    answers = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = SimpleNamespace(utils=answers)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo
