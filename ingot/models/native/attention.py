"""Attention of the native decoder: masks, the kernels for CPU and GPU, and the choice among them.

On a GPU, packed rows and windows use torch's flex attention, which skips fully masked blocks; its
kernel is compiled at first use. So do whole rows where bits must come again: the gradients of the
other kernels are added up in any order. On a CPU, training uses `cpu_attention`, in float32 where
rows are long: a block of queries is multiplied with all its visible keys at once, in products that
fit the processor's cache, and keys of other documents are skipped. In bf16 scores are rounded
before the softmax, which computes in float32. It takes 0.5 to 0.8 of the time of torch's flash
kernel there, and is registered as an operator so that the compiler leaves it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Indices of row, head, query and key -> whether the query attends to the key (a `mask_mod`)."""


def make_flex_attn_fns(
    segments: Tensor | None, length: int, windows: Iterable[int | None], device: torch.device
) -> dict[int | None, Callable[..., Tensor]]:
    """The attention function of each window for rows of `length` tokens; `segments` `[B, T]`
    numbers the documents of packed rows.
    """
    attn_fns: dict[int | None, Callable[..., Tensor]] = {}
    for window in windows:
        if window not in attn_fns:
            rows = None if segments is None else len(segments)
            make = create_block_mask if device.type == "cpu" else _compiled_block_mask()
            mask = make(_visible(segments, window), rows, None, length, length, str(device))
            attn_fns[window] = partial(_flex_attend, mask)
    return attn_fns


def _visible(segments: Tensor | None, window: int | None) -> MaskFunction:
    """The mask function: causal, within one document, at most the last `window` tokens."""

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if segments is not None:
            seen = seen & (segments[row, query] == segments[row, key])
        return seen if window is None else seen & (query - key < window)

    return visible


def _flex_attend(
    mask: BlockMask, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, sinks `[H]` -> `[B, H, T, E]`."""
    attention: Callable[..., Tensor] = flex_attention
    if q.device.type == "cuda":
        # Not the kernel for few queries, which rows of fewer than 128 tokens would get: it is for
        # generation, and has no configuration for those of grouped heads.
        attention = partial(_compiled(), kernel_options={"BACKEND": "TRITON"})
    grouped = q.shape[1] != k.shape[1]
    if sinks is None:
        return attention(q, k, v, block_mask=mask, enable_gqa=grouped)
    out, logsum = attention(q, k, v, block_mask=mask, enable_gqa=grouped, return_lse=True)
    # A further score, without a value, divides by so much more.
    kept: Tensor = out * (logsum - sinks.float()[:, None]).sigmoid()[..., None].to(out.dtype)
    return kept


@cache
def _compiled() -> Callable[..., Tensor]:
    """Compiled once for all layers and masks: a mask is an argument of the kernel."""
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


@cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    """Once for all documents: compiled, it holds no mask of each token."""
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled


BLOCK = 128
"""Queries that are computed together."""


class QueryBlock(NamedTuple):
    """What is computed together, so that it stays in the processor's cache: queries of a row, and
    the scores of short rows.
    """

    queries: int
    scores: int


BLOCKS = {torch.bfloat16: QueryBlock(BLOCK, 2**20), torch.float32: QueryBlock(64, 2**18)}
"""By the type of queries and keys, as measured."""


def _blocks(mask: Tensor | None, length: int, queries: int) -> Iterator[tuple[int, int, int]]:
    """(first key, first query, end of both) for each block of queries of some rows. `mask` bool
    `[..., T, T]`; None for plain causal attention.
    """
    for first in range(0, length, queries):
        end = min(first + queries, length)
        if mask is None:
            yield 0, first, end
        else:
            seen = mask[..., first:end, :end].flatten(0, -2).any(0)
            yield int(seen.byte().argmax()), first, end


def _probabilities(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Attention probabilities `[N * K, G * t, S]` for scaled queries `[N * K, G * t, E]` and keys
    `[N * K, S, E]` of N rows; `bias` `[N or 1, 1, 1, t, S or fewer]` is added to the scores of the
    last keys.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    rows, (queries, keys) = bias.shape[0], bias.shape[-2:]
    scores.view(rows, len(q) // rows, -1, queries, k.shape[1])[..., -keys:].add_(bias)
    return torch.softmax(scores, dim=-1, dtype=scores.dtype)


def _bias(mask: Tensor | None, start: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
    """0 where queries `first` to `end` see keys `start` to `end`, else minus infinity; for plain
    causal attention only over the last `end - first` keys. Added in a tenth of the time that
    `masked_fill_` takes.
    """
    if mask is None:
        return torch.full((1, 1, 1, end - first, end - first), -math.inf, dtype=dtype).triu_(1)
    seen = mask[:, :, None, first:end, start:end]
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -math.inf)


def _rows_together(q: Tensor, mask: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Rows of q `[B, H, T, E]` that are computed at once, and their mask."""
    batch, heads, length, _ = q.shape
    queries, scores = BLOCKS[q.dtype]
    count = max(1, scores // max(1, heads * min(length, queries) * length))
    for first in range(0, batch, count):
        rows = slice(first, first + count)
        yield rows, mask if mask is None or len(mask) == 1 else mask[rows]


def _flat(x: Tensor) -> Tensor:
    """`[N, K, ..., E]` -> `[N * K, everything between, E]`."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, mask bool `[B or 1, 1, T, T]` or None for causal ->
    `[B, H, T, E]`, stored as `[B, T, H, E]`.
    """
    _, _, length, size = q.shape
    groups = k.shape[1]
    out = empty_heads_like(q)
    scaled = (q * size**-0.5).unflatten(1, (groups, -1))  # [B, K, G, T, E]
    mixed = out.unflatten(1, (groups, -1))
    for rows, seen in _rows_together(q, mask):
        keys, values = _flat(k[rows]), _flat(v[rows])  # [N * K, T, E]
        for start, first, end in _blocks(seen, length, BLOCKS[q.dtype].queries):
            part = _flat(scaled[rows, :, :, first:end])  # [N * K, G * t, E]
            bias = _bias(seen, start, first, end, q.dtype)
            p = _probabilities(part, keys[:, start:end], bias)
            target = mixed[rows, :, :, first:end]  # [N, K, G, t, E]
            target.copy_(torch.bmm(p, values[:, start:end]).view(target.shape))
    return out


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Attention probabilities are recomputed, which costs less than
    storing them.
    """
    _, _, length, size = q.shape
    groups, scale = k.shape[1], size**-0.5
    dq, dk, dv = empty_heads_like(q), empty_heads_like(k), empty_heads_like(v)
    scaled, grad_groups, dq_groups = (x.unflatten(1, (groups, -1)) for x in (q * scale, grad, dq))
    for rows, seen in _rows_together(q, mask):
        keys, values = _flat(k[rows]), _flat(v[rows])  # [N * K, T, E]
        sum_k, sum_v = torch.zeros(2, *keys.shape)
        for start, first, end in _blocks(seen, length, BLOCKS[q.dtype].queries):
            part = _flat(scaled[rows, :, :, first:end])  # [N * K, G * t, E]
            g = _flat(grad_groups[rows, :, :, first:end])
            bias = _bias(seen, start, first, end, q.dtype)
            p = _probabilities(part, keys[:, start:end], bias)
            sum_v[:, start:end] += torch.bmm(p.transpose(1, 2), g)
            ds = torch._softmax_backward_data(
                torch.bmm(g, values[:, start:end].transpose(1, 2)), p, -1, p.dtype
            )
            target = dq_groups[rows, :, :, first:end]  # [N, K, G, t, E]
            target.copy_((torch.bmm(ds, keys[:, start:end]) * scale).view(target.shape))
            sum_k[:, start:end] += torch.bmm(ds.transpose(1, 2), part)
        dk[rows], dv[rows] = sum_k.view_as(k[rows]), sum_v.view_as(v[rows])
    return dq, dk, dv


def empty_heads_like(x: Tensor) -> Tensor:
    """An uninitialised `[B, H, T, E]` stored as `[B, T, H, E]`, so that the next product needs no
    copy.
    """
    batch, heads, length, size = x.shape
    return x.new_empty(batch, length, heads, size).transpose(1, 2)


def _save_inputs(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *cpu_attention_backward(grad, *ctx.saved_tensors), None


def _no_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("attention by blocks on a CPU has no second derivative")


def cpu_operator(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[..., None] | None = None,
) -> Any:
    """The function as one operator, whole in compiled code and in plans. As `torch.library`'s
    decorator `custom_op` makes it, which at the first call imports the compiler.
    """
    name = f"ingot::cpu{function.__name__}"
    torch.library.define(
        name,
        torch.library.infer_schema(function, mutates_args=()),
        tags=torch.Tag.pt2_compliant_tag,
    )
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)
    torch.library.register_autograd(name, backward, setup_context=save)
    return getattr(torch.ops.ingot, f"cpu{function.__name__}").default


cpu_attention_backward = cpu_operator(
    _attention_backward,
    lambda grad, q, k, v, mask: tuple(map(empty_heads_like, (q, k, v))),
    _no_backward,
)
cpu_attention = cpu_operator(
    _attention, lambda q, k, v, mask: empty_heads_like(q), _backward, _save_inputs
)


AttnFn = Callable[..., Tensor]
"""q `[B, H, T, E]`, k and v `[B, K, T, E]` of one layer -> `[B, H, T, E]`; the mask is part of the
function. With `sinks` `[H]`, a score for each head that takes part in its softmax and has no value.
"""
AttnFnFactory = Callable[[Tensor, Tensor | None, Iterable[int | None]], dict[int | None, AttnFn]]
"""positions and segments `[B, T]`, windows -> the attention function of each window, made once for
all layers.
"""


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Bool `[T, T]`: each token sees itself and earlier tokens, at most the last `window` (None:
    all).
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal if window is None else causal.triu(1 - window)


def document_mask(segments: Tensor, window: int | None = None) -> Tensor:
    """Bool `[B, 1, T, T]`: causal within one document (equal `segments` `[B, T]`), at most the last
    `window` tokens (None: all).
    """
    return (segments[:, None, :, None] == segments[:, None, None, :]) & causal_mask(
        segments.shape[1], window, segments.device
    )


def attention_masks(
    segments: Tensor | None, length: int, windows: Iterable[int | None], device: torch.device
) -> dict[int | None, Tensor | None]:
    """The mask of each window for rows of `length` tokens; None where plain causal attention is
    equivalent.

    Made once for all layers; a window as long as the row shares the mask of unlimited layers.
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Scaled dot-product attention.

    q `[B, H, T, E]`; k, v `[B, K, S, E]` with H a multiple of K; `mask` bool, broadcast to
    `[B, H, T, S]`, True where a query attends; None for plain causal attention. Returns
    `[B, H, T, E]`. In training every query must attend at least to itself.
    """
    if sinks is not None:
        return _attend_with_sinks(q, k, v, mask, sinks)
    if _is_for_blocks(q, k, v, mask):
        mixed: Tensor = cpu_attention(
            q, k, v, None if mask is None else mask.view(-1, 1, *mask.shape[-2:])
        )
        return mixed
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def _is_for_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether these are whole rows in training, of a type and size that `cpu_attention` is faster
    with: in float32 rows of 512 tokens, longer ones if there is a mask, which torch's kernel reads
    without skipping anything.
    """
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if not training or q.device.type != "cpu" or q.shape[2] != k.shape[2]:
        return False
    if q.dtype == torch.float32:
        return q.shape[3] >= 64 and 512 <= q.shape[2] < (1024 if mask is None else math.inf)
    return q.dtype in BLOCKS


def _attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor
) -> Tensor:
    """The same with a score `[H]` for each head beside those of the keys. All scores exist at once,
    in float32.
    """
    groups, seen = k.shape[1], mask
    if seen is None:
        seen = causal_mask(q.shape[2], None, q.device)
    seen = seen.view(-1, 1, 1, *seen.shape[-2:])  # [B or 1, 1, 1, T, S]
    grouped = (q * q.shape[3] ** -0.5).unflatten(1, (groups, -1))  # [B, K, G, T, E]
    scores = (grouped @ k[:, :, None].mT).float().masked_fill(~seen, -math.inf)
    sink = sinks.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    p = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]  # [B, K, G, T, S]
    return (p.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


def make_attn_fns(
    positions: Tensor, segments: Tensor | None, windows: Iterable[int | None]
) -> dict[int | None, AttnFn]:
    """The attention functions where every rank has whole rows; an `AttnFnFactory`."""
    windows, length = set(windows), positions.shape[1]
    if positions.device.type == "cuda" and (
        segments is not None
        or any(window is not None and window < length for window in windows)
        or torch.are_deterministic_algorithms_enabled()
    ):
        return make_flex_attn_fns(segments, length, windows, positions.device)
    seen = attention_masks(segments, length, windows, positions.device)
    return {window: partial(attend, mask=mask) for window, mask in seen.items()}
