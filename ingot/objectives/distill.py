"""Knowledge distillation (Hinton et al. 2015, arXiv 1503.02531): cross-entropy with the data's next
token, mixed with the divergence from a teacher's distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ingot.config.sections import objective as config
from ingot.data.batches.loader import Batch
from ingot.models.native.head import LogitsView, summed_only
from ingot.objectives.cross_entropy import TokenObjective
from ingot.objectives.protocol import ObjectiveInputs


class Distill(TokenObjective):
    """(1 - alpha) * cross-entropy + alpha * t^2 * KL(teacher || student), both distributions
    softened by the temperature t.

    The teacher's hidden states are passed along with the student's; its logits are computed chunk
    by chunk, as the student's are.
    """

    def __init__(self, settings: config.DistillSettings, inputs: ObjectiveInputs) -> None:
        assert inputs.teacher is not None
        self.teacher = inputs.teacher
        self.temperature, self.alpha = settings.temperature, settings.alpha

    @torch.no_grad()
    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor:
        """The teacher's final hidden states `[B, T, D]`."""
        return self.teacher.vocabulary_head.enter(
            self.teacher.hidden(batch.tokens, batch.positions, segments)
        )

    @summed_only
    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """The mixed loss of a chunk of N tokens, `[N]`; `extras` are the teacher's hidden states
        `[N, D]`.
        """
        assert extras is not None
        with torch.no_grad():
            theirs = self.teacher.vocabulary_head.view(self.teacher.project(extras).float())
            wanted = theirs.log_probabilities(self.temperature)
        given = view.log_probabilities(self.temperature)
        # Both models hold the same slice of the vocabulary here.
        divergence = view.total(functional.kl_div(given, wanted, reduction="none", log_target=True))
        return (1 - self.alpha) * -view.log_probability(
            labels
        ) + self.alpha * self.temperature**2 * divergence
