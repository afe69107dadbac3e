"""Choosing tokens: settings mean what they say, and a row's choice depends on nothing but that
row.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.models.generation.sampling import (
    SHORTLIST,
    SampledToken,
    Sampling,
    UniformDraws,
    running_sums,
    sample_tokens,
)
from tests import tolerances


def rolls(count: int) -> list[float]:
    """Evenly spread numbers in [0, 1), so that frequencies are probabilities but for rounding."""
    return [(index + 0.5) / count for index in range(count)]


def tokens(logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
    choices = sample_tokens(logits.expand(count, -1), [sampling] * count, rolls(count))
    return torch.tensor([choice.token for choice in choices])


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """The definition, one token at a time."""
    probabilities = (logits.double() / temperature).softmax(0)
    kept = torch.zeros_like(probabilities)
    for token in probabilities.argsort(descending=True):
        if kept.sum() >= top_p:
            break
        kept[token] = probabilities[token]
    return kept / kept.sum()


@pytest.mark.drawn(keep=8)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
@pytest.mark.parametrize("vocabulary", [7, 4 * SHORTLIST])
def test_frequencies_are_the_probabilities(
    temperature: float, top_p: float, vocabulary: int
) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    count = 8000
    drawn = (
        tokens(logits, Sampling(temperature, top_p), count).bincount(minlength=vocabulary) / count
    )
    wanted = nucleus(logits, temperature, top_p)
    assert (drawn - wanted).abs().max() <= 1.5 / count
    # Half a step of the rolls: a token less likely than that may be missed, one of probability 0
    # never drawn.
    assert not drawn[wanted == 0].any()


class NoFloatsInRow(TorchDispatchMode):
    """As GPUs, which have no kernel for running sums of floats in one order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_p=0.8), Sampling(1.3, top_k=5, min_p=0.01)]
)
def test_the_same_tokens_where_a_gpu_adds_up_in_one_order(sampling: Sampling) -> None:
    logits = torch.randn(4 * SHORTLIST, generator=torch.Generator().manual_seed(2)) * 4
    wanted = tokens(logits, sampling, 500)
    torch.use_deterministic_algorithms(True)
    try:
        with NoFloatsInRow():
            found = tokens(logits, sampling, 500)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_sums_of_integers_are_those_of_numbers(dtype: torch.dtype) -> None:
    """Of a row that is more than 1 by rounding, and of a tail that is next to nothing."""
    row = torch.tensor([0.75, 0.25, 1e-9, 0.0, 1e-15, 2e-7], dtype=dtype)
    torch.use_deterministic_algorithms(True)
    try:
        found = running_sums(row[None])[0]
    finally:
        torch.use_deterministic_algorithms(False)
    exact = [math.fsum(row[: place + 1].tolist()) for place in range(len(row))]
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).to(dtype))


def test_greedy_and_its_limits() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.99], [3.0, 1.0, 2.0]])
    for sampling in (
        Sampling(),
        Sampling(temperature=1e-60),
        Sampling(1.0, top_p=0.0),
        Sampling(2.0, top_p=1e-6),
    ):
        for roll in (0.0, 0.999999):
            assert [
                choice.token for choice in sample_tokens(logits, [sampling] * 2, [roll] * 2)
            ] == [
                1,
                0,
            ], sampling


def test_the_largest_roll_takes_no_impossible_token() -> None:
    """Tokens of probability 0 stand at the end, where a rounded cumulative sum would put a roll
    just below 1.
    """
    for length in (3, 50, 400):
        logits = torch.cat(
            (
                torch.randn(length, generator=torch.Generator().manual_seed(length)),
                torch.full((9,), float("-inf")),
            )
        )
        for top_p in (1.0, 0.9999, 0.5):
            (choice,) = sample_tokens(logits[None], [Sampling(1.0, top_p)], [1 - 2**-53])
            assert choice.token < length
            assert nucleus(logits, 1.0, top_p)[choice.token] > 0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 3 * SHORTLIST, generator=torch.Generator().manual_seed(2))
    kinds = [
        Sampling(),
        Sampling(1.0, 1.0, logprobs=3),
        Sampling(0.7, 0.9),
        Sampling(1.5, 0.999),
        Sampling(0.1, 0.2, logprobs=0),
        Sampling(1.0, 0.5),
    ]
    together = sample_tokens(logits, kinds, rolls(6))
    for row, (sampling, roll) in enumerate(zip(kinds, rolls(6), strict=True)):
        assert sample_tokens(logits[row : row + 1], [sampling], [roll]) == [together[row]]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    wanted = logits.log_softmax(-1)
    choices = sample_tokens(
        logits, [Sampling(0.5, 0.5, logprobs=4), Sampling(logprobs=0), Sampling()], [0.9, 0.0, 0.0]
    )
    assert choices[0].logprob == pytest.approx(
        wanted[0, choices[0].token].item(), abs=tolerances.LOGPROB
    )
    likeliest, ids = wanted[0].topk(4)
    assert [token for token, _ in choices[0].top] == ids.tolist()
    assert [logprob for _, logprob in choices[0].top] == pytest.approx(
        likeliest.tolist(), abs=tolerances.LOGPROB
    )
    assert choices[1].logprob is not None
    assert choices[1].top == ()
    assert choices[2] == SampledToken(int(logits[2].argmax()), True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_of_broken_numbers_says_so(value: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = value
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, 0.9, logprobs=2)):
        assert [choice.finite for choice in sample_tokens(logits, [sampling] * 2, [0.5, 0.5])] == [
            True,
            False,
        ]


def test_forbidden_tokens_are_no_broken_numbers() -> None:
    (choice,) = sample_tokens(torch.tensor([[float("-inf"), 0.0]]), [Sampling(1.0)], [0.0])
    assert choice == SampledToken(1, True)


def test_dice() -> None:
    def four(seed: int | None) -> list[float]:
        dice = UniformDraws(Sampling(1.0, seed=seed))
        return [dice.next_uniform() for _ in range(4)]

    assert four(7) == four(7)
    assert four(-7) == four(-7) != four(7)
    assert four(None) != four(None)
    assert UniformDraws(Sampling()).next_uniform() == 0.0


def test_top_p_takes_no_token_beyond_the_one_that_meets_it_exactly() -> None:
    """Of four tokens of 1/4 each, a half is two."""
    found = tokens(torch.zeros(4), Sampling(temperature=1.0, top_p=0.5), 400)
    assert len(found.unique()) == 2
    found = tokens(torch.zeros(4), Sampling(temperature=1.0, top_p=0.75), 400)
    assert len(found.unique()) == 3
