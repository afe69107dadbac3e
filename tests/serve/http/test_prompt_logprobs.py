"""Log-probabilities of prompts: the model's own, in vLLM's and OpenAI's formats."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import openai
import pytest
import torch

from ingot.models.generation.generator import PREFILL_TOKENS, Generator
from ingot.models.generation.request import Request
from ingot.models.generation.sampling import Sampling
from ingot.models.native.decoder import Decoder
from ingot.serve.native.model import LoadedModel
from tests import tolerances
from tests.serve.running import Running

PROMPT = "five wizards box quietly in the äußere Straße"


@torch.inference_mode()
def wanted(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """`[T - 1, V]`: of every token after the first."""
    assert isinstance(loaded.model, Decoder)
    hidden = loaded.model.hidden(torch.tensor([ids]), torch.arange(len(ids))[None])
    return loaded.model.logits(hidden[0, :-1]).log_softmax(-1)


def test_echoed_prompts_through_openais_client(server: Running, loaded: LoadedModel) -> None:
    ids = loaded.tokenizer.encode_prompt(PROMPT)
    table = wanted(loaded, ids)
    own = table.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    options: Any = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "echo": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.completions.create(max_tokens=3, logprobs=1, **options).choices
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.text_offset is not None
        assert told.tokens is not None
        assert len(told.token_logprobs) == len(told.tokens) == len(ids) + 3
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=tolerances.LOGPROB)
        for top, value, row in zip(
            told.top_logprobs[1 : len(ids)], own, table.amax(-1).tolist(), strict=True
        ):
            assert max(top.values()) == pytest.approx(row, abs=tolerances.LOGPROB)
            assert min(top.values()) == pytest.approx(value, abs=tolerances.LOGPROB)
        for text, place in zip(told.tokens[1:], told.text_offset[1:], strict=True):
            assert "\ufffd" in text or choice.text[place:].startswith(text)
        streamed: list[Any] = []
        for chunk in client.completions.create(max_tokens=3, logprobs=1, stream=True, **options):
            streamed += chunk.choices[0].logprobs.token_logprobs  # type: ignore[union-attr, operator]
        assert streamed[1:] == pytest.approx(told.token_logprobs[1:], abs=tolerances.LOGPROB)
        scored = client.completions.create(max_tokens=0, logprobs=1, **options)
        assert scored.usage is not None
        assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(ids), 0)
        *_, end = client.completions.create(
            max_tokens=0, stream=True, stream_options={"include_usage": True}, **options
        )
        assert end.usage == scored.usage.model_copy(update={"prompt_tokens_details": ANY})
        (alone,) = scored.choices
        assert (alone.text, len(alone.logprobs.tokens)) == (PROMPT, len(ids))  # type: ignore[arg-type, union-attr]
        by_id = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1}
        ).choices[0]
    first, *rest = by_id.prompt_logprobs  # type: ignore[attr-defined]
    assert first is None
    ranks = (table > table.gather(-1, torch.tensor(ids[1:])[:, None])).sum(-1) + 1
    for token, items, value, rank in zip(ids[1:], rest, own, ranks.tolist(), strict=True):
        assert items[str(token)]["logprob"] == pytest.approx(value, abs=tolerances.LOGPROB)
        assert items[str(token)]["rank"] == rank
        assert len(items) == (1 if rank == 1 else 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"prompt_logprobs": 1, "stream": True}, "are not streamed"),
        ({"prompt": ["a b " * 1000] * 40, "prompt_logprobs": 20}, "log-probabilities"),
    ],
)
def test_refusals(server: Running, changes: dict[str, Any], words: str) -> None:
    with server.client() as client:
        response = client.post("/v1/completions", json={"prompt": "a", **changes})
    assert (response.status_code, words in response.text) == (400, True)


def test_long_prompts_are_scored_in_parts_and_ends_are_told(loaded: LoadedModel) -> None:
    """Whoever drops the last token of an answer, as lm-evaluation-harness does, must find one."""
    ids = (loaded.tokenizer.encode_prompt(PROMPT) * 40)[: PREFILL_TOKENS + 70]
    assert isinstance(loaded.model, Decoder)
    request = Request(ids, 1, Sampling(logprobs=1), prompt_logprobs=1)
    short = Request(ids[:9], 1, Sampling(logprobs=1), prompt_logprobs=0)
    every = range(loaded.model.config.vocab_size)
    generator = Generator(loaded.model, eos=every, decode=loaded.tokenizer.decode, max_rows=2)
    answers = generator.run([short, request])
    for answer, prompt in zip(answers, (ids[:9], ids), strict=True):
        own = wanted(loaded, prompt).gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert [token.id for token in answer.prompt] == prompt
        told = [token.logprob for token in answer.prompt[1:]]
        assert told == pytest.approx(own.tolist(), abs=tolerances.LOGPROB)
        assert (answer.finish, len(answer.tokens)) == ("stop", 1)
