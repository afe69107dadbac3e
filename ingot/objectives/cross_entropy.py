"""Cross-entropy: the negative log-likelihood of every target, in nats."""

from __future__ import annotations

from torch import Tensor

from ingot.config.sections.objective import ObjectiveSettings
from ingot.data.batches.loader import Batch
from ingot.models.native.head import IGNORE, LogitsView, by_log_probability, summed_only
from ingot.objectives.protocol import AllSum, ObjectiveInputs


class TokenObjective:
    """What losses on single tokens share: no value depends on other tokens."""

    def targets(self, batch: Batch) -> int:
        """The number of labels in a batch (still on the host) that the loss covers."""
        return int((batch.labels != IGNORE).sum())

    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor | None:
        return None

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of `values` `[B, T]`. No value depends on other tokens, so `all_sum` is
        unused.
        """
        return values.sum(), {}


class CrossEntropy(TokenObjective):
    """Cross-entropy over every position whose label is not -100.

    All tokens of a text, the assistant's turns of a chat, the target of a pair, the class of a
    labelled text: the labels decide what counts, the mathematics is the same.
    """

    @classmethod
    def from_settings(cls, settings: ObjectiveSettings, inputs: ObjectiveInputs) -> CrossEntropy:
        """It has no knobs and needs no inputs: what measures a model makes one without them."""
        return cls()

    @summed_only
    @by_log_probability
    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None = None) -> Tensor:
        """-log p(label) for a chunk of N tokens, `[N]`."""
        return -view.log_probability(labels)
