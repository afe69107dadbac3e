"""From logits to the next token: greedy, sampling by temperature, top-k, top-p and min-p, and
log-probabilities.

The choice in a row depends only on its own logits, settings and random number, never on other rows
of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

# Number of top candidates searched for the nucleus before sorting the whole vocabulary; nearly
# always enough.
SHORTLIST = 256
# Smaller values of temperature and top_p are treated as greedy: float32 cannot tell them from 0.
LEAST = 1e-6

# What a probability of 1 is in integers. Rounding may make a row's sum a little more: there is room
# for 2.
WHOLE = 2**62


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    `temperature` 0 is greedy. `top_p`: only the most likely tokens that together reach this
    probability (Holtzman et al. 2020). `seed`: the same request gives the same tokens; None draws a
    new seed. `logprobs`: None for none, else the number of most likely tokens to report beside the
    chosen one; these are the model's own, before all that is said here.

    Names, meaning and order are vLLM's: bias, penalties, temperature, `min_p`, `top_k`, `top_p`.
    `top_k`: only so many of the most likely tokens; 0, and any larger number, all. `min_p`: only
    tokens with at least this share of the most likely one's probability (Nguyen et al. 2024, arXiv
    2407.01082). A logit loses `presence_penalty` if the completion has the token already,
    `frequency_penalty` each time it has it, and is divided by `repetition_penalty` (multiplied, if
    negative) if prompt or completion have it (Keskar et al. 2019, arXiv 1909.05858). `logit_bias`:
    (token, what is added to its logit).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


class RowRules(Protocol):
    """What changes the logits of one row before the choice."""

    def apply(self, logits: Tensor) -> None:
        """Change logits `[V]` in place."""
        ...


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. `finite` is False if the logits were not finite; the token is then
    meaningless.
    """

    token: int
    finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class UniformDraws:
    """The random numbers of one request, from its own generator: other requests do not
    shift them.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    def next_uniform(self) -> float:
        """The next number in [0, 1), one per token; 0 for a greedy request, which needs none."""
        if self._generator is None:
            return 0.0
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    rolls: Sequence[float],
    rules: Sequence[RowRules | None] = (),
) -> list[SampledToken]:
    """Choose one token for each row of `logits`, float32 `[B, V]`; `rolls` are the rows' random
    numbers in [0, 1), `rules` what changes the rows first, if given.
    """
    own, logits = logits, _ruled(logits, rules)
    best, tokens = logits.max(dim=-1)
    whole = best if logits is own else own.amax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        tokens[drawn] = _draw(
            logits[drawn],
            best[drawn],
            [samplings[row] for row in drawn],
            [rolls[row] for row in drawn],
        )
    asked = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
    logprobs = (
        token_logprobs(
            own[asked], tokens[asked], max(samplings[row].logprobs or 0 for row in asked)
        )
        if asked
        else []
    )
    # One tensor, since the host waits for each that it reads.
    found = torch.where(whole.isfinite(), tokens, -1).tolist()
    choices = [SampledToken(max(token, 0), token >= 0) for token in found]
    for row, (logprob, top) in zip(asked, logprobs, strict=True):
        choices[row] = SampledToken(
            choices[row].token, choices[row].finite, logprob, top[: samplings[row].logprobs]
        )
    return choices


def _ruled(logits: Tensor, rules: Sequence[RowRules | None]) -> Tensor:
    """The logits after the rules of each row; the same tensor if there are none."""
    if not any(rules):
        return logits
    logits = logits.clone()
    for row, rule in zip(logits, rules, strict=True):
        if rule is not None:
            rule.apply(row)
    return logits


def _draw(
    logits: Tensor, best: Tensor, samplings: Sequence[Sampling], rolls: Sequence[float]
) -> Tensor:
    """Sample tokens `[N]` by inverting the cumulative distribution at each row's random number."""
    temperature, top_p, roll = (
        torch.tensor(
            values, dtype=torch.float32, device=logits.device
        )  # not every accelerator has float64
        for values in (
            [max(s.temperature, LEAST) for s in samplings],
            [max(s.top_p, LEAST) for s in samplings],
            rolls,
        )
    )
    # The largest logit is subtracted first, so that a temperature near 0 gives the greedy choice
    # rather than infinities.
    probabilities = ((logits - best[:, None]) / temperature[:, None]).softmax(dim=-1)
    mass = probabilities.new_ones(len(samplings))  # what is left of each row
    if floored := [row for row, sampling in enumerate(samplings) if sampling.min_p > 0]:
        least = probabilities.new_tensor([samplings[row].min_p for row in floored])[:, None]
        kept = probabilities[floored]
        kept = torch.where(kept >= least * kept.amax(dim=-1, keepdim=True), kept, 0.0)
        probabilities[floored], mass[floored] = kept, kept.sum(dim=-1)
    tokens = torch.zeros(len(samplings), dtype=torch.int64, device=logits.device)
    whole = [row for row, s in enumerate(samplings) if s.top_p >= 1 and s.top_k == 0]
    if whole:
        tokens[whole] = invert_cumulative(running_sums(probabilities[whole]), roll[whole])
    rest = [row for row, s in enumerate(samplings) if s.top_p < 1 or s.top_k]
    vocabulary = logits.shape[-1]
    for size in (min(SHORTLIST, vocabulary), vocabulary):
        if not rest:
            break
        likely, order = probabilities[rest].topk(size, dim=-1)
        counts = [min(samplings[row].top_k or vocabulary, vocabulary) for row in rest]
        count = torch.tensor(counts)[:, None]
        count = count.to(logits.device)
        likely = torch.where(torch.arange(size, device=logits.device) < count, likely, 0.0)
        cumulative = running_sums(likely)
        complete = count[:, 0] <= size
        goal = top_p[rest] * torch.where(complete, cumulative[:, -1], mass[rest])
        # The share of how much is known once all of them, or all tokens, are at hand.
        enough = complete | ((count[:, 0] >= vocabulary) & (cumulative[:, -1] >= goal))
        # A token is in the nucleus if those before it do not reach top_p; the first always is.
        reached = torch.where(cumulative - likely < goal[:, None], cumulative, 0.0).amax(
            dim=-1, keepdim=True
        )
        places = invert_cumulative(cumulative.clamp_max(reached), roll[rest])
        tokens[rest] = order.gather(-1, places[:, None])[:, 0]
        rest = [row for row, done in zip(rest, enough.tolist(), strict=True) if not done]
    return tokens


def running_sums(probabilities: Tensor) -> Tensor:
    """The sums `[N, V]` of each row up to each place. Where the same bits are asked for each time
    (`train.deterministic`), they are sums of integers: no GPU adds up other numbers in one order.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return probabilities.cumsum(dim=-1)
    counts = (probabilities.double() * WHOLE).long().cumsum(dim=-1)
    return (counts.double() / WHOLE).to(probabilities.dtype)


def invert_cumulative(cumulative: Tensor, roll: Tensor) -> Tensor:
    """The first index `[N]` at which the cumulative weights `[N, V]` exceed `roll` times their
    total; its own weight is not 0.
    """
    total = cumulative[:, -1:]
    places = torch.searchsorted(cumulative, roll[:, None] * total, right=True)[:, 0]
    # Rounding may lift the target to the total: then take the first index that reaches the total.
    return places.minimum((cumulative < total).sum(dim=-1))


def token_logprobs(
    logits: Tensor, tokens: Tensor, count: int
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """For each row the chosen token's log-probability, and the `count` most likely tokens with
    theirs.
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(-1, tokens[:, None]) - total)[:, 0].tolist()
    likeliest, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    tops = zip(ids.tolist(), (likeliest - total).tolist(), strict=True)
    return [
        (logprob, tuple(zip(top, values, strict=True)))
        for logprob, (top, values) in zip(chosen, tops, strict=True)
    ]
