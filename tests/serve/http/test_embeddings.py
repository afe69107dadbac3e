"""Vectors of texts: transformers' numbers, whatever else is in the batch, through OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers.normalizers import Lowercase
from torch.nn import functional

from ingot.base.errors import WrongInput
from ingot.serve.native.embedding import Pooling, embed, read_pooling
from ingot.serve.native.model import LoadedModel, load
from ingot.tokenizers.bpe import train_bpe
from tests import tolerances
from tests.serve.running import Running, running
from tests.serve.tiny import TEXT, make_classifier
from tests.small import copy_of

TEXTS = ["the", "five wizards box quietly in the äußere Straße", "dog fox"]


def theirs(folder: Path, ids: list[list[int]], mode: str = "mean") -> torch.Tensor:
    """Each text alone, through transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    vectors = []
    with torch.no_grad():
        for row in ids:
            states = model(torch.tensor([row])).last_hidden_state[0]
            pooled = {"mean": states.mean(0), "cls": states[0], "lasttoken": states[-1]}
            vectors.append({**pooled, "max": states.amax(0)}[mode])
    return functional.normalize(torch.stack(vectors), dim=-1)


def close(ours: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(ours), wanted, rtol=0, atol=tolerances.LOGPROB)


def test_a_decoders_vectors_through_openais_client(
    server: Running, folder: Path, loaded: LoadedModel
) -> None:
    wanted = theirs(folder, [loaded.tokenizer.encode_prompt(text) for text in TEXTS])
    count = sum(len(loaded.tokenizer.encode_prompt(text)) for text in TEXTS)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for form in ("float", "base64"):
            answer = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=form)  # type: ignore[arg-type]
            assert [item.index for item in answer.data] == [0, 1, 2]
            vectors = [item.embedding for item in answer.data]
            if form == "float":
                close(vectors, wanted)
        default = client.embeddings.create(model="tiny", input=TEXTS * 40)
        close([item.embedding for item in default.data], wanted.repeat(40, 1))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
        for changes, words in (
            ({"dimensions": 7}, "gives 32 dimensions"),
            ({"input": []}, "give a text"),
            ({"input": ["a"] * 2049}, "at most 2048"),
            ({"input": ["a", "b", [5, 9999]]}, "prompt 2: token 9999 is not in the vocabulary"),
            ({"model": "other"}, "not served here"),
        ):
            with pytest.raises(openai.APIStatusError, match=words):
                client.embeddings.create(**{"model": "tiny", "input": TEXTS, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT without a head, as sentence-transformers keep theirs."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bare") / "model"
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=320,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=40,
        pad_token_id=2,
        initializer_range=0.5,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    train_bpe([TEXT * 20, TEXT.title() * 20], 320).save(folder)
    return folder


def with_pooling(folder: Path, **settings: Any) -> None:
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules += [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken", "max"])
def test_an_encoder_by_its_own_pooling(bare: Path, mode: str) -> None:
    """Padding of a shorter neighbour is in no vector."""
    name = f"pooling_mode_{mode}" + ("" if mode == "lasttoken" else "_tokens")
    with_pooling(bare, **{"pooling_mode_max_tokens": False, name: True})
    loaded = load(bare)
    assert (loaded.kind, loaded.labels, loaded.pooling) == ("encoder", (), Pooling(mode))  # type: ignore[arg-type]
    ids = [loaded.encode_to_embed(text) for text in TEXTS]
    close(embed(loaded.model, ids, [loaded.pooling] * 3), theirs(bare, ids, mode))


def test_a_folder_that_reads_in_lower_case_is_read_so(bare: Path, tmp_path: Path) -> None:
    """As tokenizers lowers a text, which sentence-transformers has do it."""
    folder = copy_of(bare, tmp_path / "lower")
    with_pooling(folder, pooling_mode="cls")
    text = "Copper MELTS, ΟΔΟΣ İ"
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": false}')
    cased = load(folder).encode_to_embed(text)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    loaded, lowered = load(folder), Lowercase().normalize_str(text)
    assert loaded.encode_to_embed(text) == loaded.tokenizer.encode_alone(lowered) != cased


def test_what_a_folder_asks_for_and_nobody_computes_is_refused(bare: Path) -> None:
    with_pooling(bare, pooling_mode="weightedmean")
    with pytest.raises(WrongInput, match="asks for pooling by weightedmean"):
        read_pooling(bare)
    (bare / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.Dense"}]))
    with pytest.raises(WrongInput, match="asks for a module Dense"):
        read_pooling(bare)


def test_a_classifiers_vectors(tmp_path: Path) -> None:
    """RoBERTa counts positions by its padding."""
    loaded = load(make_classifier(tmp_path / "model"))
    ids = [loaded.encode_to_embed(text) for text in TEXTS]
    close(embed(loaded.model, ids, [Pooling()] * 3), theirs(tmp_path / "model", ids))


@pytest.mark.slow
def test_an_encoder_without_classes_is_served(bare: Path) -> None:
    with_pooling(bare, pooling_mode="mean")
    with running(bare) as server, server.client() as client:
        answer = client.post("/v1/embeddings", json={"input": TEXTS})
        assert len(answer.json()["data"]) == 3
        for path, body in (
            ("/predict", {"instances": ["a"]}),
            ("/v1/completions", {"prompt": "a"}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400
            assert "an encoder without classes" in response.json()["error"]["message"]
