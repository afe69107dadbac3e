"""Replicas made without torch's compiler have the gradients of torch's own, bit for bit, and do not
import it.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ingot.parallel.mesh import running_mesh
from ingot.parallel.replicate import EagerDataParallel
from tests.ranks import run_ranks

WRAPPED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from ingot.parallel.replicate import replicate

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = replicate(nn.Linear(3, 2), None)
module(torch.ones(4, 3)).sum().backward()
assert "torch._dynamo" not in sys.modules
assert module.module.weight.grad.eq(4).all()
torch._dynamo.reset()  # the real one is there for whoever wants it
assert type(module) is not type(replicate(nn.Linear(3, 2), None)), "a compiler has to know of it"
"""


def gradients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of torch's replicas and ours: three micro-batches a step, reduced with the last."""
    found = []
    with running_mesh() as mesh:
        for kind in (DistributedDataParallel, EagerDataParallel):
            torch.manual_seed(1)
            layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
            module = kind(layers, process_group=mesh.group, gradient_as_bucket_view=True)
            generator = torch.Generator().manual_seed(mesh.rank)
            for last in (False, False, True):
                rows = torch.randn(4, 5, generator=generator)
                if last:
                    module(rows).square().sum().backward()
                else:
                    with module.no_sync():
                        module(rows).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in layers.parameters()])
    return list(zip(*found, strict=True))


def test_gradients_are_those_of_torchs_own() -> None:
    ranks = run_ranks(2, gradients)
    assert all(torch.equal(theirs, ours) for rank in ranks for theirs, ours in rank)
    (one, _), (other, _) = ranks[0][0], ranks[1][0]
    assert torch.equal(one, other)
    assert bool(one.any())


def test_the_compiler_is_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
