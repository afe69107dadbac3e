"""Spikes of the gradient norm, told on the device: nothing waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DECAY = 0.95
"""Of the running mean: about the last 20 steps."""
FIRST = 20
"""Steps that are taken before any can be a spike: gradients are large in the beginning."""


class Spikes:
    """Follows the norms of the steps that are taken. `state` makes a resumed run decide alike."""

    def __init__(
        self, factor: float, device: torch.device, state: Mapping[str, Any] | None = None
    ) -> None:
        self._factor = factor
        self._mean = torch.tensor(state["mean"] if state else 0.0, device=device)
        self._seen = torch.tensor(state["seen"] if state else 0.0, device=device)

    def judge(self, norm: Tensor, wrong: Tensor) -> Tensor:
        """True where this step is not to be taken: because it is `wrong` anyway, or its norm is a
        spike. The others count for the mean.
        """
        spike = (self._seen >= FIRST) & (norm > self._factor * self._mean)
        skipped = wrong | spike
        share = torch.where(
            self._seen < FIRST, 1 / (self._seen + 1), torch.full_like(norm, 1 - DECAY)
        )  # a plain mean to begin with
        mean = self._mean + share * (norm - self._mean)
        self._mean = torch.where(skipped, self._mean, mean)
        self._seen = torch.where(skipped, self._seen, self._seen + 1)
        return skipped

    def state(self) -> dict[str, float]:
        """Waits for the device."""
        return {"mean": float(self._mean), "seen": float(self._seen)}
