"""Attention as the decoder calls it on this device, forward and gradients, against float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.record import Asked, Record
from ingot.models.native.attention import attention_masks, make_attn_fns
from tests import tolerances


class Case(NamedTuple):
    """Heads, key/value heads, size of a head, window, documents in a row, sinks."""

    heads: int
    groups: int
    size: int
    window: int | None = None
    packed: bool = False
    sinks: bool = False


CASES = {
    "causal": Case(4, 4, 64),
    "grouped heads": Case(8, 2, 128),
    "packed": Case(8, 2, 64, packed=True),
    "windowed": Case(4, 4, 128, window=100),
    "packed and windowed": Case(8, 2, 128, window=100, packed=True),
    "narrow heads, packed": Case(4, 2, 24, packed=True),
    "sinks, windowed": Case(8, 2, 64, window=100, sinks=True),
}
BOUNDS = {torch.float32: tolerances.GRADIENTS_FP32, torch.bfloat16: 2 * tolerances.SHARED_ROWS_BF16}
"""Relative differences in norm, in bf16 of the same rounded inputs: in backward twice as many
rounded products follow each other as in forward. A key too many is a hundred times that.
"""


def run(asked: Asked, record: Record) -> None:
    # A mask, a type and a shape are a kernel of its own.
    torch._dynamo.config.recompile_limit = 64
    for name, case in CASES.items():
        for dtype, bound in BOUNDS.items():
            what = f"{name}, {str(dtype).removeprefix('torch.')}"
            with record.trying(what):
                for part, difference in differences(case, dtype, asked).items():
                    record.within(f"{what}: {part}", difference, bound)


def differences(case: Case, dtype: torch.dtype, asked: Asked) -> dict[str, float]:
    """Of the output and of each gradient to float64, relative, in norm."""
    # No multiple of a block, with documents that end inside of one.
    rows, length = (2, 40) if asked.tiny else (2, 1000)
    window = 7 if asked.tiny and case.window else case.window
    given, positions, segments = inputs(case, dtype, rows, length, asked.device)
    mask = attention_masks(segments, length, [window], asked.device)[window]
    weights = torch.randn(given["q"].shape, generator=torch.Generator().manual_seed(1))
    weights = weights.to(asked.device)
    found = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    wanted = {name: tensor.double().requires_grad_() for name, tensor in given.items()}
    out = make_attn_fns(positions, segments, [window])[window](**found)
    exact = reference(wanted, mask)
    (out.double() * weights).sum().backward()
    (exact * weights).sum().backward()
    parts = {"output": relative(out, exact)}
    for name, tensor in found.items():
        assert tensor.grad is not None, f"no gradient of {name}"
        parts[f"gradient of {name}"] = relative(tensor.grad, wanted[name].grad)
    return parts


def inputs(
    case: Case, dtype: torch.dtype, rows: int, length: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """q `[B, H, T, E]`, k and v `[B, K, T, E]`, sinks `[H]`; positions and segments `[B, T]`."""
    generator = torch.Generator().manual_seed(0)
    counts = {"q": case.heads, "k": case.groups, "v": case.groups}
    given = {
        name: torch.randn(rows, count, length, case.size, generator=generator)
        for name, count in counts.items()
    }
    if case.sinks:
        given["sinks"] = torch.randn(case.heads, generator=generator)
    segments = None
    if case.packed:
        segments = torch.ones(rows, length, dtype=torch.int64)
        segments[0, length // 5 :], segments[0, length // 2 :] = 2, 3
        segments[1, length - 13 :], segments[1, length - 3 :] = 2, 0
    positions = torch.arange(length).expand(rows, length)
    moved = {name: tensor.to(device, dtype) for name, tensor in given.items()}
    return moved, positions.to(device), None if segments is None else segments.to(device)


def reference(given: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    """Every score, in float64; a sink is one more score without a value."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    groups, length = k.shape[1], q.shape[2]
    k, v = (tensor.repeat_interleave(q.shape[1] // groups, 1) for tensor in (k, v))
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)  # [B, H, T, T]
    if "sinks" in given:
        sinks = given["sinks"].view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    return scores.softmax(-1)[..., :length] @ v


def relative(found: Tensor, exact: Tensor | None) -> float:
    """The difference in norm; infinite where either has no finite number."""
    assert exact is not None
    found, exact = found.detach().double(), exact.detach().double()
    value = float((found - exact).norm() / exact.norm())
    return value if value == value else float("inf")
