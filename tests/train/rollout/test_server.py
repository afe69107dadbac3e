"""What surrounds a vLLM that samples, without one: `tests/serve/engines` has the real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import Failed, WrongInput
from ingot.models.generation.policy import PolicySampler, answer_draws
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.train.rollout import server
from ingot.train.rollout.server import (
    EMBEDDING,
    EMPTY,
    PolicyServer,
    answer_seed,
    score,
    unlike,
)
from ingot.train.trainer import train
from tests import tolerances
from tests.loopback import Loopback
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


class _Busy(BaseHTTPRequestHandler):
    """Answers a path with what is planned for it, once each, and then as vLLM does."""

    protocol_version = "HTTP/1.1"
    plans: ClassVar[dict[str, list[tuple[int, bytes]]]] = {}
    answers: ClassVar = {
        "/weight_info": {"weight_version": "v1"},
        "/v1/completions": {
            "choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0, -2.0]}}]
        },
    }

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        planned = self.plans.get(self.path, [])
        code, data = (
            planned.pop(0) if planned else (200, json.dumps(self.answers[self.path]).encode())
        )
        if not code:
            self.close_connection = True
            return
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PolicyServer]:
    monkeypatch.setattr(server, "PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(server, "POLL_S", 0.01)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    web = Loopback(_Busy)
    given = {"sampler": {"url": web.address}, "old_logprobs": "recomputed"}
    recipe = digits_recipe(tmp_path, given)
    setup = SimpleNamespace(recipe=recipe, compute="fp32")
    made = PolicyServer(cast("Any", setup), tmp_path / "sampler", [2])
    yield made
    made.close()
    web.server_close()
    _Busy.plans.clear()


DROPPED, BUSY, MANY, PAGE = (0, b""), (503, b"busy"), (429, b"busy"), (200, b"<html>")


@pytest.mark.parametrize("whim", [DROPPED, BUSY, MANY])
def test_a_server_that_is_busy_for_a_moment_costs_no_training(
    vllm: PolicyServer, whim: tuple[int, bytes]
) -> None:
    """Neither where it starts, nor the answers that others gave meanwhile. No proxy is asked."""
    for path in _Busy.answers:
        _Busy.plans[path] = [whim, whim]
    assert vllm._wait(lambda: False)
    assert vllm._ask([1], 1).ids == [1, 2]
    _Busy.plans["/weight_info"] = [whim]
    vllm._check_version("v1")
    _Busy.plans["/v1/completions"] = [whim] * 3
    with pytest.raises(Failed, match=r"vLLM at .* /v1/completions"):
        vllm._ask([1], 1)


def test_what_is_no_vllm_is_told(vllm: PolicyServer) -> None:
    _Busy.plans |= {path: [PAGE] for path in _Busy.answers}
    for ask in (lambda: vllm._ask([1], 1), lambda: vllm._check_version("v1")):
        with pytest.raises(Failed, match=r"as no vLLM does: <html>; start it with"):
            ask()
    _Busy.plans["/weight_info"] = [(404, b"")]
    with pytest.raises(WrongInput, match="answers 404 to /weight_info"):
        vllm._wait(lambda: False)
    _Busy.plans["/v1/completions"] = [(400, b"too long")]
    with pytest.raises(Failed, match="refuses /v1/completions: 400 too long"):
        vllm._ask([1], 1)


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
