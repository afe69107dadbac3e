"""The micro-batches of a step as the stages of a pipeline ask for them: by number, each stage its
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ingot.data.loader import Batch
from ingot.models.decoder import Decoder
from ingot.models.device import Compute, computing_in
from ingot.objectives.forward import cut, is_plain, reduced
from ingot.objectives.objective import Objective, RowSharing


class StagedBatches:
    """An objective over micro-batches of one shape, for `ingot.parallel.pipeline`. Every rank of
    the pipeline makes one, of the same batches.

    Args:
        before: hears the number of each micro-batch before a stage computes it.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Sequence[Batch],
        compute: Compute,
        device: torch.device,
        sharing: RowSharing | None,
        before: Callable[[int, Batch], None] = lambda index, batch: None,
    ) -> None:
        self._objective, self._compute, self._device, self._sharing, self._before = (
            objective,
            compute,
            device,
            sharing,
            before,
        )
        self._batches = batches
        self._there = [
            (batch if sharing is None else cut(batch, sharing)).to(device, non_blocking=True)
            for batch in batches
        ]
        self._plain = [is_plain(batch) for batch in batches]
        self._total: Tensor | None = None
        self._told: dict[str, Tensor] = {}

    @property
    def shape(self) -> tuple[int, int, int]:
        rows, tokens = self._there[0].tokens.shape
        return len(self._there), rows, tokens

    def values(self, stage: Decoder, number: int, hidden: Tensor | None) -> Tensor:
        """Of the last stage the objective's values `[B, T]`, of the others hidden states."""
        self._before(number, self._batches[number])
        there = self._there[number]
        segments = None if self._plain[number] else there.segments
        with computing_in(self._compute, self._device):
            extras = self._objective.extras(there, segments) if stage.stage.last else None
            values: Tensor = stage(
                there.tokens if hidden is None else hidden,
                there.positions,
                segments,
                there.labels,
                self._objective.token,
                extras,
            )
        return values

    def loss(self, values: Tensor, number: int) -> Tensor:
        """The sum over the targets of a micro-batch; adds it, and what else the objective tells, to
        `sums`.
        """
        loss, metrics = reduced(self._objective, values, self._there[number], self._sharing)
        self._total = loss.detach() + (0.0 if self._total is None else self._total)
        self._told = {name: self._told.get(name, 0.0) + value for name, value in metrics.items()}
        return loss

    def sums(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of all micro-batches; on a rank without the last stage zeros, of the
        same names.
        """
        if self._total is None:
            there = self._there[0]
            none = torch.zeros(there.labels.shape, device=self._device)
            _, metrics = reduced(self._objective, none, there, self._sharing)
            return torch.zeros((), device=self._device), {
                name: torch.zeros_like(value) for name, value in metrics.items()
            }
        return self._total, self._told
