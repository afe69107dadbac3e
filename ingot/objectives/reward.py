"""The loss of a reward model on pairs of answers (Bradley and Terry 1952; Ouyang et al. 2022, arXiv
2203.02155), with the centring term of Eisenstein et al. 2023 (arXiv 2312.09244).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ingot.config.sections import objective as config
from ingot.data.batches.loader import Batch
from ingot.models.native.head import LogitsView
from ingot.objectives.preferences import summed
from ingot.objectives.protocol import AllSum, ObjectiveInputs


class RewardModel:
    """-log sigmoid(score of the chosen answer - score of the rejected one - margin), and beside it
    `center` times the square of the sum of both, summed over pairs.

    A value is the score of a whole row, `[2B]`: its model is not shared by ranks that hold parts of
    one row, so there is nothing to sum over them.
    """

    def __init__(self, settings: config.RewardModelSettings, inputs: ObjectiveInputs) -> None:
        self.margin, self.center = settings.margin, settings.center

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """The score of each of N rows, `[N]`."""
        return view.logits()[:, 0]

    def targets(self, batch: Batch) -> int:
        """The number of pairs, without those that only pad the batch."""
        return int((batch.rows >= 0).sum())

    def extras(self, batch: Batch, segments: Tensor | None) -> None:
        return None

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over pairs, and the metrics of `summed`."""
        scores = values.view(-1, 2)  # [B, 2]: chosen, rejected
        margin = scores[:, 0] - scores[:, 1]
        loss = -functional.logsigmoid(margin - self.margin)
        if self.center:
            loss = loss + self.center * scores.sum(dim=1).square()
        return summed(batch.rows >= 0, loss, scores, margin)
