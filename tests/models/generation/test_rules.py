"""Biases and penalties are those of transformers' processors and of OpenAI's formula, hold for the
row that asked for them alone, and leave log-probabilities the model's own.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ingot.base.errors import WrongInput
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request, check_request
from ingot.models.generation.rules import LogitsRules, rules_of
from ingot.models.generation.sampling import SHORTLIST, Sampling, sample_tokens
from ingot.models.hf.folder import load_model
from ingot.models.native.decoder import Decoder
from tests.models.tiny import make_reference

PROMPT = [3, 1, 4, 1, 5]
WRITTEN = [4, 9, 4, 4, 2]


def ruled(sampling: Sampling, logits: torch.Tensor, **options: int) -> torch.Tensor:
    rules = LogitsRules(Request(PROMPT, 99, sampling, **options), [7, 2])
    for token in WRITTEN:
        rules.push(token)
    changed = logits.clone()
    rules.apply(changed)
    return changed


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(3)) * 3


def test_the_repetition_penalty_is_transformers(logits: torch.Tensor) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty=1.3)
    wanted = theirs(torch.tensor([PROMPT + WRITTEN]), logits[None].clone())[0]
    assert torch.equal(ruled(Sampling(repetition_penalty=1.3), logits), wanted)


def test_presence_and_frequency_count_what_was_written(logits: torch.Tensor) -> None:
    """OpenAI's formula: mu - count * frequency - (count > 0) * presence; the prompt counts
    nothing.
    """
    counts = Counter(WRITTEN)
    wanted = [
        float(logits[token]) - counts[token] * 0.4 - (counts[token] > 0) * 0.7
        for token in range(12)
    ]
    changed = ruled(Sampling(presence_penalty=0.7, frequency_penalty=0.4), logits)
    assert changed.tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_bias_comes_before_penalties(logits: torch.Tensor) -> None:
    """As in vLLM, a penalty divides what the bias has made of a logit."""
    changed = ruled(Sampling(logit_bias=((4, 100.0), (0, -3.0)), repetition_penalty=2.0), logits)
    assert float(changed[4]) == pytest.approx((float(logits[4]) + 100) / 2)
    assert float(changed[0]) == pytest.approx(float(logits[0]) - 3)


def test_no_end_before_min_tokens(logits: torch.Tensor) -> None:
    assert ruled(Sampling(), logits, min_tokens=6)[[7, 2]].isneginf().all()
    assert torch.equal(ruled(Sampling(), logits, min_tokens=5), logits)


def test_most_requests_have_no_rules() -> None:
    assert rules_of(Request(PROMPT, 9, Sampling(0.7, 0.9, 3, 5, 40, 0.1)), [2]) is None
    assert rules_of(Request(PROMPT, 9, Sampling(presence_penalty=-0.1)), [2]) is not None
    assert rules_of(Request(PROMPT, 9, min_tokens=1), [2]) is not None


def test_a_rule_holds_for_its_row_and_leaves_log_probabilities_alone(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    biased = Sampling(logprobs=2, logit_bias=((best, -100.0),))
    rules = [rules_of(Request(PROMPT, 9, biased), ()), None]
    rows = torch.stack([logits, logits])
    before = rows.clone()
    first, second = sample_tokens(rows, [biased, Sampling(logprobs=2)], [0.0, 0.0], rules)
    assert (first.token == best, second.token) == (False, best)
    assert first.top == second.top
    assert first.top[0][0] == best
    own = logits.log_softmax(dim=0)
    assert first.logprob == pytest.approx(float(own[first.token]), abs=1e-6)
    assert torch.equal(rows, before)


def test_logits_that_are_not_finite_are_found_behind_a_rule() -> None:
    sampling = Sampling(logit_bias=((0, 1.0),))
    rules = rules_of(Request(PROMPT, 9, sampling), ())
    (choice,) = sample_tokens(torch.tensor([[0.0, float("nan"), 1.0]]), [sampling], [0.0], [rules])
    assert not choice.finite


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (3, 1.0, 0.0),
        (0, 1.0, 0.2),
        (5, 0.6, 0.0),
        (0, 0.7, 0.1),
        (4, 0.8, 0.15),
        (300, 0.9, 0.0),
        (10**30, 1.0, 0.0),
    ],
)
@pytest.mark.parametrize("vocabulary", [12, 2 * SHORTLIST])
def test_what_can_be_drawn_is_what_transformers_leaves(
    top_k: int, top_p: float, min_p: float, vocabulary: int
) -> None:
    """And each with its probability. min-p comes first and top-p last, as in vLLM. More tokens than
    there are, and more than a tensor can count, are all.
    """
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(5)) * 2
    warpers = LogitsProcessorList()
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k:
        warpers.append(TopKLogitsWarper(min(top_k, vocabulary)))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    wanted = warpers(torch.zeros(1, 0, dtype=torch.long), logits[None] / 0.8)[0].softmax(dim=0)
    count = 4000
    choices = sample_tokens(
        logits.expand(count, -1),
        [Sampling(0.8, top_p, top_k=top_k, min_p=min_p)] * count,
        [(index + 0.5) / count for index in range(count)],
    )
    drawn = torch.tensor([choice.token for choice in choices]).bincount(minlength=vocabulary)
    assert (drawn / count - wanted).abs().max() <= 1.5 / count
    assert not drawn[wanted == 0].any()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("model")
    return load_model(make_reference(folder), device=torch.device("cpu"))


def test_rules_of_one_request_do_not_reach_its_neighbours(model: Decoder) -> None:
    """Alone and together a request gets the same tokens, and a frequency penalty repeats less."""
    plain = Request([5, 6, 7], 24)
    held = Request([5, 6, 7], 24, Sampling(frequency_penalty=2.0, presence_penalty=2.0))
    alone = [Generator(model, max_rows=1).run([request])[0] for request in (plain, held)]
    together = Generator(model, max_rows=2).run([plain, held])
    ids = [[token.id for token in completion.tokens] for completion in together]
    assert ids == [[token.id for token in completion.tokens] for completion in alone]
    assert len(set(ids[1])) > len(set(ids[0]))


def test_ends_of_a_request(model: Decoder) -> None:
    (whole,) = Generator(model).run([Request([5, 6, 7], 12)])
    ids = [token.id for token in whole.tokens]
    end = ids[3]
    (cut,) = Generator(model, eos=[end]).run([Request([5, 6, 7], 12)])
    (by_id,) = Generator(model).run([Request([5, 6, 7], 12, stop_ids=(end,))])
    assert (cut.finish, by_id.finish) == ("stop", "stop")
    assert [token.id for token in by_id.tokens] == ids[: ids.index(end)]
    (ignored,) = Generator(model, eos=[end]).run([Request([5, 6, 7], 12, ignore_eos=True)])
    assert [token.id for token in ignored.tokens] == ids
    (longer,) = Generator(model, eos=[end]).run([Request([5, 6, 7], 12, min_tokens=9)])
    assert longer.generated >= 9
    assert end not in [token.id for token in longer.tokens]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([5], 9, Sampling(logit_bias=((10**6, 1.0),))), "token 1000000 is not in the voc"),
        (Request([5], 9, stop_ids=(-1,)), "token -1 is not in the vocabulary"),
        (Request([5], 9, min_tokens=10), "min_tokens is 10 and max_tokens 9; lower the first"),
    ],
    ids=["bias", "stop", "min"],
)
def test_what_cannot_be_is_refused(model: Decoder, request_: Request, message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        check_request(request_, model.config)
