"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022) for
the native decoder, as a plan of torch's parallel styles.

The q, k, v, gate and up projections are split by columns, so that a rank has whole heads; the o and
down projections by rows. With sequence parallelism, activations between them are split along the
sequence. Embedding and head are split along the vocabulary.

Before the experts of a mixture each rank takes a part of every row's tokens, with or without
sequence parallelism: the router and the experts see each token once.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ingot.models.native.decoder import Attention, Block, Decoder, RMSNorm
from ingot.models.native.experts import LayerRouting, SparseMLP
from ingot.models.native.head import LogitsView, VocabularyHead
from ingot.models.parameters import local_tensor
from ingot.parallel.collectives import sum_backward, sum_both, sum_forward


class VocabParallelView(LogitsView):
    """Logits `[N, V_local]` of the vocabulary slice that begins at id `first`. Every rank gets the
    same results, and the gradients of its own slice.
    """

    def __init__(self, logits: Tensor, group: dist.ProcessGroup, first: int) -> None:
        super().__init__(logits)
        self._group, self._first = group, first

    def logsumexp(self) -> Tensor:
        return self._logsumexp(self._logits)

    def _logsumexp(self, logits: Tensor) -> Tensor:
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return self.total((logits - largest[:, None]).exp()).log() + largest

    def gather(self, labels: Tensor) -> Tensor:
        place = labels - self._first
        here = (place >= 0) & (place < self._logits.shape[-1])
        found = self._logits.gather(-1, place.where(here, 0)[:, None])[:, 0]
        return sum_forward(torch.where(here, found, 0.0), self._group)

    def log_probability(self, labels: Tensor, temperature: float = 1.0) -> Tensor:
        return self.gather(labels) / temperature - self._logsumexp(self._logits / temperature)

    def log_probabilities(self, temperature: float = 1.0) -> Tensor:
        softened = self._logits / temperature
        # Each rank uses the sum in its own way, with its slice of the vocabulary.
        return softened - sum_backward(self._logsumexp(softened), self._group)[:, None]

    def total(self, values: Tensor) -> Tensor:
        return sum_forward(values.sum(dim=-1), self._group)


class VocabParallelHead(VocabularyHead):
    """Splits the rows of the projection over the ranks of `mesh`; the first ranks get one row more
    where they do not divide.
    """

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.mesh, self.size = mesh, size
        self.first = mesh.get_local_rank() * -(-size // mesh.size())

    def enter(self, hidden: Tensor) -> Tensor:
        """All tokens on every rank; in backward, the gradients from each rank's slice of the
        vocabulary are summed.
        """
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def weight(self, weight: Tensor) -> Tensor:
        return weight.to_local() if isinstance(weight, DTensor) else weight

    def view(self, logits: Tensor) -> LogitsView:
        return VocabParallelView(logits, self.mesh.get_group(), self.first)

    def whole(self, logits: Tensor) -> Tensor:
        size = torch.Size((*logits.shape[:-1], self.size))
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(
            logits.contiguous(),
            self.mesh,
            [Shard(logits.ndim - 1)],
            run_check=False,
            shape=size,
            stride=stride,
        ).full_tensor()


HEADS = 1
"""The dimension of heads in queries and keys `[B, H, T, E]`."""


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Distribute parameters of a module over the mesh; names that it does not have are skipped."""
    for name, placement in placements.items():
        parameter = module._parameters.get(name)
        if parameter is not None:
            spread_out = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(spread_out, requires_grad=parameter.requires_grad)
            )


class ColumnParallelLinear(ColwiseParallel):
    """A linear layer, with or without adapter, split by outputs (columns)."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute(
            module,
            device_mesh,
            weight=Shard(0),
            bias=Shard(0),
            lora_A=Replicate(),
            lora_B=Shard(0),
            lora_magnitude=Shard(0),
        )


class RowParallelLinear(RowwiseParallel):
    """A linear layer, with or without adapter, split by inputs (rows); the outputs are summed."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute(
            module,
            device_mesh,
            weight=Shard(1),
            bias=Replicate(),
            lora_A=Shard(1),
            lora_B=Replicate(),
            lora_magnitude=Replicate(),
        )


class WidthParallelNorm(ParallelStyle):
    """A norm over the outputs of a layer that is split by columns: each rank has a part of the
    width, and the sum of squares is that of all ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RMSNorm)
        width = module.weight.shape[0]
        distribute(module, device_mesh, weight=Shard(0))
        module.forward = partial(_norm_of_parts, module, device_mesh.get_group(), width)  # type: ignore[method-assign]
        return module


def _norm_of_parts(norm: RMSNorm, group: dist.ProcessGroup, width: int, x: Tensor) -> Tensor:
    """x `[B, T, N]`, this rank's part of the width, normalised by the mean square of all parts."""
    wide, weight = x.float(), norm.weight
    squares = sum_both(wide.square().sum(dim=-1, keepdim=True), group)  # [B, T, 1]
    held = weight.to_local() if isinstance(weight, DTensor) else weight
    scaled = wide * (squares / width + norm.eps).rsqrt()
    return (scaled * (held.float() + norm.offset)).to(x.dtype)


class ShardedNorm(SequenceParallel):
    """A norm over activations that are split along one dimension."""

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        distribute(module, device_mesh, weight=Replicate())


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Distribute the decoder (on `meta`), or a pipeline stage of it, over the ranks of `mesh`."""
    between: Placement = Shard(1) if sequence else Replicate()
    trunk = model.model
    for layer in trunk.layers.children():
        assert isinstance(layer, Block)
        _split_sinks(layer.self_attn, mesh)
        if isinstance(layer.mlp, SparseMLP):
            _share_tokens(layer.mlp, mesh, between)
        parallelize_module(layer, mesh, _plan_of(layer, between, sequence=sequence))
    ends: dict[str, ParallelStyle] = {}
    if trunk.embed_tokens is not None:
        ends["model.embed_tokens"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        )
    if trunk.norm is not None and sequence:
        ends["model.norm"] = ShardedNorm()
    parallelize_module(model, mesh, ends)
    if model.lm_head is not None:
        distribute(model.lm_head, mesh, weight=Shard(0))
    model.vocabulary_head = VocabParallelHead(mesh, model.config.vocab_size)
    if sequence and model.noise is not None:
        model.noise.share = partial(_part_of_rows, mesh)


def _part_of_rows(mesh: DeviceMesh, values: Tensor) -> Tensor:
    """`[B, T]` -> `[B, S]`: the tokens whose activations this rank holds."""
    return values.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def _split_sinks(attention: nn.Module, mesh: DeviceMesh) -> None:
    """The sinks of the heads that this rank has."""
    assert isinstance(attention, Attention)
    if attention.sinks is not None:
        distribute(attention, mesh, sinks=Shard(0))
        attention.to_local = local_tensor


def _share_tokens(mixture: SparseMLP, mesh: DeviceMesh, between: Placement) -> None:
    """Let each rank route its part of every row's tokens; `between`: how what enters and leaves is
    shared.
    """
    distribute(mixture.gate, mesh, weight=Replicate(), bias=Replicate())
    mixture.gate.to_local = _of_other_tokens
    mixture.forward = partial(_mixture_of_parts, mixture, mesh, between)  # type: ignore[method-assign]


def _of_other_tokens(weight: Tensor) -> Tensor:
    """A weight that is whole on each rank, whose gradients, each of other tokens, add up."""
    if not isinstance(weight, DTensor):
        return weight
    held: Tensor = weight.to_local(grad_placements=[Partial()])
    return held


def _mixture_of_parts(
    mixture: SparseMLP,
    mesh: DeviceMesh,
    between: Placement,
    x: Tensor,
    routing: LayerRouting | None = None,
) -> Tensor:
    """x and the result `[B, T, D]`, or this rank's part of them as `between` says. The expert that
    all tokens share is split as a dense feed-forward is, and sees them all.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [between], run_check=False)
    part = x.redistribute(placements=[Shard(1)]).to_local()  # [B, T / ranks, D]
    out = mixture.routed(part, routing)
    if mixture.shared_experts is not None:
        out = out + mixture.shared_experts(x.redistribute(placements=[Replicate()]))
    parts = DTensor.from_local(
        out, mesh, [Shard(1)], run_check=False, shape=x.shape, stride=x.stride()
    )
    made: Tensor = parts.redistribute(placements=[between]).to_local()
    return made


def _feed_forward(name: str, between: Placement) -> dict[str, ParallelStyle]:
    return {
        f"{name}.gate_proj": ColumnParallelLinear(),
        f"{name}.up_proj": ColumnParallelLinear(),
        f"{name}.down_proj": RowParallelLinear(output_layouts=between),
    }


def _plan_of(layer: Block, between: Placement, *, sequence: bool) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}": ColumnParallelLinear() for name in ("q_proj", "k_proj", "v_proj")},
        "self_attn.o_proj": RowParallelLinear(output_layouts=between),
    }
    mixture = layer.mlp if isinstance(layer.mlp, SparseMLP) else None
    if mixture is None:
        plan |= _feed_forward("mlp", between)
    elif mixture.shared_experts is not None:
        plan |= _feed_forward("mlp.shared_experts", Shard(1))
    if layer.self_attn.q_norm is not None:
        # Per head, one weight is shared by the heads of all ranks.
        plan |= {
            f"self_attn.{name}": (
                ShardedNorm(sequence_dim=HEADS, use_local_output=True)
                if layer.self_attn.norms_heads
                else WidthParallelNorm()
            )
            for name in ("q_norm", "k_norm")
        }
    if sequence:
        inputs, norms = {"self_attn": 5} | ({"mlp": 1} if mixture is None else {}), layer.norms
        before = (norms.before_attention, norms.before_mlp)
        after = (norms.after_attention, norms.after_mlp)
        plan |= {name: ShardedNorm() for name in before if name is not None}
        plan |= {name: ShardedNorm(use_local_output=True) for name in after if name is not None}
        plan |= {
            name: PrepareModuleInput(
                input_layouts=(between, *[None] * (count - 1)),
                desired_input_layouts=(Replicate(), *[None] * (count - 1)),
            )
            for name, count in inputs.items()
        }
    return plan
