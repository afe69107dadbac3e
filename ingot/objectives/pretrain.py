"""Next-token prediction: the negative log-likelihood of every target token, in nats."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ingot.data.loader import Batch
from ingot.models.head import IGNORE, View

AllSum = Callable[[Tensor], Tensor]


class Pretrain:
    """Cross-entropy over all tokens whose label is not -100. Can be staged: a value needs one token's logits only."""

    name = "pretrain"
    can_be_staged = True

    def token(self, view: View, labels: Tensor) -> Tensor:
        """-log p(label) for a chunk of N tokens, `[N]`."""
        return -view.log_probability(labels)

    def targets(self, batch: Batch) -> int:
        """How many tokens of a batch (still on the host) the loss is taken over."""
        return int((batch.labels != IGNORE).sum())

    def reduce(self, values: Tensor, batch: Batch, all_sum: AllSum) -> tuple[Tensor, dict[str, Tensor]]:
        """The *sum* of `values` `[B, T]` and further metrics; never a mean, so that any split of a batch gives one number.

        `all_sum` adds over the ranks that hold parts of one row; a token's value needs no other token, so it is not used.
        """
        return values.sum(), {}
