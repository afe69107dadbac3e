"""A masked language model behind the server: what transformers' fill-mask pipeline says, for any
number of masks, and its vectors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.errors import WrongInput
from ingot.serve.native.causal import TextEncoder
from ingot.serve.native.model import load
from ingot.serve.predict import predict
from ingot.tokenizers.bpe import MASK, train_bpe
from tests import tolerances
from tests.serve.running import Running, running
from tests.serve.tiny import TEXT, make_classifier

ONE = [f"the quick {MASK} fox", f"{MASK}", f"five wizards box quietly in the {MASK}"]
TWO = f"the {MASK} brown fox {MASK} over"


def make_masked(folder: Path) -> Path:
    """A random RoBERTa for texts of up to 64 tokens, whose positions begin behind padding."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(3)
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 320, masks=True)
    config = RobertaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=67,
        pad_token_id=2,
        initializer_range=0.5,
    )
    RobertaForMaskedLM(config).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_masked(tmp_path_factory.mktemp("masked") / "model")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Running]:
    with running(folder) as made:
        yield made


def ask(server: Running, body: Any, route: str = "/predict") -> httpx.Response:
    with server.client() as client:
        return client.post(route, json=body)


def close(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [one["token"] for one in found] == [one["token"] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=tolerances.LOGITS_FP32)
        assert one["token_str"] == other["token_str"]


def test_each_mask_gets_what_transformers_pipeline_gives_it(serving: Running, folder: Path) -> None:
    from transformers import pipeline

    theirs = pipeline("fill-mask", model=str(folder), top_k=5)
    answer = ask(serving, {"instances": [*ONE, {"text": TWO}]}).json()["predictions"]
    for text, found in zip(ONE, answer[:3], strict=True):
        (mask,) = found["masks"]
        wanted = theirs(text)
        close(mask, wanted)
        assert found["text"] == wanted[0]["sequence"]
    assert len(answer[3]["masks"]) == 2
    for mask, wanted in zip(answer[3]["masks"], theirs(TWO), strict=True):
        close(mask, wanted)
    asked = {"instances": [{"text": ONE[0]}], "parameters": {"top_k": 2}}
    (few,) = ask(serving, asked).json()["predictions"]
    close(few["masks"][0], theirs(ONE[0])[:2])
    spelled = {"instances": [ONE[0].replace(MASK, "[MASK]")]}
    close(ask(serving, spelled).json()["predictions"][0]["masks"][0], theirs(ONE[0]))


def test_a_prediction_from_the_folder_and_by_its_url(
    serving: Running, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (wanted,) = ask(serving, {"instances": [TWO]}).json()["predictions"]
    assert predict(folder, TWO) == wanted["text"]
    first = capsys.readouterr().err
    assert f"1: {wanted['masks'][0][0]['token_str'].strip()} " in first
    with serving.client() as client:
        assert predict(str(client.base_url), TWO) == wanted["text"]
    assert capsys.readouterr().err == first
    with pytest.raises(WrongInput, match="a masked language model writes no text"):
        predict(folder, TWO, max_tokens=5)
    with pytest.raises(WrongInput, match=r"the text has no mask; put .*mask.* where a token"):
        predict(folder, "the quick brown fox")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"instances": ["no mask"]}, "has no mask"),
        ({"instances": []}, "instances"),
        ({"instances": [ONE[0]], "parameters": {"top_k": 0}}, "top_k"),
        ({"instances": [ONE[0]], "parameters": {"max_tokens": 3}}, "max_tokens"),
        ({"instances": [MASK * 70]}, "positions"),
    ],
)
def test_what_cannot_be_filled_is_refused(body: Any, words: str, serving: Running) -> None:
    refused = ask(serving, body)
    assert refused.status_code == 400
    assert words in refused.text
    written = ask(serving, {"prompt": "the", "max_tokens": 2}, "/v1/completions")
    assert written.status_code == 400
    assert "is a masked language model and writes no text" in written.text


def test_it_embeds_texts_as_before(serving: Running, folder: Path) -> None:
    from transformers import AutoModel

    loaded = load(folder)
    ids = loaded.tokenizer.encode_framed("the quick fox")
    hidden = AutoModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[0]
    wanted = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).detach()
    vector = ask(serving, {"input": "the quick fox"}, "/v1/embeddings").json()["data"][0][
        "embedding"
    ]
    torch.testing.assert_close(torch.tensor(vector), wanted, rtol=0, atol=tolerances.LOGITS_FP32)


def test_one_without_its_head_is_an_encoder(folder: Path, tmp_path: Path) -> None:
    """sentence-transformers' folders are named after masked models whose head they left out."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    weights = {
        name.removeprefix("roberta."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("roberta.")
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert isinstance(load(tmp_path).model, TextEncoder)
    bare = make_classifier(tmp_path / "classes")
    config = json.loads((bare / "config.json").read_text())
    assert load(bare).kind == "encoder", config["architectures"]
