"""Initial weights from a counter-based generator keyed by (seed, parameter name, row).

Each row of each parameter has its own place in its own stream, so any rank can make just its own
rows and every parallel layout starts from the same numbers, on any device.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from ingot.models.decoder import Decoder
from ingot.models.placed import box, local

BLOCK_ELEMENTS = 2**22
_WORDS = 4  # 64-bit words that one Philox counter yields (Salmon et al. 2011)


def normal_rows(seed: int, name: str, first: int, rows: int, columns: int) -> np.ndarray:
    """Standard normal float32 `[rows, columns]`: rows `first` to `first + rows` of the parameter
    `name`.

    Box-Muller on Philox words: a fixed number of words a row, so that row r starts at counter r *
    counters-a-row.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    words = -(-columns // (2 * _WORDS)) * 2 * _WORDS  # whole counters, an even number of words
    counters = words // _WORDS
    generator = np.random.Philox(key=key, counter=first * counters)
    uniform = (generator.random_raw(rows * words) >> 11) * 2.0**-53  # [0, 1)
    pairs = uniform.reshape(rows, 2, words // 2)
    radius = np.sqrt(-2.0 * np.log1p(-pairs[:, 0]))
    angle = 2.0 * np.pi * pairs[:, 1]
    normal = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)), axis=1)
    return normal[:, :columns].astype(np.float32)


def fill_normal(parameter: Tensor, seed: int, name: str, std: float) -> None:
    """Fill a matrix `[rows, columns]`, or what this rank has of it, in place, a block of rows at a
    time.
    """
    here, (rows, columns) = local(parameter), box(parameter)
    width = parameter.shape[1]
    block = max(1, BLOCK_ELEMENTS // width)
    for first in range(rows.start, rows.stop, block):
        count = min(block, rows.stop - first)
        values = torch.from_numpy(normal_rows(seed, name, first, count, width)[:, columns])
        here[first - rows.start : first - rows.start + count].copy_(values.mul_(std))


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Random weights for every parameter: matrices normal with the configuration's
    `initializer_range`, norms 1, biases 0.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            fill_normal(parameter, seed, name, model.config.initializer_range)
        else:
            local(parameter).fill_(0.0 if name.endswith("bias") else 1.0)
