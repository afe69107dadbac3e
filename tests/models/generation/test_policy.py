"""Answers sampled for training: their log-probabilities are those of the policy that they come
from, and an answer does not depend on what is sampled beside it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ingot.base.errors import Failed
from ingot.models.generation.policy import PolicySampler, SampledAnswer, answer_draws
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from tests import tolerances
from tests.models.generation.test_sampling import NoFloatsInRow

EOS = 3
SIZES = {
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
PROMPTS = [[1, 2], [4, 5, 6, 7, 8], [9], [2, 2, 2], [1, 2], [11, 10]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = Decoder(DecoderConfig.from_hf(SIZES))
    init_weights(made, 1)
    with torch.no_grad():
        made.head_weight.mul_(40)  # far from uniform
    return made.eval()


def sampled(
    model: Decoder, prompts: list[list[int]], draws: np.ndarray, rows: int = 8, heat: float = 1.0
) -> list[SampledAnswer]:
    sampler = PolicySampler(model, temperature=heat, eos=[EOS], max_rows=rows)
    found = sampler.sample(prompts, draws)
    assert found is not None
    return found


def draws_of(count: int, most: int = 6) -> np.ndarray:
    return answer_draws(5, [(number, 0) for number in range(count)], most)


@pytest.mark.parametrize("heat", [1.0, 0.6, 1.7])
def test_log_probabilities_are_those_of_the_whole_row(model: Decoder, heat: float) -> None:
    """The end of an answer is a token like any other, with a log-probability of its own."""
    answers = sampled(model, PROMPTS, draws_of(len(PROMPTS)), heat=heat)
    assert {answer.finished for answer in answers} == {True, False}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.finished == (answer.ids[-1] == EOS)
        assert EOS not in answer.ids[:-1]
        assert answer.finished or len(answer.ids) == 6
        row = torch.tensor([prompt + answer.ids])
        with torch.no_grad():
            hidden = model.hidden(row, torch.arange(row.shape[1])[None])
            steps = (model.logits(hidden)[0] / heat).log_softmax(-1)
        wanted = [
            float(steps[len(prompt) - 1 + place, token]) for place, token in enumerate(answer.ids)
        ]
        assert answer.logprobs == pytest.approx(wanted, abs=tolerances.LOGPROB / 10)


def test_an_answer_does_not_depend_on_others_beside_it(model: Decoder) -> None:
    draws = draws_of(len(PROMPTS))
    together = sampled(model, PROMPTS, draws)
    for rows in (1, 2):
        apart = sampled(model, PROMPTS, draws, rows)
        assert [one.ids for one in apart] == [one.ids for one in together]
    alone = sampled(model, PROMPTS[3:4], draws[3:4])
    assert alone[0].ids == together[3].ids


def test_tokens_come_as_often_as_they_are_likely(model: Decoder) -> None:
    """4,000 first tokens after one prompt, none of the vocabulary left out: chi-squared below the
    value that one in 10,000 exceeds with 11 degrees of freedom.
    """
    count = 4000
    draws = draws_of(count, 1)
    found = sampled(model, [[1, 2]] * count, draws, rows=500, heat=1.5)
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.tensor([[1, 2]]), torch.arange(2)[None]))[0, -1]
    likely = (logits / 1.5).softmax(-1).double().numpy() * count
    seen = np.bincount([answer.ids[0] for answer in found], minlength=12)
    assert float(((seen - likely) ** 2 / likely).sum()) < 37.4


def test_the_same_answers_where_a_gpu_adds_up_in_one_order(model: Decoder) -> None:
    wanted = sampled(model, PROMPTS, draws_of(len(PROMPTS)))
    torch.use_deterministic_algorithms(True)
    try:
        with NoFloatsInRow():
            found = sampled(model, PROMPTS, draws_of(len(PROMPTS)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [one.ids for one in found] == [one.ids for one in wanted]


def test_draws_are_of_the_seed_the_prompt_and_the_number_alone() -> None:
    whole = answer_draws(7, [(4, 0), (4, 1), (5, 0)], 8)
    assert np.array_equal(answer_draws(7, [(5, 0)], 8)[0], whole[2])
    assert np.array_equal(answer_draws(7, [(4, 1)], 3)[0], whole[1, :3])
    others = [answer_draws(8, [(5, 0)], 8)[0], whole[0], whole[1]]
    assert not any(np.array_equal(one, whole[2]) for one in others)


def test_it_gives_up_when_asked_and_serves_again(model: Decoder) -> None:
    sampler = PolicySampler(model, temperature=1.0, eos=[EOS], max_rows=2)
    assert sampler.sample(PROMPTS, draws_of(len(PROMPTS)), lambda: True) is None
    again = sampler.sample(PROMPTS, draws_of(len(PROMPTS)))
    assert again == sampled(model, PROMPTS, draws_of(len(PROMPTS)), rows=2)


def test_numbers_that_are_not_finite_end_it(model: Decoder) -> None:
    broken = Decoder(model.config)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.head_weight[4] = torch.nan
    with pytest.raises(Failed, match="not finite"):
        sampled(broken.eval(), [[1]], draws_of(1))
