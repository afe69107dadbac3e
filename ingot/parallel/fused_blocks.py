"""Attention over a block of keys by the fused kernels that torch has for GPUs.

They never write scores down, and compute in the type of their inputs. Each is tried once on small
tensors of the kind at hand before it is used: one that fails there, or that gives other numbers
than plain products, is left out, and the next one is taken.

Shapes: as in `ingot.parallel.blockwise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.base.errors import one_line
from ingot.base.progress import say
from ingot.models.device import is_planned, kernel_type, prefers_cudnn_attention
from ingot.parallel.blockwise import (
    MASKED,
    BlockKernel,
    FlashKernel,
    MatmulKernel,
    PartialAttention,
    merge,
)

QUERIES, KEYS = 32, 8
"""What kernels with a mask want numbers of queries and keys to be multiples of."""
TRIED = 64
"""Queries and keys of the tensors that kernels are tried on."""
ROUNDING = 4
"""Units in the last place that results on them may differ by, by their norms; at least LEAST."""
LEAST = 1e-5

_aten = torch.ops.aten


class KernelInputs(NamedTuple):
    """What a kernel of torch is given: keys and values of each query head, and what is added to
    scores, `[B, H, P, S]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    added: Tensor | None
    causal: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> KernelInputs:
        return cls(q, _for_each_head(k, q), _for_each_head(v, q), _added(mask, q, k), causal)


@dataclass(frozen=True)
class FusedKernel(BlockKernel):
    """One of torch's kernels."""

    name: str
    attend: Callable[[KernelInputs], tuple[Tensor, Tensor]]
    """Output and log-sum over the block."""
    differentiate: Callable[[Tensor, KernelInputs, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """The gradient of the output, the block, output and log-sum over all keys -> gradients of q, k
    and v.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool
    ) -> PartialAttention:
        out, logsum = self.attend(KernelInputs.of(q, k, v, mask, causal))
        return PartialAttention(out.float(), logsum.view(out.shape[:3]))

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        whole: PartialAttention,
        mask: Tensor | None,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, out = (x.to(q.dtype).contiguous() for x in (gradient, whole.out))
        block = KernelInputs.of(q, k, v, mask, causal)
        dq, dk, dv = self.differentiate(gradient, block, out, whole.logsum.contiguous())
        return dq, _of_groups(dk, k), _of_groups(dv, v)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _of_groups(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient `[B, H, S, E]` of what `_for_each_head` makes of x `[B, K, S, E]`."""
    if gradient.shape == x.shape:
        return gradient
    summed: Tensor = gradient.unflatten(1, (x.shape[1], -1)).sum(2, dtype=torch.float32)
    return summed


def _added(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in additive form, `[B, H, P, S]`, in the type of q; not a copy for each head."""
    if mask is None:
        return None
    shape = *q.shape[:3], k.shape[2]
    added: Tensor = q.new_zeros(()).masked_fill(~mask, MASKED)
    return added.expand(shape)


def _flash(block: KernelInputs) -> tuple[Tensor, Tensor]:
    q, k, v, _, causal = block
    out, logsum, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out, logsum


def _flash_backward(gradient: Tensor, block: KernelInputs, out: Tensor, logsum: Tensor) -> Any:
    q, k, v, _, causal = block
    lengths, state = (None, None, q.shape[2], k.shape[2]), _no_random_state(q)
    return _aten._scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, out, logsum, *lengths, 0.0, causal, state, state
    )


def _cudnn(block: KernelInputs) -> tuple[Tensor, Tensor]:
    q, k, v, _, causal = block
    out, logsum, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, logsum


def _cudnn_backward(gradient: Tensor, block: KernelInputs, out: Tensor, logsum: Tensor) -> Any:
    q, k, v, _, causal = block
    lengths, state = (None, None, q.shape[2], k.shape[2]), _no_random_state(q)
    return _aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, out, logsum[..., None], state, state, None, *lengths, 0.0, causal
    )


def _efficient(block: KernelInputs) -> tuple[Tensor, Tensor]:
    q, k, v, added, causal = block
    out, logsum, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, added, True, 0.0, causal
    )
    return out, logsum


def _efficient_backward(gradient: Tensor, block: KernelInputs, out: Tensor, logsum: Tensor) -> Any:
    q, k, v, added, causal = block
    state, wanted = _no_random_state(q), [True, True, True, False]
    # In memory as the kernel writes outputs, heads after tokens: in bf16 it relies on that.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return _aten._scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, added, out, logsum, state, state, 0.0, wanted, causal
    )[:3]


def _no_random_state(q: Tensor) -> Tensor:
    """Of dropout, which there is none of."""
    return torch.zeros((), dtype=torch.int64, device=q.device)


FLASH = FusedKernel("flash", _flash, _flash_backward)
CUDNN = FusedKernel("cuDNN's", _cudnn, _cudnn_backward)
EFFICIENT = FusedKernel("memory-efficient", _efficient, _efficient_backward)


class Case(NamedTuple):
    """What decides whether a kernel can be used."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    shared: int
    size: int
    masked: bool


def kernel_for(q: Tensor, k: Tensor, mask: Tensor | None) -> BlockKernel:
    """The kernel for a block: on a GPU the fastest one that computes it correctly."""
    kind = kernel_type(q.device)
    if kind == "cpu":
        return FlashKernel()
    case = Case(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[3], mask is not None)
    if kind == "cuda":
        for kernel in _candidates(q, k, mask):
            if is_planned() or is_right(kernel, case):
                return kernel
    return MatmulKernel()


def _candidates(q: Tensor, k: Tensor, mask: Tensor | None) -> Iterator[FusedKernel]:
    """The kernels for such a block, the fastest first."""
    if mask is None and q.dtype == torch.bfloat16:
        # cuDNN's adds gradients up in any order, and torch gives it no other way.
        exact = torch.are_deterministic_algorithms_enabled()
        if not is_planned() and not exact and prefers_cudnn_attention(q.device):
            yield CUDNN
        yield FLASH
    if q.shape[2] % QUERIES == 0 and k.shape[2] % KEYS == 0:
        yield EFFICIENT


@cache
def is_right(kernel: FusedKernel, case: Case) -> bool:
    """Whether the kernel gives the numbers of plain products, forward and backward, for a small
    block of this kind, one of two that make up all keys.
    """
    generator = torch.Generator().manual_seed(0)

    def some(heads: int) -> Tensor:
        made = torch.randn(1, heads, TRIED, case.size, generator=generator)
        return made.to(case.device, case.dtype)

    q, gradient = some(case.heads), some(case.heads)
    k, v = some(case.shared), some(case.shared)
    mask = None
    if case.masked:  # the first queries see nothing of this block
        place = torch.arange(TRIED, device=case.device)
        mask = (place[:, None] >= place + TRIED // 4)[None, None]
    plain = MatmulKernel()
    other = plain.forward(q, some(case.shared), some(case.shared), None, False)

    def numbers(tried: BlockKernel, causal: bool) -> tuple[Tensor, ...]:
        part = tried.forward(q, k, v, mask, causal)
        whole = merge(plain.forward(q, k, v, mask, causal), other)
        return *merge(part, other), *tried.backward(gradient, q, k, v, whole, mask, causal)

    try:
        with torch.no_grad():
            apart = [
                (found.float() - wanted.float()).norm() / wanted.float().norm()
                for causal in ([False] if case.masked else [False, True])
                for found, wanted in zip(
                    *(numbers(tried, causal) for tried in (kernel, plain)), strict=True
                )
            ]
    except RuntimeError as error:
        return _left_out(kernel, case, one_line(error, 120))
    most = max(ROUNDING * torch.finfo(case.dtype).eps, LEAST)
    worst = float(torch.stack(apart).nan_to_num(torch.inf).max())
    return worst <= most or _left_out(kernel, case, f"it is {worst:.1g} off")


def _left_out(kernel: FusedKernel, case: Case, why: str) -> bool:
    say(
        f"{kernel.name} attention cannot be used between ranks that share rows, for"
        f" {str(case.dtype).removeprefix('torch.')} heads of {case.size}"
        f"{' with a mask' if case.masked else ''} ({why}); another one is, which may be slower"
    )
    return False
