"""How fast torch's attention kernels are forward and backward on rows as the 1B and the 8B model
have them, causal, in bf16; and on packed rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.ceilings import seconds
from benchmarks.gpu.record import Asked, Record
from ingot.models.native.attention import make_flex_attn_fns

DOCUMENTS = 4
NO_KERNEL = "No available kernel"


class Shape(NamedTuple):
    rows: int
    heads: int
    groups: int
    length: int
    size: int


SHAPES = {"1B": Shape(8, 32, 8, 4096, 64), "8B": Shape(2, 32, 8, 4096, 128)}
TINY = Shape(1, 2, 1, 64, 8)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(asked: Asked, record: Record) -> None:
    for name, shape in SHAPES.items():
        given = inputs(TINY if asked.tiny else shape, asked)
        for kernel, attention in kernels(given[0], asked).items():
            what = f"{name}, {kernel}"
            if kernel.startswith("flex") and not asked.cuda:
                record.not_run(what)
                continue
            with record.trying(what):
                try:
                    forward, both = times(attention, given, asked)
                except RuntimeError as error:
                    if NO_KERNEL not in str(error):
                        raise
                    record.not_run(what, "the kernel does not know such heads")
                    continue
                figures = {"forward_s": forward, "backward_s": both - forward}
                record.figures(**{what: figures})


def inputs(shape: Shape, asked: Asked) -> list[Tensor]:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`."""
    draw = torch.Generator(asked.device).manual_seed(0)
    made = []
    for heads in (shape.heads, shape.groups, shape.groups):
        sizes = (shape.rows, shape.length, heads, shape.size)
        tensor = torch.randn(sizes, generator=draw, device=asked.device, dtype=torch.float32)
        made.append(tensor.to(torch.bfloat16).transpose(1, 2).requires_grad_())
    return made


def kernels(q: Tensor, asked: Asked) -> dict[str, Attention]:
    """Of shared heads, as the kernel has them and repeated before it."""
    rows, length = q.shape[0], q.shape[2]
    places = torch.arange(length, device=asked.device)
    segments = (places // -(-length // DOCUMENTS) + 1).expand(rows, length).contiguous()
    plain = scaled_dot_product_attention
    named = BACKENDS if asked.cuda else {"default": None}
    found: dict[str, Attention] = {}
    for name, backend in named.items():
        found[name] = partial(chosen, backend, partial(plain, is_causal=True, enable_gqa=True))
        found[f"{name}, heads repeated"] = partial(chosen, backend, repeated)
    for name, packed in {"flex": None, f"flex, {DOCUMENTS} documents": segments}.items():
        found[name] = make_flex_attn_fns(packed, length, [None], asked.device)[None]
    return found


def chosen(
    backend: SDPBackend | None, attention: Attention, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    if backend is None:
        return attention(q, k, v)
    with sdpa_kernel(backend):
        return attention(q, k, v)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(times, dim=1) for one in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def times(attention: Attention, given: list[Tensor], asked: Asked) -> tuple[float, float]:
    """Seconds of forward, and of both."""
    weights = torch.randn_like(given[0])

    def forward() -> None:
        with torch.no_grad():
            attention(*given)

    def both() -> None:
        torch.autograd.grad(attention(*given), given, weights)

    return seconds(forward, asked), seconds(both, asked)
