"""The one function through which all attention goes, and the masks that keep packed documents apart."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def document_mask(segments: Tensor) -> Tensor:
    """Who may look at whom: bool `[B, 1, T, T]`, causal and within one document (equal `segments` `[B, T]`)."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return (segments[:, None, :, None] == segments[:, None, None, :]) & causal


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention.

    q `[B, H, T, E]`; k, v `[B, K, S, E]` with H a multiple of K; `mask` bool, broadcast to `[B, H, T, S]`, True where a
    query may look; None for plain causal attention. Returns `[B, H, T, E]`.
    """
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
