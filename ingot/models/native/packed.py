"""A decoder's weights in half the bytes, for answering requests on an x86 CPU.

A product of a few rows with a large matrix takes as long as reading the matrix, and float32
kernels rearrange it in every call. Here each matrix is stored once, as float16 in the order that
FBGEMM reads it in; activations and sums stay float32. No weight is rounded by more than `TINY`: a
model whose weights are not float16 numbers is left as it is. Weights stored as bfloat16 are between
6e-5 and 65,504, and below that they are rounded by `TINY` at most.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.models.device import return_freed_memory
from ingot.models.native.attention import AttnFn
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import AttentionCache, Block, Decoder, FeedForward
from ingot.models.native.head import VocabularyHead
from ingot.models.native.rope import Rope, Turns

TINY = 2.0**-25
"""Half the distance between the smallest float16 numbers: the most that packing may change a
weight.
"""
ENGINES = ("x86", "fbgemm")
INSTRUCTIONS = ("AVX2", "AVX512")
CHUNK_WEIGHTS = 2**22
"""Weights looked at together, so that a large matrix is not copied whole."""


class PackedLinear(nn.Module):
    """A linear layer over packed weights `[O, D]`: float32 `[..., D]` -> `[..., O]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach().float(), None if bias is None else bias.detach().float()
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


def _pack(*linears: nn.Linear) -> PackedLinear:
    """One product in place of several with the same input."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return PackedLinear(torch.cat(weights), torch.cat(biases) if biases else None)


class BeforeAttention(nn.Module):
    """Norm and projections of a layer, queries and keys rotated: x `[B, T, D]` and the rotation,
    complex `[B, T, 1, R/2]`, give q `[B, H, T, E]`, k and v `[B, K, T, E]`.

    Rotated channels lie in adjacent pairs, which is the order of complex numbers; scores are the
    same sums in another order.
    """

    def __init__(self, block: Block, head_dim: int) -> None:
        super().__init__()
        attention, rope = block.self_attn, block.rope
        assert rope is not None
        self.norm = getattr(block, block.norms.before_attention or "")
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        turned = (attention.q_proj, attention.k_proj, self.q_norm, self.k_norm)
        order = adjacent_pairs(rope, head_dim)
        for parameter in (p for part in turned if part is not None for p in part.parameters()):
            heads = parameter.view(-1, head_dim, *parameter.shape[1:])
            parameter.copy_(heads[:, order].view_as(parameter))
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        self.head_dim = head_dim
        self.heads = [linear.out_features // head_dim for linear in linears]
        self.qkv_proj = _pack(*linears)

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(self.norm(x)).view(x.shape[0], x.shape[1], -1, self.head_dim)
        q, k, v = heads.split(self.heads, dim=2)  # [B, T, H or K, E]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        size = 2 * rotation.shape[3]
        for part in (q, k):
            torch.view_as_complex(part[..., :size].unflatten(-1, [-1, 2])).mul_(rotation)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def adjacent_pairs(rope: Rope, head_dim: int) -> Tensor:
    """The order of a head's channels in which the pairs (i, i + R/2) are (2i, 2i + 1)."""
    rotated = int(head_dim * rope.share)
    order = torch.arange(head_dim)
    order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    return order


class AfterAttention(nn.Module):
    """The rest of a layer: x `[B, T, D]` and what attention gave, `[B, H, T, E]`, give
    `[B, T, D]`.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        mlp = cast("FeedForward", block.mlp)
        self.norm = getattr(block, block.norms.before_mlp or "")
        self.o_proj = _pack(block.self_attn.o_proj)
        self.gate_up_proj = _pack(mlp.gate_proj, mlp.up_proj)
        self.down_proj = _pack(mlp.down_proj)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)  # [B, T, F]
        out: Tensor = x + self.down_proj(functional.silu(gate).mul_(up))
        return out


class Rotation:
    """`Turns` as complex numbers, made once for all layers with the same positions."""

    def __init__(self) -> None:
        self._made: tuple[Turns, Tensor] | None = None

    def of(self, turns: Turns) -> Tensor:
        """`[B, T, 1, R/2]`."""
        made = self._made
        if made is None or made[0] is not turns:
            half = turns.cos.shape[-1] // 2
            turned = torch.complex(turns.cos[..., :half], turns.sin[..., :half])
            made = self._made = turns, turned.transpose(1, 2)
        return made[1]


class PackedBlock(nn.Module):
    """A layer of a Llama (`is_plain`) in two parts around attention. They run without Python, which
    between the small operators of a single token takes as long as these.
    """

    def __init__(self, block: Block, head_dim: int, rotation: Rotation) -> None:
        super().__init__()
        self.number, self.window, self.rope = block.number, block.window, block.rope
        self._rotation = rotation
        self.before = without_python(BeforeAttention(block, head_dim))
        self.after = without_python(AfterAttention(block))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        turns: Turns,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """As `Block.forward`."""
        q, k, v = self.before(x, self._rotation.of(turns))
        if attn_fn is not None:
            mixed = attn_fn(q, k, v)
        else:
            assert cache is not None
            mixed = cache.attend(self.number, q, k, v)
        out: Tensor = self.after(x, mixed)
        return out


def is_plain(block: Block, config: DecoderConfig) -> bool:
    """Whether a layer has nothing but what `PackedBlock` computes."""
    norms = config.norms
    return (
        type(block.mlp) is FeedForward
        and config.activation == "silu"
        and norms.before_attention is not None
        and norms.before_mlp is not None
        and norms.after_attention is None
        and norms.after_mlp is None
        and config.qk_norm in ("none", "head")
        and not config.norm_offset
        and not config.sinks
        and config.query_growth is None
        and config.query_scale == config.residual_scale == 1
        and block.rope is not None
        and not block.rope.interleaved
    )


def without_python(module: nn.Module) -> nn.Module:
    """The module as TorchScript, bit for bit the same; itself where torch or Python have that no
    more.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            made: nn.Module = torch.jit.script(module)
        except (AttributeError, OSError, RuntimeError):
            return module
    return made


class HalfEmbedding(nn.Module):
    """An embedding stored as float16 and looked up as float32: tokens `[B, T]` -> `[B, T, D]`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().half(), requires_grad=False)  # [V, D]

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight).float()


class PackedHead(VocabularyHead):
    """The vocabulary projection over packed weights."""

    def __init__(self, weight: Tensor) -> None:
        self._linear = PackedLinear(weight)

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits: Tensor = self._linear(hidden)
        return logits


@torch.no_grad()
def pack_weights(model: Decoder) -> bool:
    """Replace the weights of `model`, in float32 or bfloat16, by packed ones, matrix by matrix; it
    can then only generate, in float32.
    Returns False, and leaves the model as it is, where that would change weights, or where this
    processor or this build of torch has no such products.
    """
    if not _has_kernel() or not all(_is_half(weight) for weight in _matrices(model)):
        return False
    whole = {id(weight) for weight in _matrices(model)}
    for parameter in model.parameters():
        if id(parameter) not in whole:
            parameter.data = parameter.data.float()
    rotations = {rope: Rotation() for rope in set(model.config.ropes)}
    for name in [name for name, _ in model.model.layers.named_children()]:
        _pack_layer(model, name, rotations)
        return_freed_memory()
    model.vocabulary_head = PackedHead(model.head_weight)
    if model.lm_head is not None:
        # Nothing reads it any more, but its device.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.new_empty(0), requires_grad=False)
    model.model.embed_tokens = HalfEmbedding(model.model.embed_tokens.weight)
    return_freed_memory()
    return True


def _pack_layer(model: Decoder, name: str, rotations: dict[Rope | None, Rotation]) -> None:
    """Replace a layer, or in one that is not plain its linear layers."""
    layer = cast("Block", model.model.layers.get_submodule(name))
    if is_plain(layer, model.config):
        packed = PackedBlock(layer, model.config.head_dim, rotations[layer.rope])
        setattr(model.model.layers, name, packed)
        return
    for parent in list(layer.modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, leaf, _pack(child))


def _has_kernel() -> bool:
    quantized, capability = torch.backends.quantized, torch.backends.cpu.get_cpu_capability()
    return quantized.engine in ENGINES and capability in INSTRUCTIONS


def _matrices(model: Decoder) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield module.weight


def _is_half(weight: Tensor) -> bool:
    """Whether every weight is a number on this CPU that float16 has, too."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return all(
        bool(((part.half().float() - part.float()).abs() <= TINY).all())
        for part in weight.reshape(-1).split(CHUNK_WEIGHTS)
    )
