"""The peers' data: the same rows in the same order as ours, memory-mapped. Imports torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class TokenRows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens, each one document; the labels are the tokens themselves, which a model
    shifts.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._rows = np.load(task["rows"], mmap_mode="r")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self._rows[index].astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not: as on our side."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
