"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): single answers that are
known to be good or bad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.config.sections import objective as config
from ingot.data.batches.loader import Batch
from ingot.objectives.preferences import AnswerObjective
from ingot.objectives.protocol import AllSum, ObjectiveInputs


class LogRatio(AnswerObjective):
    """log p(answer) - log p(answer) under the reference, summed over answers.

    Args:
        reference: summed log-probabilities under the reference `[rows]`, by row number; on the
            training device.
    """

    def __init__(self, reference: Tensor) -> None:
        self.reference = reference

    def of(self, values: Tensor, batch: Batch, all_sum: AllSum) -> Tensor:
        """The log-ratio of each answer, `[B]`; 0 for what fills a batch up."""
        # Padding has no reference; a NaN here would reach the gradient even through a mask.
        live = batch.rows >= 0
        known = torch.where(live, self.reference[batch.rows.clamp_min(0)], 0.0)
        return torch.where(live, all_sum(values.sum(dim=-1)) - known, 0.0)

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.of(values, batch, all_sum).sum(), {}


class KTO(AnswerObjective):
    """weight * (1 - sigmoid(beta * (log-ratio - KL))) of good answers, and of bad ones weight * (1
    - sigmoid(beta * (KL - log-ratio))), summed over answers.

    KL estimates how far the policy is from its reference: the mean of the log-ratio over answers to
    other prompts, over the whole global batch, at least 0 and without gradient. Each sample of a
    batch is therefore two rows: the answer, and its prompt with the answer of another sample.
    The reference's log-probabilities are those of both rows.
    """

    def __init__(self, settings: config.KTOSettings, inputs: ObjectiveInputs) -> None:
        assert inputs.reference is not None
        self.settings = settings
        self._own, self._other = (LogRatio(inputs.reference[:, side]) for side in range(2))
        self._kl: Tensor | None = None

    def first_pass(self) -> LogRatio:
        return self._other

    def first_rows(self, batch: Batch) -> Batch:
        return batch.side(1)

    def second_rows(self, batch: Batch) -> Batch:
        return batch.side(0)

    def finish_first_pass(self, mean: Tensor) -> None:
        self._kl = mean.detach().clamp_min(0.0)

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over answers. Of the metrics, `kl` is the term above, `rewards/margin`
        how far rewards lie on their right side of it, and `rewards/accuracy` how many do.
        """
        assert self._kl is not None, "the first pass comes before the loss"
        knobs, live, good = self.settings, batch.rows >= 0, batch.ratings > 0
        gain = self._own.of(values, batch, all_sum)
        margin = knobs.beta * torch.where(good, gain - self._kl, self._kl - gain)
        short = torch.sigmoid(-margin)
        loss = torch.where(good, knobs.desirable_weight * short, knobs.undesirable_weight * short)
        metrics = {
            "kl": self._kl.expand(len(live)),
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).float(),
        }
        return torch.where(live, loss, 0.0).sum(), {
            name: torch.where(live, each.detach(), 0.0).sum() for name, each in metrics.items()
        }
