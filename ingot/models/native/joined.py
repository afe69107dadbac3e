"""A decoder's layers in fewer and larger operations, for answering requests on a GPU: there a step
of few tokens takes as long as its kernels are many, not as long as they work.

Matrices with the same input are one matrix, queries and keys are rotated together, and norms read
and write the type of the weights, though they compute in float32 as before. No weight is changed.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.models.native.decoder import Block, Decoder, FeedForward, RMSNorm
from ingot.models.native.packed import (
    ComplexRotation,
    TwoPartBlock,
    is_plain,
    put_pairs_together,
)
from ingot.models.native.rope import Rope


def _join(*linears: nn.Linear) -> nn.Linear:
    """One product in place of several with the same input."""
    weight = torch.cat([linear.weight for linear in linears])
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return made


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """As the norm, by one kernel in place of four: it rounds what it gives, and nothing before."""
    return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


class JoinedBefore(nn.Module):
    """As `BeforeAttention`, in one product and, without norms of heads, one rotation."""

    def __init__(self, block: Block, head_dim: int) -> None:
        super().__init__()
        attention, rope = block.self_attn, block.rope
        assert rope is not None
        self.norm: RMSNorm = getattr(block, block.norms.before_attention or "")
        self.q_norm, self.k_norm, self.head_dim = attention.q_norm, attention.k_norm, head_dim
        put_pairs_together(attention, rope, head_dim)
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        self.heads = [linear.out_features // head_dim for linear in linears]
        self.qkv_proj = _join(*linears)

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(_normed(self.norm, x)).unflatten(-1, [-1, self.head_dim])
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = heads.split(self.heads, dim=2)  # [B, T, H or K, E]
            q, k = (
                _rotated(_normed(norm, part), rotation)
                for norm, part in ((self.q_norm, q), (self.k_norm, k))
            )
        else:
            both, v = heads.split([sum(self.heads[:2]), self.heads[2]], dim=2)
            q, k = _rotated(both, rotation).split(self.heads[:2], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class JoinedAfter(nn.Module):
    """As `AfterAttention`."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        mlp = cast("FeedForward", block.mlp)
        self.norm: RMSNorm = getattr(block, block.norms.before_mlp or "")
        self.o_proj, self.down_proj = block.self_attn.o_proj, mlp.down_proj
        self.gate_up_proj = _join(mlp.gate_proj, mlp.up_proj)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(_normed(self.norm, x)).chunk(2, dim=-1)  # [B, T, F]
        out: Tensor = x + self.down_proj(functional.silu(gate).mul_(up))
        return out


def _rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the first R channels of x `[B, T, H, E]`, which lie in pairs, by complex
    `[B, T, 1, R/2]`; computed in float32.
    """
    size = 2 * rotation.shape[3]
    pairs = torch.view_as_complex(x[..., :size].float().unflatten(-1, [-1, 2]))
    turned = torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


@torch.no_grad()
def join_layers(model: Decoder) -> None:
    """Replace the layers of a Llama (`is_plain`), one by one; the model can then only generate."""
    rotations: dict[Rope | None, ComplexRotation] = {
        rope: ComplexRotation() for rope in set(model.config.ropes)
    }
    for name in [name for name, _ in model.model.layers.named_children()]:
        layer = cast("Block", model.model.layers.get_submodule(name))
        if is_plain(layer, model.config) and _is_plain_inside(layer):
            before, after = JoinedBefore(layer, model.config.head_dim), JoinedAfter(layer)
            joined = TwoPartBlock(layer, rotations[layer.rope], before, after)
            setattr(model.model.layers, name, joined.eval())


def _is_plain_inside(layer: Block) -> bool:
    """Whether matrices are in memory as they are, all in one type with the norms."""
    kinds = {type(part) for part in layer.modules() if isinstance(part, nn.Linear)}
    return kinds == {nn.Linear} and len({each.dtype for each in layer.parameters()}) == 1
