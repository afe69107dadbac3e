"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), with the smoothing of
conservative DPO (Mitchell 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ingot.config.sections import objective as config
from ingot.data.batches.loader import Batch
from ingot.models.native.head import LogitsView
from ingot.objectives.protocol import AllSum, ObjectiveInputs


def answer_log_probabilities(values: Tensor, all_sum: AllSum) -> Tensor:
    """Summed log-probability of each answer, `[B, 2]` (chosen, rejected), from those of its tokens
    `[2B, T]`, which are 0 where there is no target.
    """
    return all_sum(values.sum(dim=-1)).view(-1, 2)


class DPO:
    """-log sigmoid(beta * ((chosen - its reference) - (rejected - its reference))), summed over
    pairs.

    The loss is non-linear in the sum over a row's tokens, so a row that is split over ranks is
    summed over them first.

    Args:
        beta: how strongly the policy is held to the reference.
        label_smoothing: the share of pairs assumed to be labelled the wrong way round.
        reference: summed log-probabilities under the reference `[rows, 2]`, by row number; on the
            training device.
    """

    name = "dpo"

    def __init__(self, beta: float, label_smoothing: float, reference: Tensor) -> None:
        self.beta, self.label_smoothing, self.reference = beta, label_smoothing, reference

    @classmethod
    def from_settings(cls, settings: config.DPOSettings, inputs: ObjectiveInputs) -> DPO:
        assert inputs.reference is not None
        return cls(settings.beta, settings.label_smoothing, inputs.reference)

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """log p(label) for a chunk of N tokens, `[N]`."""
        return view.log_probability(labels)

    def targets(self, batch: Batch) -> int:
        """The number of pairs, without those that only pad the batch."""
        return int((batch.rows >= 0).sum())

    def extras(self, batch: Batch, segments: Tensor | None) -> None:
        return None

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over pairs; `rewards/...` are sums as well, and `rewards/accuracy` counts
        pairs whose chosen answer has the higher reward.
        """
        live = batch.rows >= 0
        # Padding pairs have no reference; a NaN here would reach the gradient even through a mask.
        reference = torch.where(live[:, None], self.reference[batch.rows.clamp_min(0)], 0.0)
        rewards = self.beta * (answer_log_probabilities(values, all_sum) - reference)  # [B, 2]
        margin = rewards[:, 0] - rewards[:, 1]
        loss = (
            -functional.logsigmoid(margin) * (1 - self.label_smoothing)
            - functional.logsigmoid(-margin) * self.label_smoothing
        )
        metrics: dict[str, Tensor] = {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margin": margin,
            "rewards/accuracy": (margin > 0).float(),
        }
        return torch.where(live, loss, 0.0).sum(), {
            name: torch.where(live, each.detach(), 0.0).sum() for name, each in metrics.items()
        }
