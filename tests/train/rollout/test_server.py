"""What surrounds a vLLM that samples, without one: `tests/serve/engines` has the real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import Failed, WrongInput
from ingot.models.generation.policy import PolicySampler, answer_draws
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.train.rollout.server import EMBEDDING, EMPTY, answer_seed, score, unlike
from ingot.train.trainer import train
from tests import tolerances
from tests.ranks import free_port
from tests.small import TINY_MODEL
from tests.train.rollout.digits import apart, digits_recipe, made_ready

TINY = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.5,
}


def test_answers_are_scored_as_our_own_sampler_scores_them() -> None:
    """Token by token, at a temperature, whatever the lengths."""
    model = Decoder(DecoderConfig.from_hf(TINY)).eval()
    init_weights(model, 5)
    sampler = PolicySampler(model, temperature=0.6, eos=[3], max_rows=4)
    prompts = [[1, 2], [4, 5, 6, 7], [8]]
    answers = sampler.sample(prompts, answer_draws(0, [(0, 0), (1, 0), (2, 0)], 6))
    assert answers is not None
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            found = score(model, prompt, answer.ids, 0.6)
        assert found.tolist() == pytest.approx(answer.logprobs, abs=tolerances.FIRST_RATIO)


def test_every_answer_has_a_seed_of_its_own() -> None:
    numbers = [(prompt, one) for prompt in range(20) for one in range(20)]
    assert len({answer_seed(0, number) for number in numbers}) == len(numbers)
    assert answer_seed(0, (1, 2)) == answer_seed(0, (1, 2)) != answer_seed(1, (1, 2))


NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({f"dp0:tp0:{NORM}": "a", f"dp0:tp0:{DOWN}": EMPTY}, None),
        ({f"dp0:tp0:{NORM}": "a", f"dp0:tp0:{DOWN}": "b"}, None),
        ({f"dp0:tp0:{NORM}": "other", f"dp0:tp0:{DOWN}": EMPTY}, "norm.weight is another"),
        ({f"dp0:tp0:{NORM}": "a", f"dp0:tp0:{DOWN}": "other"}, "down_proj.weight is another"),
        ({f"dp0:tp0:{DOWN}": EMPTY}, "no weight can be compared"),
        # A half of a matrix has another digest than the whole one, a norm has not.
        ({f"dp0:tp{n}:{name}": "a" for n in (0, 1) for name in (NORM, DOWN)}, None),
        ({f"dp0:tp{n}:{NORM}": "a" if n else "other" for n in (0, 1)}, "is another"),
    ],
)
def test_what_the_server_holds_is_compared(held: dict[str, str], said: str | None) -> None:
    found = unlike({NORM: "a", DOWN: "b"}, held)
    assert found == said or (said is not None and said in str(found))


def test_a_training_tells_how_the_server_is_started(tmp_path: Path) -> None:
    """And gives up in words where nobody starts it."""
    ready = made_ready(tmp_path / "ready")
    port = free_port()
    sampler = {"url": f"http://127.0.0.1:{port}", "timeout": 0.01}
    given = {"sampler": sampler, "old_logprobs": "recomputed"}
    tied = {**TINY_MODEL, "tie_word_embeddings": True}
    recipe = apart(ready, tmp_path / "run", given, train__steps=1, model__config=json.dumps(tied))
    with pytest.raises(Failed, match=f"--port {port} --dtype float32 --max-model-len 32"):
        train(recipe)
    folder = recipe.folder.root / "sampler"
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    (head,) = load_file(folder / "head.safetensors").values()
    assert torch.equal(head, load_file(folder / "model.safetensors")[EMBEDDING])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "old_logprobs recomputed; set that"),
        ({"old_logprobs": "recomputed", "quantize": True}, "has no packed weights"),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    knobs = {"model__quantize": "nf4", "model__lora": "{}"} if given.pop("quantize", 0) else {}
    with pytest.raises(WrongInput, match=said):
        digits_recipe(tmp_path, {"sampler": {"url": "http://127.0.0.1:1"}, **given}, **knobs)
