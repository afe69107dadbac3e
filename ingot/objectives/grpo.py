"""Training on rewards: the policy gradient over groups of sampled answers, with PPO's clipped ratio
(Shao et al. 2024, arXiv 2402.03300; without its two biases, Liu et al. 2025, arXiv 2503.20783).

The loss is a sum over answer tokens, divided once by a number that does not depend on the answers.
With G answers to each prompt, its expected gradient at the sampling policy is (1 - 1/G) times that
of the expected reward: the mean of a group includes the answer that it is compared with.

Three policies are told apart (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641): the one that
answers were sampled from, as the sampler computed it (p_sampled), the one that clipping measures
from (p_old), and the one in training (p). With r = p / p_old, the loss of a token is

    w * (-min(r A, clip(r) A) + kl * penalty),    w = min(p_old / p_sampled, cap)

where w has no gradient. While the old log-probabilities are the sampler's own, w is exactly 1 and r
holds everything that lies between sampler and trainer. Where they are recomputed by the trainer, w
corrects for the sampler's weights and rounding, truncated so that no token counts for more than
`cap` (Ionides 2008; AReaL, Fu et al. 2025, arXiv 2505.24298). Either ratio alone corrects once; a
weight beside the sampler's own log-probabilities would correct twice. w corrects how likely a token
is after its prefix, not how likely the prefix is: without truncation the gradient is exact for
answers of one token, and for longer ones up to the second order in the distance of both policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.config.sections import grpo as config
from ingot.data.batches.loader import Batch
from ingot.models.native.head import IGNORE, LogitsView
from ingot.objectives.protocol import AllSum, ObjectiveInputs


class AnswerValues(NamedTuple):
    """What the loss needs of each token beside its label: the channels of `Batch.values`, each
    `[B, T]`, 0 where there is no label.
    """

    advantage: Tensor
    """By how much the token's answer was better than its group."""
    sampled: Tensor
    """log p of the token when it was sampled, as the sampler computed it."""
    old: Tensor
    """log p of the token under the policy that clipping measures from: the same numbers, or the
    trainer's own for the weights that the first update on the answers began with.
    """
    reference: Tensor
    """log p of the token under the reference model; 0 where none is wanted."""
    weight: Tensor
    """The token's weight in the sum of the loss."""
    share: Tensor
    """The token's weight in metrics: the loss's divisor / the number of tokens, so that metrics,
    which are divided by that divisor as well, are means over tokens.
    """


ROUNDING = 1e-6
"""What equal rewards may differ by, of their size or of 1: 0.1 + 0.2 is not quite 0.3."""


@dataclass(frozen=True)
class Advantages:
    """Of groups of answers, `[P, G]` each."""

    values: Tensor
    """0 throughout a group whose rewards are equal."""
    equal: Tensor
    """Whether all rewards of a group are equal but for rounding, `[P]`: such a group has nothing to
    teach.
    """


def group_advantages(rewards: Tensor, *, by_deviation: bool = False) -> Advantages:
    """Rewards `[P, G]` less the mean of their group.

    Args:
        by_deviation: divided by the standard deviation of the group (G - 1 degrees of freedom).

    Groups of equal rewards are found by comparing the rewards, of which each may be a sum: what
    rounding leaves of them, or of their distance to a rounded mean, need not be 0, and divided by a
    deviation as small it would not be small at all.
    """
    size = rewards.abs().amax(dim=1).clamp(min=1.0)
    equal = rewards.amax(dim=1) - rewards.amin(dim=1) <= ROUNDING * size
    values = rewards - rewards.mean(dim=1, keepdim=True)
    if by_deviation:
        values = values / rewards.std(dim=1, keepdim=True)
    return Advantages(torch.where(equal[:, None], 0.0, values), equal)


def importance_weights(old: Tensor, sampled: Tensor, cap: float) -> Tensor:
    """min(p_old / p_sampled, cap) of each token, from log-probabilities; exactly 1 where they are
    equal.
    """
    return (old - sampled).exp().clamp(max=cap)


class GRPO:
    """-min(r A, clip(r) A) for each token of a sampled answer, r = p / old p, and the penalty for
    leaving the reference, times the truncated importance weight of the token.

    Batches without `values` hold given answers rather than sampled ones (held-out rows): their
    loss is the cross-entropy, at temperature 1.

    Clipping, penalty and temperature are its own; how advantages and weights come about is the
    matter of who makes the batches.
    """

    def __init__(self, settings: config.GRPOSettings, inputs: ObjectiveInputs) -> None:
        self._temperature = settings.temperature
        self._least, self._most = 1 - settings.clip, 1 + settings.upper_clip
        self._kl, self._estimator = settings.kl, settings.kl_estimator
        self._cap = settings.importance_cap

    def targets(self, batch: Batch) -> int:
        """The loss's divisor, which the batches of a step state among them; of given answers the
        number of labels.
        """
        return int((batch.labels != IGNORE).sum()) if batch.values is None else batch.count

    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor | None:
        """Whether the answers are the policy's own: `token` then applies the temperature."""
        return batch.values

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """log p(label) for a chunk of N tokens, `[N]`; of sampled answers under the distribution
        that they are sampled from, which is that of the logits divided by the temperature.
        """
        return view.log_probability(labels, 1.0 if extras is None else self._temperature)

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss, and sums that become means over the sampled tokens:

        policy/ratio: p / old p. policy/ratio_error: |ratio - 1|. policy/clipped: the share
        of tokens whose ratio is clipped, and whose advantage therefore gives no gradient (the
        penalty for leaving the reference still does). policy/moved: an
        estimate of KL(old policy || policy), never negative. policy/entropy: -log p, an
        estimate of the entropy. policy/kl: log p - log p(reference), an estimate of the divergence
        from the reference.
        """
        if batch.values is None:
            return -values.sum(), {}
        given = AnswerValues(*batch.values.unbind(-1))
        change = values - given.old
        ratio = change.exp()
        clipped = ratio.clamp(self._least, self._most)
        gain = torch.minimum(ratio * given.advantage, clipped * given.advantage)
        # Where the clipped product is the smaller one, it is a constant: no gradient.
        stopped = clipped * given.advantage < ratio * given.advantage
        loss = -gain
        apart = values - given.reference
        if self._kl:
            penalty = (
                apart.square() / 2 if self._estimator == "k2" else torch.expm1(-apart) + apart  # k3
            )
            loss = loss + self._kl * penalty
        metrics = {
            "policy/ratio": ratio,
            "policy/ratio_error": (ratio - 1).abs(),
            "policy/clipped": stopped.to(ratio.dtype),
            "policy/moved": ratio - 1 - change,
            "policy/entropy": -values,
            **({"policy/kl": apart} if self._kl else {}),
        }
        weight = given.weight * importance_weights(given.old, given.sampled, self._cap)
        return (loss * weight).sum(), {
            name: (each.detach() * given.share).sum() for name, each in metrics.items()
        }
