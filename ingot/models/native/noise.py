"""NEFTune: noise on the embeddings of tokens while a model is fine-tuned (Jain et al. 2023, arXiv
2310.05914).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ingot.models.keyed import keyed_bits, row_keys, signed_hash

SCALE_BITS = 23
"""Random bits of a number: as many as float32 holds exactly."""
_KEY = signed_hash("neftune")


class EmbeddingNoise:
    """Uniform noise within alpha / sqrt(L * D) on each number of an embedding `[D]`, L the tokens
    of the token's own document in its row: packed rows have an L for each document, and padding
    has no part in it and gets none.

    The numbers are a hash of (seed, step, row, document, position, feature): whichever rank,
    micro-batch or part of a row a token falls to, they are the same.

    `share` takes values of the tokens that a rank is given `[B, T]` to those whose embeddings it
    holds `[B, S]`; wrappers that split embeddings along the row replace it.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        self.alpha, self.seed = alpha, seed
        self.share: Callable[[Tensor], Tensor] = lambda values: values
        self._rows: Tensor | None = None
        self._bounds = self._only = torch.empty(0)

    def begin_batch(self, step: int, rows: Tensor, segments: Tensor) -> None:
        """Call before each micro-batch of training. `rows` int64 `[R]` identifies the rows of one
        step, `segments` int64 `[R, T]` numbers the documents of whole rows from 1, 0 is padding.
        Both are on the device of the embeddings.
        """
        self._rows = row_keys(rows, f"{self.seed}/neftune/{step}")
        lengths = torch.zeros(len(segments), segments.shape[1] + 1, device=segments.device)
        lengths.scatter_add_(1, segments, torch.ones_like(segments, dtype=lengths.dtype))
        self._bounds = self.alpha * lengths.clamp_min(1.0).rsqrt()  # [R, documents]
        self._bounds[:, 0] = 0.0
        self._only = segments[:, :1]

    def add(self, x: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """x `[B, S, D]` with noise, in its own type. positions `[B, T]`; segments `[B, T]`, or None
        where each row is one document.
        """
        rows = self._rows
        assert rows is not None, "noise is of a micro-batch: call begin_batch before it"
        assert len(rows) == len(x), f"noise of {len(rows)} rows for {len(x)}"
        documents = self._only.expand_as(positions) if segments is None else segments
        bounds = self.share(self._bounds.gather(1, documents)) * x.shape[-1] ** -0.5
        # A document is told apart from others by the upper half of the number.
        places = self.share(positions + (documents << 32))
        return torch.stack(
            [
                (one + _uniform(row, place, one.shape[-1]) * bound[:, None]).to(one.dtype)
                for one, row, place, bound in zip(x, rows, places, bounds, strict=True)
            ]
        )


def _uniform(row: Tensor, places: Tensor, features: int) -> Tensor:
    """Numbers between -1 and 1 of each feature of each place `[S]` of a row, float32 `[S, D]`."""
    bits = keyed_bits(row.view(1, 1), places[None], features, _KEY)[0]
    return ((bits >> (64 - SCALE_BITS)).float() + 0.5) * 2.0 ** (1 - SCALE_BITS)
