"""SLiC-HF (Zhao et al. 2023, arXiv 2305.10425): preferences by a hinge, without a reference model.
The reward of an answer is the mean log-probability of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ingot.base.lazy import lazy_import
from ingot.config.sections.objective import ObjectiveSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ingot.data.batches.loader import Batch
    from ingot.models.native.head import LogitsView
    from ingot.objectives.protocol import AllSum, ObjectiveInputs
else:
    torch = lazy_import("torch")


class SLiC(ObjectiveSettings):
    """Sequence likelihood calibration: of two answers, the preferred one is to be likelier by a
    margin, per token, and is left alone once it is.
    """

    implementation = "SLiCLoss"
    document_kind = "preference"
    pipeline_parallel = False  # an answer's mean needs all its tokens at once
    kind: Literal["slic"] = "slic"
    """The way of training."""
    beta: Annotated[float, Field(gt=0)] = 2.0
    """Scale of the rewards."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """By how much the reward of the preferred answer is to be larger."""


class SLiCLoss:
    """max(0, margin - beta * (mean log p(chosen) - mean log p(rejected))), summed over pairs."""

    name = "slic"

    def __init__(self, settings: SLiC, inputs: ObjectiveInputs) -> None:
        self.beta, self.margin = settings.beta, settings.margin

    def targets(self, batch: Batch) -> int:
        return int((batch.rows >= 0).sum())

    def extras(self, batch: Batch, segments: Tensor | None) -> None:
        return None

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        return view.log_probability(labels)

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # A row may be spread over ranks, so both sums are taken over them before the division.
        counts = all_sum((batch.labels != -100).sum(dim=-1).to(values.dtype))  # [2B]
        means = all_sum(values.sum(dim=-1)) / counts.clamp_min(1)  # [2B]
        rewards = self.beta * means.view(-1, 2)  # [B, 2]: chosen, rejected
        gain = rewards[:, 0] - rewards[:, 1]  # [B]
        live = batch.rows >= 0  # what fills a batch up counts nothing
        loss = torch.where(live, (self.margin - gain).clamp_min(0.0), 0.0)
        accuracy = torch.where(live, (gain > 0).to(loss.dtype), 0.0)
        return loss.sum(), {"rewards/accuracy": accuracy.sum()}
