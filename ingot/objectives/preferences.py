"""Losses on pairs of answers: DPO (Rafailov et al. 2023, arXiv 2305.18290) with the smoothing of
conservative DPO (Mitchell 2023), IPO (Azar et al. 2023, arXiv 2310.12036), SimPO (Meng et al. 2024,
arXiv 2405.14734) and ORPO (Hong et al. 2024, arXiv 2403.07691).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ingot.config.sections import objective as config
from ingot.data.batches.loader import Batch
from ingot.models.native.head import IGNORE, LogitsView, by_log_probability
from ingot.objectives.protocol import AllSum, ObjectiveInputs


def answer_sums(values: Tensor, all_sum: AllSum) -> Tensor:
    """Sums over each answer's tokens: `[..., 2B, T]`, 0 where there is no target, -> `[..., B, 2]`
    (chosen, rejected).
    """
    sums = all_sum(values.sum(dim=-1))
    return sums.view(*sums.shape[:-1], -1, 2)


@dataclass(frozen=True)
class Answers:
    """Both answers of B pairs, each `[B, 2]` (chosen, rejected). What fills a batch up has answers
    of one token with log-probability -1, from which every loss and gradient is finite.
    """

    log_p: Tensor
    """Log-probability of the whole answer."""
    lengths: Tensor
    """Its number of tokens."""
    rows: Tensor
    """The number of each pair's row, `[B]`; -1 for what fills a batch up."""

    @property
    def mean_log_p(self) -> Tensor:
        """Log-probability per token."""
        return self.log_p / self.lengths

    def gains(self, reference: Tensor, *, normalize_length: bool) -> Tensor:
        """log p(answer) - log p(answer) under the reference, with `normalize_length` per token.

        `reference`: log-probabilities of whole answers `[rows, 2]`, by row number.
        """
        live = (self.rows >= 0)[:, None]
        known = torch.where(live, reference[self.rows.clamp_min(0)], 0.0)
        gains = self.log_p - known
        return gains / self.lengths if normalize_length else gains


def sigmoid_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """-log of the probability that the chosen answer is preferred (Bradley-Terry), where a share
    `label_smoothing` of the pairs is taken to be labelled the wrong way round.
    """
    return (
        -functional.logsigmoid(margin) * (1 - label_smoothing)
        - functional.logsigmoid(-margin) * label_smoothing
    )


def summed(
    live: Tensor, loss: Tensor, rewards: Tensor, margin: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sums over pairs of the loss `[B]` and of what is logged: the rewards of both answers
    `[B, 2]`, the margin between them `[B]`, and how often it is positive. Pairs that are not `live`
    count nothing.
    """
    metrics: dict[str, Tensor] = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margin": margin,
        "rewards/accuracy": (margin > 0).float(),
    }
    return torch.where(live, loss, 0.0).sum(), {
        name: torch.where(live, each.detach(), 0.0).sum() for name, each in metrics.items()
    }


class AnswerObjective:
    """What losses on whole answers share: they are computed of the log-probability of each."""

    @by_log_probability
    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        """log p(label) for a chunk of N tokens, `[N]`."""
        return view.log_probability(labels)

    def targets(self, batch: Batch) -> int:
        """The number of samples, without those that only pad the batch."""
        return int((batch.rows >= 0).sum())

    def extras(self, batch: Batch, segments: Tensor | None) -> None:
        return None


class PairObjective(AnswerObjective):
    """What losses on pairs share: the sums over each answer, and what is logged.

    A loss is non-linear in the sum over a row's tokens, so a row that is split over ranks is
    summed over them first.
    """

    def compare(self, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each pair `[B]`, the rewards of its answers `[B, 2]`, and the margin `[B]`
        between these.
        """
        raise NotImplementedError

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over pairs; `rewards/...` are sums as well, and `rewards/accuracy` counts
        pairs whose chosen answer has the higher reward.
        """
        live = batch.rows >= 0
        targets = (batch.labels != IGNORE).to(values.dtype)
        log_p, lengths = answer_sums(torch.stack((values, targets)), all_sum)  # [B, 2] each
        # What fills a batch up gets plain numbers: a NaN there would reach the gradient even
        # through a mask.
        log_p = torch.where(live[:, None], log_p, -1.0)
        lengths = torch.where(live[:, None], lengths, 1.0)
        return summed(live, *self.compare(Answers(log_p, lengths, batch.rows)))


class DPO(PairObjective):
    """-log sigmoid(beta * ((chosen - its reference) - (rejected - its reference))), summed over
    pairs.

    With `normalize_length` answers are compared by their log-ratio per token; `sft_weight` times
    the chosen answer's cross-entropy per token is added.
    """

    def __init__(self, settings: config.DPOSettings, inputs: ObjectiveInputs) -> None:
        assert inputs.reference is not None
        self.settings, self.reference = settings, inputs.reference

    def compare(self, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
        knobs = self.settings
        gains = answers.gains(self.reference, normalize_length=knobs.normalize_length)  # [B, 2]
        rewards = knobs.beta * gains
        margin = rewards[:, 0] - rewards[:, 1]
        loss = sigmoid_loss(margin, knobs.label_smoothing)
        if knobs.sft_weight:
            loss = loss - knobs.sft_weight * answers.mean_log_p[:, 0]
        return loss, rewards, margin


class IPO(PairObjective):
    """(gain of the chosen answer - gain of the rejected one - 1 / (2 beta)) ** 2, summed over
    pairs, where a gain is the log-ratio to the reference, per token with `normalize_length`.

    The rewards that are logged are beta times the gains: their margin is driven to 1/2.
    """

    def __init__(self, settings: config.IPOSettings, inputs: ObjectiveInputs) -> None:
        assert inputs.reference is not None
        self.settings, self.reference = settings, inputs.reference

    def compare(self, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
        knobs = self.settings
        gains = answers.gains(self.reference, normalize_length=knobs.normalize_length)  # [B, 2]
        distance = gains[:, 0] - gains[:, 1] - 1 / (2 * knobs.beta)
        rewards = knobs.beta * gains
        return distance.square(), rewards, rewards[:, 0] - rewards[:, 1]


class SimPO(PairObjective):
    """-log sigmoid(beta * (mean log p(chosen) - mean log p(rejected)) - margin), summed over pairs;
    there is no reference.
    """

    def __init__(self, settings: config.SimPOSettings, inputs: ObjectiveInputs) -> None:
        self.settings = settings

    def compare(self, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
        knobs, means = self.settings, answers.mean_log_p
        rewards = knobs.beta * means  # [B, 2]
        margin = rewards[:, 0] - rewards[:, 1]
        loss = sigmoid_loss(margin - knobs.margin, knobs.label_smoothing)
        if knobs.sft_weight:
            loss = loss - knobs.sft_weight * means[:, 0]
        return loss, rewards, margin


class ORPO(PairObjective):
    """Cross-entropy per token of the chosen answer, plus beta times -log sigmoid of the log of
    the odds ratio odds(chosen) / odds(rejected), summed over pairs; there is no reference.

    odds = p / (1 - p), where p is the geometric mean of the probabilities of an answer's tokens.
    """

    def __init__(self, settings: config.ORPOSettings, inputs: ObjectiveInputs) -> None:
        self.beta = settings.beta

    def compare(self, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
        means = answers.mean_log_p  # [B, 2]
        # An answer whose every token is certain has infinite odds; its mean is kept below 0 by the
        # smallest step of the number format.
        certain = -torch.finfo(means.dtype).eps
        below = means.clamp_max(certain)
        log_odds = below - torch.log(-torch.expm1(below))
        ratio = log_odds[:, 0] - log_odds[:, 1]
        rewards = self.beta * means
        loss = -means[:, 0] - self.beta * functional.logsigmoid(ratio)
        return loss, rewards, rewards[:, 0] - rewards[:, 1]
