"""Matrices in bfloat16 as oneDNN packs them, for processors that multiply blocks of bfloat16
numbers (AMX). Sums are float32; what goes in and comes out is rounded to bfloat16, as on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLE = (48, 32)
"""Rows and columns of the matrix that packed products are tried with."""


def multiplies_bfloat16() -> bool:
    """Whether this processor has AMX for bfloat16, and this build of torch packed products for it
    that are right.
    """
    if not torch.cpu.get_capabilities().get("amx_bf16"):
        return False
    weight = torch.arange(SAMPLE[0] * SAMPLE[1]).view(SAMPLE).remainder(7) - 3.0
    x = torch.arange(2 * SAMPLE[1]).view(2, -1).remainder(5) - 2.0
    try:
        found = BFloat16Linear(weight)(x)
    except (AttributeError, RuntimeError):  # operators that are meant for torch alone
        return False
    return torch.equal(found, x @ weight.T)  # small whole numbers are exact


class BFloat16Linear(nn.Module):
    """A linear layer over packed weights `[O, D]` with a bias `[O]`: `[..., D]` in any type ->
    `[..., O]` in `out`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, out: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        half = weight.detach().to(torch.bfloat16)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(half)
        self._bias = None if bias is None else bias.detach().to(torch.bfloat16)
        self._out = out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.to(torch.bfloat16), self._packed, self._bias, "none", [], ""
        )
        return out.to(self._out)
