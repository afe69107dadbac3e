"""The weights that answers are sampled from: those in training themselves where a rank has all of
them, else a copy that every rank gathers before each rollout and frees after it.

Either way they are compared with the weights in training by a checksum, so that no answer comes
from a policy that is stale, or another one than that of the other ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.base.errors import Failed
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.quantized import quantize_base
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import (
    Slices,
    allocate,
    is_dtensor,
    local_tensor,
    named_weights,
    shard_like,
    shard_slices,
)
from ingot.models.spec import create_model
from ingot.parallel.apply import TYPES, evaluating
from ingot.parallel.mesh import Mesh
from ingot.parallel.shard import is_fsdp
from ingot.train.setup import TrainSetup

WORD = 1 << 64
HALF = 1 << 32
AT_ONCE = 2**22
"""Numbers whose checksum is computed together: it takes twice or four times their memory."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SampledPolicy:
    """The policy in training as a decoder that this rank can ask by itself.

    Args:
        model: the policy, sharded as the layout says: a `Pipeline` where it has stages.
    """

    def __init__(self, setup: TrainSetup, model: Decoder, mesh: Mesh) -> None:
        self._setup, self._trained, self._mesh = setup, model, mesh
        degrees = mesh.degrees
        self.is_gathered = degrees.world > degrees.replicate or degrees.expert > 1
        """Whether answers are sampled from a copy."""

    @contextmanager
    def whole(self) -> Iterator[Decoder]:
        """The policy as it is now, in evaluation mode. Collective.

        Raises:
            Failed: what a rank would sample from is not what is trained.
        """
        if not self.is_gathered:
            self._compare(self._trained)
            with evaluating(self._trained):
                yield self._trained
            return
        yield self.copy()

    def copy(self) -> Decoder:
        """A copy of the policy as it is now, which training leaves alone. Collective; raises as
        `whole` does.
        """
        for module in self._trained.modules():
            if is_fsdp(module):
                # What a forward pass has gathered is older than the last update.
                module.reshard()
        copy = self._gather()
        self._compare(copy)
        return copy

    @torch.no_grad()
    def _gather(self) -> Decoder:
        """Every weight whole on every rank, in the type that products are computed in."""
        recipe, dtype = self._setup.recipe, TYPES[self._setup.compute]
        copy = create_model(self._setup.model_spec, recipe.seed)
        assert isinstance(copy, Decoder)
        if recipe.model.lora is not None:
            add_lora(copy, recipe.model.lora, recipe.seed)
        if recipe.model.quantize is not None:
            quantize_base(copy, recipe.model.quantize)
        copy = copy.to(dtype).requires_grad_(False).eval()
        allocate(copy, self._mesh.device)
        trained, owners = dict(named_weights(self._trained)), self._owners(copy)
        stages = self._mesh.pipeline
        for name, whole in named_weights(copy):
            if name in trained:
                whole.copy_(_gathered(trained[name], whole.dtype, self._mesh.device))
            if stages.world > 1:
                dist.broadcast(whole, group_src=owners[name], group=stages.group)
        return copy

    def _owners(self, copy: nn.Module) -> dict[str, int]:
        """The first rank of the pipeline that has each weight."""
        names = [name for name, _ in named_weights(copy)]
        trained = dict(named_weights(self._trained))
        have = self._mesh.pipeline.gather([float(name in trained) for name in names])
        return {
            name: next(rank for rank, one in enumerate(have) if one[place])
            for place, name in enumerate(names)
        }

    def _compare(self, sampled: Decoder) -> None:
        """Raises Failed unless every rank samples from the weights that all ranks train."""
        like = {name: weight.dtype for name, weight in named_weights(sampled)}
        first = self._mesh.pipeline.rank
        owned = {name for name, rank in self._owners(sampled).items() if rank == first}
        mine = checksum(
            self._trained, like, lambda name, weight: name in owned and self._counts(weight)
        )
        low, high = self._mesh.agree(mine % HALF, mine // HALF)
        wanted = (int(low) + int(high) * HALF) % WORD
        if any(self._mesh.agree(float(checksum(sampled, like) != wanted))):
            raise Failed(
                "the ranks hold different weights, or sample from others than they train, so that"
                " their answers are not those of one model; go on from the newest checkpoint"
            )

    def _counts(self, weight: Tensor) -> bool:
        """Whether this rank's shard is counted, of the equal ones of several replicas."""
        if not is_dtensor(weight):
            return self._mesh.stage.rank == 0
        mesh = weight.device_mesh
        place = zip(mesh.get_coordinate() or (), weight.placements, strict=True)
        first = all(along == 0 for along, placement in place if placement.is_replicate())
        # The ranks that share experts are those of the tensor axis, too.
        spread_over_tensor = {"tensor", "expert"} & set(mesh.mesh_dim_names or ())
        return first and (bool(spread_over_tensor) or self._mesh.tensor.rank == 0)


def _gathered(weight: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A weight as a whole, from the shards of the ranks that hold it, rounded before they are
    sent. Collective over those.
    """
    here = local_tensor(weight.detach()).to(device, dtype)
    shard = shard_like(weight.detach(), here)
    return shard.full_tensor() if is_dtensor(shard) else shard


@torch.no_grad()
def own_checksum(model: nn.Module) -> int:
    """The checksum of weights as they are."""
    return checksum(model, {name: weight.dtype for name, weight in named_weights(model)})


def checksum(
    model: nn.Module,
    like: Mapping[str, torch.dtype],
    counts: Callable[[str, Tensor], bool] = lambda name, weight: True,
) -> int:
    """A number below 2^64 that changes with any bit of the weights, with their order and with their
    names, but for rare accidents. Of shards it is the sum of those of the parts.

    Args:
        like: the type that each weight is rounded to before.
        counts: the weights of which this rank's shard is counted.
    """
    return (
        sum(
            zlib.crc32(name.encode())
            * _checksum(local_tensor(weight), shard_slices(weight), like[name])
            for name, weight in named_weights(model)
            if counts(name, weight)
        )
        % WORD
    )


def _checksum(shard: Tensor, where: Slices, dtype: torch.dtype) -> int:
    """The sum of the numbers' bits, each times an odd number for its row, and one for its column,
    in the whole weight. Sums of int64 wrap around: modulo 2^64 they are exact in any order.
    """
    if not shard.numel():
        return 0
    columns = where[-1] if where else slice(0, 1)
    rows = [
        torch.arange(part.start, part.stop, device=shard.device) * (2 * 1_000_003 + 2 * dim) + 1
        for dim, part in enumerate(where[:-1])
    ]
    by_row = torch.ones(1, dtype=torch.int64, device=shard.device)
    for factor in rows:
        by_row = (by_row[:, None] * factor).flatten()
    by_column = torch.arange(columns.start, columns.stop, device=shard.device) * 2 + 1
    held = shard.detach().reshape(len(by_row), len(by_column))
    total = 0
    block = max(1, AT_ONCE // len(by_column))
    for some, factor in zip(held.split(block), by_row.split(block), strict=True):
        bits = some.to(dtype).contiguous().view(BITS[dtype.itemsize])
        total += int(((bits * by_column).sum(dim=1) * factor).sum())
    return total % WORD
