"""A kernel as those that torch has for GPUs, of what it has for CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot.parallel.fused_blocks import FusedKernel, KernelInputs


def attend(block: KernelInputs) -> tuple[Tensor, Tensor]:
    q, k, v, added, causal = block
    assert q.shape[1] == k.shape[1] == v.shape[1]
    out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=added
    )
    return out, logsum


def differentiate(gradient: Tensor, block: KernelInputs, out: Tensor, logsum: Tensor) -> Any:
    q, k, v, added, causal = block
    assert gradient.is_contiguous()
    assert out.is_contiguous()
    assert logsum.is_contiguous()
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, logsum, 0.0, causal, attn_mask=added
    )


STAND_IN = FusedKernel("a CPU's", attend, differentiate)
