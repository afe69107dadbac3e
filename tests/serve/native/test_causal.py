"""transformers' generate behind our routes: what transformers itself says, greedily, alone and in
company; streams, stop strings, limits.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from ingot.base.errors import WrongInput
from ingot.models.generation.loop import GenerationJob
from ingot.models.generation.request import CompletionChunk, Request, join_chunks
from ingot.models.generation.sampling import Sampling
from ingot.serve.native.causal import DEFAULT_POSITIONS, CausalModel, TransformersGenerator
from ingot.serve.native.embedding import Embedder, Embedding, EmbeddingRequest, Pooling, embed
from ingot.serve.native.model import LoadedModel, load
from tests.serve.running import running
from tests.serve.tiny import TEXT, changed_config, make_folder

PROMPTS = [
    "the",
    "five wizards box",
    "the quick brown fox jumps over the lazy dog while",
    "Straße, ",
    "Q",
]
_SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": _SMALL,
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 64,
    },
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
    "phi3": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": 16,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    },
    "xlnet": {"d_model": 32, "n_head": 2, "n_layer": 2, "d_inner": 48},
}


@pytest.fixture(scope="module")
def by_transformers(folder: Path) -> LoadedModel:
    torch.set_num_threads(1)
    return load(folder, engine="transformers")


def theirs(folder: Path, ids: list[int], tokens: int) -> list[int]:
    """transformers' own greedy answer to one prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        mask = torch.ones_like(
            prompt
        )  # without it transformers would take our BOS, which is token 0 here, for padding
        rows = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return rows[0].tolist()[len(ids) :]


def test_greedy_answers_are_transformers_own_and_our_decoders(
    folder: Path, loaded: LoadedModel, by_transformers: LoadedModel
) -> None:
    """All prompts in one batch, of different lengths, against each alone."""
    assert isinstance(by_transformers.model, CausalModel)
    requests = [Request(by_transformers.encode(prompt), 24) for prompt in PROMPTS]
    answers = by_transformers.worker(8).run(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert [token.id for token in answer.tokens] == theirs(folder, list(request.prompt), 24)
        assert (answer.generated, answer.finish) == (24, "length")
    assert [answer.text for answer in answers] == [
        answer.text for answer in loaded.worker(8).run(requests)
    ]


def test_sampling_log_probabilities_and_stop_strings_are_those_of_our_decoder(
    loaded: LoadedModel, by_transformers: LoadedModel
) -> None:
    requests = [
        Request(loaded.encode("the"), 30, Sampling(1.0, 0.9, seed, 2), ("o", "xq"))
        for seed in range(6)
    ]
    for ours, answer in zip(
        loaded.worker(8).run(requests), by_transformers.worker(8).run(requests), strict=True
    ):
        assert (answer.text, answer.finish, answer.generated) == (
            ours.text,
            ours.finish,
            ours.generated,
        )
        assert [token.logprob for token in answer.tokens] == pytest.approx(
            [token.logprob for token in ours.tokens], abs=1e-4
        )


def test_tokens_come_one_by_one_and_a_cancelled_request_ends_alone(
    by_transformers: LoadedModel,
) -> None:
    worker = by_transformers.worker(2)
    assert isinstance(worker, TransformersGenerator)
    endless, long, waiting = (
        worker.add(Request(by_transformers.encode(prompt), tokens))
        for prompt, tokens in (("the", 3000), ("fox", 40), ("dog", 40))
    )
    first = worker.step()
    assert {job for job, _ in first} == {endless, long}
    assert [piece.generated for _, piece in first] == [1, 1]
    worker.cancel(endless)
    rest = []
    while worker.busy:
        rest += worker.step()
    assert endless not in {job for job, _ in rest}
    assert endless.generated == 1
    assert [piece.finish for job, piece in rest if job is long][-1] == "length"
    assert [piece.finish for job, piece in rest if job is waiting][-1] == "length"
    assert worker.busy == 0


def test_nothing_is_computed_but_by_the_caller(by_transformers: LoadedModel) -> None:
    """A thread that is still inside a library when the interpreter ends takes the process down with
    it, so there is none; and what nobody asks for is not computed.
    """
    before = threading.enumerate()
    worker = by_transformers.worker(1)
    job = worker.add(Request(by_transformers.encode("the"), 6))
    pieces = worker.step()
    assert (job.generated, threading.enumerate()) == (1, before)
    while worker.busy:
        pieces += worker.step()
    assert [(piece.generated, piece.finish) for whose, piece in pieces if whose is job] == [
        (count, "length" if count == 6 else None) for count in range(1, 7)
    ]


def test_wishes_that_lie_beside_the_weights_change_nothing(
    folder: Path, tmp_path: Path, by_transformers: LoadedModel
) -> None:
    wishing = changed_config(folder, tmp_path / "wishing")
    (wishing / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [], "repetition_penalty": 5.0, "max_length": 12})
    )
    request = Request(by_transformers.encode("the"), 20)
    assert (
        load(wishing, engine="transformers").worker(1).run([request])[0].text
        == by_transformers.worker(1).run([request])[0].text
    )


def test_an_answer_ends_at_eos_and_at_the_last_position(
    tmp_path: Path, by_transformers: LoadedModel
) -> None:
    ids = by_transformers.encode("the")
    (plain,) = by_transformers.worker(1).run([Request(ids, 10)])
    ending = load(make_folder(tmp_path / "ending", eos=[plain.tokens[4].id]), engine="transformers")
    (answer,) = ending.worker(1).run([Request(ids, 10)])
    first = [token.id for token in plain.tokens].index(plain.tokens[4].id)
    assert (answer.finish, answer.generated) == ("stop", first + 1)
    narrow = load(
        make_folder(tmp_path / "narrow", max_position_embeddings=16), engine="transformers"
    )
    (cut,) = narrow.worker(1).run([Request(ids, 100)])
    assert (cut.finish, cut.generated) == ("length", 16 - len(ids))


def test_numbers_that_are_not_finite_are_an_error_of_that_request(
    by_transformers: LoadedModel,
) -> None:
    worker = by_transformers.worker(1)
    assert isinstance(by_transformers.model, CausalModel)
    weight = by_transformers.model.inner.model.norm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        (answer,) = worker.run([Request(by_transformers.encode("the"), 5)])
        weight.copy_(kept)
    assert answer.finish == "error"


def unknown(folder: Path, kind: str = "gpt2", **changes: Any) -> Path:
    """A causal model that ingot's own decoder does not know."""
    made = make_folder(folder)
    (made / "model.safetensors").unlink()
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=320, bos_token_id=0, eos_token_id=0, **{**SIZES[kind], **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(made)
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    return made


def test_native_leaves_to_transformers_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = unknown(tmp_path / "gpt2")
    loaded = load(folder)
    assert (
        "model_type gpt2 is not one of ingot's own decoders, so transformers generates"
        in capsys.readouterr().err
    )
    assert loaded.model.config.max_position_embeddings == 64
    requests = [Request(loaded.encode(prompt), 12) for prompt in PROMPTS[:3]]
    for request, answer in zip(requests, loaded.worker(8).run(requests), strict=True):
        assert [token.id for token in answer.tokens] == theirs(folder, list(request.prompt), 12)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo"])
def test_a_batch_never_reads_behind_the_models_last_position(kind: str, tmp_path: Path) -> None:
    """Neither in rows that are finished or cancelled, nor, where keys are counted, with padding;
    what goes on says what it says alone.
    """
    loaded = load(unknown(tmp_path / "model", kind))
    ids = loaded.encode(TEXT * 3)
    requests = [Request(ids[:length], 50) for length in (58, 61, 5, 20)]
    alone = [loaded.worker(1).run([request])[0] for request in requests]
    assert [answer.generated for answer in alone] == [6, 3, 50, 44]
    worker = loaded.worker(8)
    assert isinstance(worker, TransformersGenerator)
    jobs = [worker.add(request) for request in requests]
    parts: dict[GenerationJob, list[CompletionChunk]] = {job: [] for job in jobs}
    while worker.busy:
        for job, piece in worker.step():
            parts[job].append(piece)
        worker.cancel(jobs[1])
    assert len(parts.pop(jobs[1])) == 1
    for pieces, expected in zip(parts.values(), [alone[0], *alone[2:]], strict=True):
        answer = join_chunks(pieces)
        assert [token.id for token in answer.tokens] == [token.id for token in expected.tokens]
        assert (answer.text, answer.finish) == (expected.text, "length")


@pytest.mark.parametrize("kind", ["rwkv", "mamba", "gpt2"])
def test_requests_that_a_model_would_mix_are_answered_one_by_one(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only those: RWKV reads padding, and the states of its neighbours; the others do not."""
    loaded = load(unknown(tmp_path / "model", kind))
    worker = loaded.worker(8)
    assert isinstance(worker, TransformersGenerator)
    requests = [Request(loaded.encode(prompt), 6) for prompt in PROMPTS]
    alone = [loaded.worker(1).run([request])[0] for request in requests]
    assert "does not compute" not in capsys.readouterr().err
    for request in requests:
        worker.add(request)
    assert len(worker.step()) == (1 if kind == "rwkv" else len(requests))
    worker.clear()
    together = worker.run(requests)
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    said = capsys.readouterr().err.count("RwkvForCausalLM does not compute requests together as")
    assert said == (kind == "rwkv")


def test_a_longer_text_beside_it_changes_no_frequencies(tmp_path: Path) -> None:
    """Of LongRoPE, by which transformers computes a whole batch as its longest row: what stays
    short is computed together, what is long from the start, too.
    """
    loaded = load(unknown(tmp_path / "model", "phi3"), engine="transformers")
    assert isinstance(loaded.model, CausalModel)
    assert (loaded.model.keeps_rows_apart, loaded.model.turns_at) == (True, 16)
    ids = loaded.encode(TEXT)
    asked = ((6, 4), (3, 10), (40, 5), (20, 9), (9, 20), (5, 3), (14, 2))
    requests = [Request(ids[:length], count) for length, count in asked]
    alone = [loaded.worker(1).run([request])[0] for request in requests]
    worker = loaded.worker(8)
    jobs = [worker.add(request) for request in requests]
    parts: dict[Any, list[CompletionChunk]] = {job: [] for job in jobs}
    batches: list[int] = []
    while worker.busy:
        pieces = worker.step()
        batches += [len(pieces)] if pieces[0][1].generated == 1 else []
        for job, piece in pieces:
            parts[job].append(piece)
    assert batches == [2, 2, 1, 1, 1]
    assert [join_chunks(parts[job]).text for job in jobs] == [answer.text for answer in alone]
    embedder = Embedder(loaded.model)
    texts = [EmbeddingRequest(ids[:length], 1) for length in (6, 40)]
    own = [vector for text in texts for vector in embed(loaded.model, [text.prompt], [Pooling()])]
    given = [embedder.add(text) for text in texts]
    vectors = dict(answer for _ in texts for answer in embedder.step())
    assert [vectors[job] for job in given] == [
        Embedding("", (), 0, "stop", tuple(vector)) for vector in own
    ]


def test_positions_are_found_under_the_names_that_types_give_them(tmp_path: Path) -> None:
    """A longer prompt is refused, not a step that fails; -1 is no bound."""
    mpt = load(unknown(tmp_path / "mpt", "mpt"))
    ids = mpt.encode(TEXT * 3)
    (answer,) = mpt.worker(1).run([Request(ids[:60], 9)])
    assert (answer.generated, answer.finish) == (4, "length")
    with pytest.raises(WrongInput, match="has 64 tokens, but the model has 64 positions"):
        mpt.worker(1).add(Request(ids[:64], 9))
    xlnet = load(unknown(tmp_path / "xlnet", "xlnet"))
    assert xlnet.model.config.max_position_embeddings == DEFAULT_POSITIONS
    (answer,) = xlnet.worker(1).run([Request(ids[:60], 9)])
    assert [token.id for token in answer.tokens] == theirs(tmp_path / "xlnet", ids[:60], 9)


def test_what_transformers_cannot_open_is_named(tmp_path: Path) -> None:
    odd = make_folder(tmp_path / "odd")
    (odd / "config.json").write_text(
        json.dumps({**json.loads((odd / "config.json").read_text()), "model_type": "nonesuch"})
    )
    with pytest.raises(WrongInput, match="does not open in transformers as a causal model"):
        load(odd, engine="transformers")
    (odd / "config.json").write_text(
        json.dumps(
            {
                **json.loads((odd / "config.json").read_text()),
                "auto_map": {"AutoModelForCausalLM": "modeling_odd.Odd"},
            }
        )
    )
    with pytest.raises(WrongInput, match=r"is computed by code of its own \(modeling_odd.Odd\)"):
        load(odd, engine="transformers")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "base_model_name_or_path": str(make_folder(tmp_path / "base")),
                "r": 2,
                "lora_alpha": 2,
                "target_modules": ["q_proj"],
                "task_type": "CAUSAL_LM",
            }
        )
    )
    save_file(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(2, 32)},
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"is an adapter, and serve\.engine transformers opens whole models; give the merged one"
        ),
    ):
        load(adapter, engine="transformers")


def test_the_server_streams_what_it_says_whole(folder: Path, loaded: LoadedModel) -> None:
    (expected,) = loaded.worker(1).run([Request(loaded.encode("fox"), 20)])
    body = {"prompt": "fox", "max_tokens": 20, "temperature": 0}
    with running(folder, engine="transformers") as server, server.client() as client:
        assert (
            client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected.text
        )
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            events = [
                json.loads(line.removeprefix("data: "))
                for line in response.iter_lines()
                if line and "[DONE]" not in line
            ]
        assert "".join(event["choices"][0]["text"] for event in events) == expected.text
        assert len(events) > 5
        assert client.post(
            "/predict", json={"instances": ["fox"], "parameters": {"max_tokens": 20}}
        ).json() == {"predictions": [expected.text]}


def test_answers_go_on_after_a_failure(by_transformers: LoadedModel) -> None:
    requests = [Request(by_transformers.encode(prompt), 12) for prompt in PROMPTS[:3]]
    worker = by_transformers.worker(8)
    assert isinstance(worker, TransformersGenerator)
    expected = [answer.text for answer in worker.run(requests)]
    jobs = [worker.add(request) for request in requests]
    texts = dict.fromkeys(jobs, "")
    for failed in (False, True):
        if failed:
            worker.clear()
            for job in jobs:
                worker.resume(job)
        for _ in range(5 if not failed else 20):
            for job, piece in worker.step():
                texts[job] += piece.text
    assert [texts[job] for job in jobs] == expected
