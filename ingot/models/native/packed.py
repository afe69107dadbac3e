"""A decoder's weights in half the bytes, for answering requests on an x86 CPU.

A product of a few rows with a large matrix takes as long as reading the matrix, and float32
kernels rearrange it in every call. Here each matrix is stored once, as float16 in the order that
FBGEMM reads it in; activations and sums stay float32. No weight is rounded by more than `TINY`: a
model whose weights are not float16 numbers is left as it is. Weights stored as bfloat16 are between
6e-5 and 65,504, and below that they are rounded by `TINY` at most.

To compute in bf16, on a processor with AMX, the layers' matrices are packed by oneDNN instead. What
enters a product and what leaves it is rounded, and attention of many queries; norms, rotations, the
sum over the layers, logits and what the cache keeps stay float32.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.base.malloc import mapping_blocks, return_freed_memory
from ingot.models.device import Compute
from ingot.models.native.attention import AttnFn
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import (
    Attention,
    AttentionCache,
    Block,
    Decoder,
    FeedForward,
)
from ingot.models.native.fbgemm import CHUNK_WEIGHTS, Float16Matrix, PackedLinear
from ingot.models.native.head import VocabularyHead
from ingot.models.native.onednn import BFloat16Linear, multiplies_bfloat16
from ingot.models.native.rope import Rope, Rotation

TINY = 2.0**-25
"""Half the distance between the smallest float16 numbers: the most that packing may change a
weight.
"""
PART_WEIGHTS = 2**23
"""Weights of a vocabulary's head that are packed together, in which they are copied twice."""
ENGINES = ("x86", "fbgemm")
INSTRUCTIONS = ("AVX2", "AVX512")
MANY_QUERIES = 64
"""From so many on rounding them pays in attention."""


def _pack(
    compute: Compute, *linears: nn.Linear, out: torch.dtype = torch.float32
) -> PackedLinear | BFloat16Linear:
    """One product in place of several with the same input. In bf16 it gives `out`."""
    weight = torch.cat([linear.weight for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if compute == "bf16":
        return BFloat16Linear(weight, bias, out)
    return PackedLinear(Float16Matrix(weight, bias))


class BeforeAttention(nn.Module):
    """Norm and projections of a layer, queries and keys rotated: x `[B, T, D]` and the rotation,
    complex `[B, T, 1, R/2]`, give q `[B, H, T, E]`, k and v `[B, K, T, E]`.

    Rotated channels lie in adjacent pairs, which is the order of complex numbers; scores are the
    same sums in another order. In bf16 many queries are given rounded.
    """

    def __init__(self, block: Block, head_dim: int, compute: Compute) -> None:
        super().__init__()
        attention, rope = block.self_attn, block.rope
        assert rope is not None
        self.norm = getattr(block, block.norms.before_attention or "")
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        put_pairs_together(attention, rope, head_dim)
        linears = attention.q_proj, attention.k_proj, attention.v_proj
        self.head_dim = head_dim
        self.heads = [linear.out_features // head_dim for linear in linears]
        self.qkv_proj = _pack(compute, *linears)
        self.rounded_from = MANY_QUERIES if compute == "bf16" else sys.maxsize

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(self.norm(x)).view(x.shape[0], x.shape[1], -1, self.head_dim)
        q, k, v = heads.split(self.heads, dim=2)  # [B, T, H or K, E]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        size = 2 * rotation.shape[3]
        for part in (q, k):
            torch.view_as_complex(part[..., :size].unflatten(-1, [-1, 2])).mul_(rotation)
        if x.shape[1] >= self.rounded_from:
            q = q.to(torch.bfloat16)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def put_pairs_together(attention: Attention, rope: Rope, head_dim: int) -> None:
    """Reorder the channels of queries and keys in place: the pairs (i, i + R/2) that are rotated
    become (2i, 2i + 1).
    """
    rotated = int(head_dim * rope.share)
    order = torch.arange(head_dim, device=attention.q_proj.weight.device)
    order[:rotated] = order[:rotated].view(2, -1).T.flatten()
    turned = attention.q_proj, attention.k_proj, attention.q_norm, attention.k_norm
    for parameter in (p for part in turned if part is not None for p in part.parameters()):
        heads = parameter.view(-1, head_dim, *parameter.shape[1:])
        parameter.copy_(heads[:, order].view_as(parameter))


class AfterAttention(nn.Module):
    """The rest of a layer: x `[B, T, D]` and what attention gave, `[B, H, T, E]`, give
    `[B, T, D]`.
    """

    def __init__(self, block: Block, compute: Compute) -> None:
        super().__init__()
        mlp, half = cast("FeedForward", block.mlp), torch.bfloat16
        self.norm = getattr(block, block.norms.before_mlp or "")
        self.o_proj = _pack(compute, block.self_attn.o_proj, out=half)
        self.gate_up_proj = _pack(compute, mlp.gate_proj, mlp.up_proj, out=half)
        self.down_proj = _pack(compute, mlp.down_proj, out=half)

    def forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)  # [B, T, F]
        out: Tensor = x + self.down_proj(functional.silu(gate).mul_(up))
        return out


class ComplexRotation:
    """`Rotation` as complex numbers, made once for all layers with the same positions."""

    def __init__(self) -> None:
        self._made: tuple[Rotation, Tensor] | None = None

    def of(self, rotation: Rotation) -> Tensor:
        """`[B, T, 1, R/2]`."""
        made = self._made
        if made is None or made[0] is not rotation:
            half = rotation.cos.shape[-1] // 2
            turned = torch.complex(rotation.cos[..., :half], rotation.sin[..., :half])
            made = self._made = rotation, turned.transpose(1, 2)
        return made[1]


class TwoPartBlock(nn.Module):
    """A layer of a Llama (`is_plain`) in two parts around attention, which are called as
    `BeforeAttention` and `AfterAttention`.
    """

    def __init__(
        self, block: Block, complex_rotation: ComplexRotation, before: nn.Module, after: nn.Module
    ) -> None:
        super().__init__()
        self.number, self.window, self.rope = block.number, block.window, block.rope
        self._complex, self.before, self.after = complex_rotation, before, after

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: Rotation,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """As `Block.forward`."""
        q, k, v = self.before(x, self._complex.of(rotation))
        if attn_fn is not None:
            mixed = attn_fn(q, k.to(q.dtype), v.to(q.dtype))
        else:
            assert cache is not None
            mixed = cache.attend(self.number, q, k, v)
        out: Tensor = self.after(x, mixed)
        return out


def is_plain(block: Block, config: DecoderConfig) -> bool:
    """Whether a layer has nothing but what the two parts of a `TwoPartBlock` compute."""
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
    """The vocabulary projection over packed weights `[V, D]`, in parts of some rows."""

    def __init__(self, weight: Tensor) -> None:
        parts = -(-weight.numel() // PART_WEIGHTS)
        self._height = -(-len(weight) // parts)  # alike, since small blocks are not found
        self._parts = [Float16Matrix(part) for part in weight.split(self._height)]
        self._linears = [PackedLinear(part) for part in self._parts]

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = [linear(hidden) for linear in self._linears]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can be asked for."""
        return all(part.numbers is not None for part in self._parts)

    def rows(self, tokens: Tensor) -> Tensor:
        """The weights of some tokens: `[B, T]` -> float32 `[B, T, D]`."""
        found = torch.empty(*tokens.shape, self._parts[0].shape[1])
        places = tokens // self._height
        for number in places.unique().tolist():
            here = places == number
            found[here] = self._parts[number].rows(tokens[here] - number * self._height)
        return found


class SharedEmbedding(nn.Module):
    """An embedding looked up in the packed head that it is tied to: tokens `[B, T]` -> float32
    `[B, T, D]`.
    """

    def __init__(self, head: PackedHead) -> None:
        super().__init__()
        self._head = head
        self.weight = _nothing()

    def forward(self, tokens: Tensor) -> Tensor:
        return self._head.rows(tokens)


def _nothing() -> nn.Parameter:
    """In place of a weight that nobody reads any more, but its device."""
    return nn.Parameter(torch.empty(0), requires_grad=False)


ReadLayer = Callable[[str, nn.Module], None]
"""Gives a layer of this number its weights."""


@torch.no_grad()
def pack_weights(
    model: Decoder, read: ReadLayer | None = None, *, compute: Compute = "fp32"
) -> bool:
    """Replace the weights of `model`, in float32 or bfloat16, by packed ones, matrix by matrix; it
    can then only generate, computing in `compute`. With `read` the layers are still on `meta`, and
    are read one after the other.
    Returns False where that would change weights, or where this processor or this build of torch
    has no such products. The model is then as it was; with `read` it is of no more use.
    """
    if not _has_kernel() or (compute == "bf16" and not multiplies_bfloat16()):
        return False
    if not _are_halves(model):
        return False
    with mapping_blocks():
        _pack_ends(model)
        rotations = {rope: ComplexRotation() for rope in set(model.config.ropes)}
        for name in [name for name, _ in model.model.layers.named_children()]:
            # Nothing else may hold a layer: its weights are freed before the next one is read.
            if read is not None:
                read(name, model.model.layers.get_submodule(name))
                if not _are_halves(model.model.layers.get_submodule(name)):
                    return False
            _pack_layer(model, name, rotations, compute)
            return_freed_memory()
    return True


def _pack_ends(model: Decoder) -> None:
    """Replace embedding and head."""
    embedding, tied = model.model.embed_tokens.weight, model.lm_head is None
    head = model.vocabulary_head = PackedHead(model.head_weight)
    if model.lm_head is not None:
        model.lm_head.weight = _nothing()
    model.model.embed_tokens = (
        SharedEmbedding(head) if tied and head.has_rows else HalfEmbedding(embedding)
    )
    model.model.norm.float()
    return_freed_memory()


def _pack_layer(
    model: Decoder, name: str, rotations: dict[Rope | None, ComplexRotation], compute: Compute
) -> None:
    """Replace a layer, or in one that is not plain its linear layers."""
    layer = cast("Block", model.model.layers.get_submodule(name))
    whole = {id(weight) for weight in _matrices(layer)}
    for parameter in layer.parameters():
        if id(parameter) not in whole:
            parameter.data = parameter.data.float()
    if is_plain(layer, model.config):
        # Between the small operators of a single token Python takes as long as these.
        before = without_python(BeforeAttention(layer, model.config.head_dim, compute))
        after = without_python(AfterAttention(layer, compute))
        setattr(model.model.layers, name, TwoPartBlock(layer, rotations[layer.rope], before, after))
        return
    for parent in list(layer.modules()):
        for leaf, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, leaf, _pack(compute, child))


def _has_kernel() -> bool:
    quantized, capability = torch.backends.quantized, torch.backends.cpu.get_cpu_capability()
    return quantized.engine in ENGINES and capability in INSTRUCTIONS


def _matrices(part: nn.Module) -> Iterator[Tensor]:
    for module in part.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield module.weight


def _are_halves(part: nn.Module) -> bool:
    """Whether all matrices can be packed, those on `meta` left out."""
    return all(_is_half(weight) for weight in _matrices(part) if not weight.is_meta)


def _is_half(weight: Tensor) -> bool:
    """Whether every weight is a number on this CPU that float16 has, too."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return all(
        bool(((part.half().float() - part.float()).abs() <= TINY).all())
        for part in weight.reshape(-1).split(CHUNK_WEIGHTS)
    )
