"""The one function through which all attention goes, and the masks: who may look at whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ingot.models.cpu_attention import cpu_attention
from ingot.models.gpu_attention import flexible

Look = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q `[B, H, T, E]`, k and v `[B, K, T, E]` of one layer -> `[B, H, T, E]`: who may look at whom is
settled already.
"""
Attention = Callable[[Tensor, Tensor | None, Iterable[int | None]], dict[int | None, Look]]
"""positions and segments `[B, T]`, windows -> how the layers of each window look; made once for all
layers.
"""


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool `[T, T]`: each token sees those before it and itself, of them the last `window` (None:
    all).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def document_mask(segments: Tensor, window: int | None = None) -> Tensor:
    """Bool `[B, 1, T, T]`: causal, within one document (equal `segments` `[B, T]`), and of it the
    last `window` tokens (None: all).
    """
    return (segments[:, None, :, None] == segments[:, None, None, :]) & causal_mask(
        segments.shape[1], window, segments.device
    )


def masks(
    segments: Tensor | None, length: int, windows: Iterable[int | None], device: torch.device
) -> dict[int | None, Tensor | None]:
    """The mask of each window, for rows of `length` tokens; None where plain causal attention says
    the same.

    Made once for all layers; a window that holds the whole row shares the mask of those without.
    """
    made: dict[int | None, Tensor | None] = {}
    answer: dict[int | None, Tensor | None] = {}
    for window in windows:
        reach = window if window is not None and window < length else None
        if reach not in made and segments is None:
            made[reach] = None if reach is None else causal_mask(length, reach, device)
        elif reach not in made and segments is not None:
            made[reach] = document_mask(segments, reach)
        answer[window] = made[reach]
    return answer


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention.

    q `[B, H, T, E]`; k, v `[B, K, S, E]` with H a multiple of K; `mask` bool, broadcast to `[B, H,
    T, S]`, True where a query may look; None for plain causal attention. Returns `[B, H, T, E]`. In
    training, a query may look at itself at least.
    """
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if (
        training
        and q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.shape[2] == k.shape[2]
    ):
        mixed: Tensor = cpu_attention(
            q, k, v, None if mask is None else mask.view(-1, 1, *mask.shape[-2:])
        )
        return mixed
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def dense(
    positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
) -> dict[int | None, Look]:
    """Attention where every rank has whole rows."""
    windows, length = set(windows), positions.shape[1]
    if positions.device.type == "cuda" and (
        segments is not None or any(window is not None and window < length for window in windows)
    ):
        return flexible(segments, length, windows, positions.device)
    seen = masks(segments, length, windows, positions.device)
    return {window: partial(attend, mask=mask) for window, mask in seen.items()}
