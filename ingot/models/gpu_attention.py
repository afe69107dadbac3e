"""Attention over packed rows and windows on a GPU by torch's flex attention: blocks that nobody may
see are never computed.

Its kernel is compiled at its first use. On a CPU the same code runs forward only, uncompiled, which
is how its masks are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Numbers of row, head, query and key -> whether that query may look at that key."""


def flexible(
    segments: Tensor | None, length: int, windows: Iterable[int | None], device: torch.device
) -> dict[int | None, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """How the layers of each window look at rows of `length` tokens; `segments` `[B, T]` numbers
    the documents of packed ones.
    """
    looks: dict[int | None, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
    for window in windows:
        if window not in looks:
            rows = None if segments is None else len(segments)
            mask = create_block_mask(
                _visible(segments, window),
                rows,
                None,
                length,
                length,
                device=str(device),
                _compile=device.type == "cuda",
            )
            looks[window] = partial(_look, mask)
    return looks


def _visible(segments: Tensor | None, window: int | None) -> Visible:
    """Causal, within one document, and of it the last `window` tokens."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if segments is not None:
            seen = seen & (segments[row, query] == segments[row, key])
        return seen if window is None else seen & (query - key < window)

    return visible


def _look(mask: BlockMask, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]` -> `[B, H, T, E]`."""
    attention: Callable[..., Tensor] = _compiled() if q.device.type == "cuda" else flex_attention  # type: ignore[assignment]
    return attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _compiled() -> Callable[..., Tensor]:
    """One for all layers: the kernel knows a mask by its tensors."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled
