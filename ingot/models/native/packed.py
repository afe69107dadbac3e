"""A decoder's weights in half the bytes, for answering requests on an x86 CPU.

A product of a few rows with a large matrix takes as long as reading the matrix, and float32
kernels rearrange it in every call. Here each matrix is stored once, as float16 in the order that
FBGEMM reads it in; activations and sums stay float32. No weight is rounded by more than `TINY`: a
model whose weights are not float16 numbers is left as it is. Weights stored as bfloat16 are between
6e-5 and 65,504, and below that they are rounded by `TINY` at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.models.device import return_freed_memory
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import VocabularyHead

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
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return out


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
    """Replace the weights of `model` by packed ones, matrix by matrix; it can then only generate.
    Returns False, and leaves the model as it is, where that would change weights, or where this
    processor or this build of torch has no such products.
    """
    if not _has_kernel() or not all(_is_half(weight) for weight in _matrices(model)):
        return False
    for layer in model.model.layers.children():
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child.weight, child.bias))
        return_freed_memory()
    model.vocabulary_head = PackedHead(model.head_weight)
    if model.lm_head is not None:
        # Nothing reads it any more, but its device.
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.new_empty(0), requires_grad=False)
    model.model.embed_tokens = HalfEmbedding(model.model.embed_tokens.weight)
    return_freed_memory()
    return True


def _has_kernel() -> bool:
    quantized, capability = torch.backends.quantized, torch.backends.cpu.get_cpu_capability()
    return quantized.engine in ENGINES and capability in INSTRUCTIONS


def _matrices(model: Decoder) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield module.weight


def _is_half(weight: Tensor) -> bool:
    """Whether every weight is a float32 number on this CPU that float16 has, too."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return all(
        bool(((part.half().float() - part).abs() <= TINY).all())
        for part in weight.reshape(-1).split(CHUNK_WEIGHTS)
    )
