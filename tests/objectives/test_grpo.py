"""GRPO's estimator against the true gradient, in float64, over every group that can be drawn; its
clipping, penalty and weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.loader import Batch
from ingot.models.native.head import LogitsView
from ingot.objectives.grpo import GRPO, AnswerValues, group_advantages
from ingot.objectives.protocol import ObjectiveInputs
from ingot.train.rollout.answers import RolloutAnswers, shares_of

END, VOCABULARY, MOST = 0, 3, 2
ANSWERS = [(END,), *((first, second) for first in (1, 2) for second in range(VOCABULARY))]
"""Every answer of at most two tokens."""
REWARDS = [0.3, 0.0, 1.0, 0.0, 0.7, 0.0, 0.1]
GROUP = 3
NEVER = 1e-12


def settings(**knobs: Any) -> GRPOSettings:
    return GRPOSettings.model_validate(
        {
            "kind": "grpo",
            "rewards": [{"kind": "exact"}],
            "group": GROUP,
            "max_answer_tokens": MOST,
            **knobs,
        }
    )


def grpo(**knobs: Any) -> GRPO:
    return GRPO(settings(**knobs), ObjectiveInputs())


class Policy:
    """A policy over the answers: logits of a prefix are a product of fixed features and weights
    that all prefixes share.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.features = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        self.weight = torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)
        self.weight.requires_grad_()

    def logits(self) -> Tensor:
        """Of the three prefixes: nothing, 1 and 2."""
        return self.features @ self.weight

    def tokens(self, objective: GRPO) -> Tensor:
        """log p of each token of each answer `[A, MOST]`, by the objective; 0 behind an end."""
        view = LogitsView(self.logits())
        every = torch.stack(
            [
                objective.token(view, torch.full((3,), token), torch.zeros(3))
                for token in range(VOCABULARY)
            ],
            dim=1,
        )
        rows = [
            [
                every[0, answer[0]],
                every[answer[0], answer[1]] if len(answer) > 1 else every[0, 0] * 0,
            ]
            for answer in ANSWERS
        ]
        return torch.stack([torch.stack(row) for row in rows])

    def gradient(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(value, self.weight, retain_graph=True)[0]


def answers(group: Sequence[int]) -> RolloutAnswers:
    """A group of the answers with these numbers, as a rollout has them."""
    lengths = np.array([len(ANSWERS[one]) for one in group])
    return RolloutAnswers(
        np.zeros(1, np.int64),
        np.array([[*ANSWERS[one], END][:MOST] for one in group]),
        lengths,
        np.zeros((len(group), MOST), np.float32),
        np.zeros((len(group), MOST), np.float32),
        np.array([ANSWERS[one][-1] == END for one in group]),
        np.array([REWARDS[one] for one in group]),
        np.zeros((len(group), 1)),
    )


def batch(values: AnswerValues, live: Tensor, count: int = 1) -> Batch:
    labels = torch.where(live, 1, -100)
    return Batch(labels, labels, labels, labels, values=torch.stack(values, -1), count=count)


def expected_gradient(policy: Policy, knobs: GRPOSettings) -> Tensor:
    """The mean of the gradient of the loss over all groups, each as likely as it is drawn."""
    objective = GRPO(knobs, ObjectiveInputs())
    tokens = policy.tokens(objective)
    likely = tokens.detach().sum(dim=1).exp()
    assert float(likely.sum()) == pytest.approx(1, abs=NEVER)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(len(ANSWERS)), repeat=GROUP):
        drawn = answers(group)
        shares = shares_of(drawn, knobs)
        values = tokens[list(group)]
        live = torch.arange(MOST) < torch.from_numpy(drawn.lengths)[:, None]
        kept = np.isin(np.arange(GROUP), shares.kept)
        loss, _ = objective.reduce(
            values,
            batch(
                AnswerValues(
                    torch.from_numpy(shares.advantages * kept)[:, None] * live,
                    values.detach(),
                    values.detach(),
                    torch.zeros_like(values),
                    torch.from_numpy(shares.weights)[:, None] * live,
                    live * 1.0,
                ),
                live,
            ),
            lambda part: part,
        )
        total = total + float(likely[list(group)].prod()) * loss / shares.divisor
    return policy.gradient(total)


def true_gradient(policy: Policy, temperature: float = 1.0) -> Tensor:
    """Of the expected reward, without any of ingot's code."""
    steps = (policy.logits() / temperature).log_softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    for answer, reward in zip(ANSWERS, REWARDS, strict=True):
        logp = steps[0, answer[0]] + (steps[answer[0], answer[1]] if len(answer) > 1 else 0)
        expected = expected + logp.exp() * reward
    return policy.gradient(expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_estimator_is_the_true_gradient(temperature: float) -> None:
    """All 343 groups: (1 - 1/G) of the gradient of the expected reward, over the answers' most
    tokens.
    """
    policy = Policy()
    found = expected_gradient(policy, settings(temperature=temperature))
    wanted = -(1 - 1 / GROUP) / MOST * true_gradient(policy, temperature)
    assert float((found - wanted).abs().max()) < NEVER


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("knobs", "least"),
    [
        ({"normalise": "answers"}, 1e-4),
        ({"normalise": "tokens"}, 1e-5),
        ({"scale": "deviation"}, 1e-4),
        ({"overlong": "mask"}, 1e-4),
    ],
)
def test_the_variants_have_the_bias_that_is_told_of_them(
    knobs: dict[str, str], least: float
) -> None:
    """Their expected gradient points elsewhere: 1 less the cosine."""
    policy = Policy()
    wanted = -true_gradient(policy).flatten()

    def apart(found: Tensor) -> float:
        return 1 - float(torch.cosine_similarity(found.flatten(), wanted, dim=0))

    assert apart(expected_gradient(policy, settings())) < NEVER
    assert apart(expected_gradient(policy, settings(**knobs))) > least


def kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(dim=-1)


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k2", lambda own, theirs: kl(own, theirs)), ("k3", lambda own, theirs: kl(theirs, own))],
)
def test_the_penalty_has_the_gradient_that_is_told_of_it(
    estimator: str, divergence: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Over all answers: the divergence at each prefix, which is as likely as it is sampled."""
    policy = Policy()
    objective = grpo(kl=0.5, kl_estimator=estimator)
    theirs = torch.randn(3, VOCABULARY, dtype=torch.float64).log_softmax(-1)
    tokens = policy.tokens(objective)
    likely = tokens.detach().sum(dim=1).exp()
    reference = torch.zeros_like(tokens)
    for row, answer in enumerate(ANSWERS):
        reference[row, 0] = theirs[0, answer[0]]
        if len(answer) > 1:
            reference[row, 1] = theirs[answer[0], answer[1]]
    live = torch.arange(MOST) < torch.tensor([len(answer) for answer in ANSWERS])[:, None]
    none = torch.zeros_like(tokens)
    weight = likely[:, None] * live
    given = AnswerValues(none, tokens.detach(), tokens.detach(), reference, weight, none)
    loss, metrics = objective.reduce(tokens, batch(given, live), lambda part: part)
    own = policy.logits().log_softmax(-1)
    first = own[0].detach().exp()
    reached = torch.stack([torch.ones((), dtype=torch.float64), first[1], first[2]])
    wanted = policy.gradient(0.5 * (reached * divergence(own, theirs)).sum())
    assert float((policy.gradient(loss) - wanted).abs().max()) < NEVER
    assert "policy/kl" in metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.25, 1.0, False),
        (1.25, -1.0, True),
        (1.15, 1.0, True),
        (0.75, -1.0, False),
        (0.75, 1.0, True),
        (0.85, -1.0, True),
    ],
)
def test_a_ratio_outside_stops_the_gradient_on_one_side(
    ratio: float, advantage: float, flows: bool
) -> None:
    values = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    given = AnswerValues(advantage * one, *[values.detach() - np.log(ratio)] * 2, one * 0, one, one)
    loss, metrics = grpo().reduce(values, batch(given, one > 0), lambda part: part)
    loss.backward()
    assert values.grad is not None
    wanted = -ratio * advantage if flows else 0.0
    assert float(values.grad) == pytest.approx(wanted, abs=NEVER)
    assert float(metrics["policy/clipped"]) == (not flows)
    assert float(metrics["policy/ratio"]) == pytest.approx(ratio)
    assert float(metrics["policy/moved"]) == pytest.approx(ratio - 1 - np.log(ratio))
    assert float(metrics["policy/entropy"]) == 1


def test_the_upper_bound_has_a_knob_of_its_own() -> None:
    values = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    given = AnswerValues(one, *[values.detach() - np.log(1.25)] * 2, one * 0, one, one)
    loss, _ = grpo(clip_high=0.28).reduce(values, batch(given, one > 0), lambda part: part)
    loss.backward()
    assert values.grad is not None
    assert float(values.grad) == pytest.approx(-1.25)


def one_token_answers() -> tuple[Tensor, Tensor, Tensor]:
    """The logits of a policy over five answers of one token, the log-probabilities of another one
    that samples them, and rewards; float64.
    """
    generator = torch.Generator().manual_seed(5)
    logits, others, rewards = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), others.log_softmax(-1), rewards


@pytest.mark.parametrize("old", ["recomputed", "sampler"])
def test_answers_of_another_policy_are_corrected_once(old: str) -> None:
    """Over all groups that another policy draws: with a weight that is not truncated, or a ratio
    that is not clipped, the gradient is the policy's own. Both at once would correct twice.
    """
    logits, others, rewards = one_token_answers()
    tokens = logits.log_softmax(-1)
    objective = grpo(old_logprobs="recomputed", importance_cap=1e9, clip=1 - 1e-9, clip_high=1e9)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(5), repeat=GROUP):
        chosen = list(group)
        shares = group_advantages(rewards[None, chosen])
        values, one = tokens[None, chosen], torch.ones(1, GROUP, dtype=torch.float64)
        sampled = others[None, chosen]
        given = AnswerValues(
            shares.values,
            sampled,
            values.detach() if old == "recomputed" else sampled,
            one * 0,
            one,
            one,
        )
        loss, _ = objective.reduce(values, batch(given, one > 0), lambda part: part)
        total = total + float(others[chosen].sum().exp()) * loss / GROUP
    (found,) = torch.autograd.grad(total, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((tokens.exp() * rewards).sum(), logits)
    assert float((found + (1 - 1 / GROUP) * wanted).abs().max()) < 1e-8 + NEVER
    if old == "recomputed":
        assert float((found + (1 - 1 / GROUP) * wanted).abs().max()) < NEVER


def test_the_weight_is_truncated_and_has_no_gradient() -> None:
    """Two tokens of which the trainer thinks four and half times as much as the sampler did, and
    one without a label, far apart: cap 2, 0.5, and nothing.
    """
    values = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    apart = torch.tensor([[4.0, 0.5, 1e30]], dtype=torch.float64).log()
    live = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.float64)
    given = AnswerValues(live, values.detach() - apart, values.detach(), live * 0, 3 * live, live)
    loss, metrics = grpo().reduce(values, batch(given, live > 0), lambda part: part)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [pytest.approx([-2.0 * 3, -0.5 * 3, 0.0], abs=NEVER)]
    assert float(metrics["policy/ratio_error"]) == 0


def test_with_the_samplers_own_log_probabilities_no_bit_changes() -> None:
    """The formula without weights, bit for bit, in the type of a training."""
    values = -torch.rand(4, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    sampled = (values + 0.3 * torch.randn(4, 7)).detach()
    advantage, weight = torch.randn(4, 7), torch.rand(4, 7)
    given = AnswerValues(advantage, sampled, sampled, sampled * 0, weight, weight)
    loss, _ = grpo(old_logprobs="recomputed", importance_cap=1.0).reduce(
        values, batch(given, weight > 0), lambda part: part
    )
    ratio = (values - sampled).exp()
    plain = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    wanted = (plain * weight).sum()
    assert torch.equal(loss, wanted)
    assert torch.equal(
        *(torch.autograd.grad(one, values, retain_graph=True)[0] for one in (loss, wanted))
    )


def test_equal_rewards_are_found_by_comparison_and_not_by_their_deviation() -> None:
    """Three times 0.1 has a mean that is not 0.1: what is left of each, divided by its deviation,
    would be as large as any advantage. So would what is left of sums of rewards.
    """
    rewards = torch.tensor(
        [[0.1] * 3, [0.1 + 0.2, 0.3, 0.3], [1e9 / 3 * 3, 1e9, 1e9 + 1e-6], [0.1, 0.1, 0.1 + 1e-5]],
        dtype=torch.float64,
    )
    for group in rewards:
        assert float((group - group.mean()).abs().max()) > 0
    found = group_advantages(rewards, by_deviation=True)
    assert found.equal.tolist() == [True, True, True, False]
    assert not found.values[:3].any()
    assert float(found.values[3].abs().max()) > 1
