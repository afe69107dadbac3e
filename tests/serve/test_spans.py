"""A T5 behind the server that writes what stands at sentinels: what transformers generates, with the
sentinels that tell which span is which.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.models.generation.request import REPLACEMENT
from ingot.serve.predict import predict
from ingot.tokenizers.bpe import EOS, PAD, train_bpe
from tests.serve.running import Running, running
from tests.serve.tiny import TEXT

ASKED = "the quick <extra_id_0> fox jumps <extra_id_1> the lazy dog"
MOST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 that writes sentinels among other tokens."""
    from transformers import T5Config, T5ForConditionalGeneration

    made = tmp_path_factory.mktemp("spans") / "model"
    torch.manual_seed(5)
    tokenizer = train_bpe([TEXT * 20, TEXT.title() * 20], 400, spans=True)
    config = T5Config(
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=tokenizer.token_id(PAD),
        eos_token_id=tokenizer.token_id(EOS),
        decoder_start_token_id=tokenizer.token_id(PAD),
        initializer_factor=8.0,
    )
    T5ForConditionalGeneration(config).save_pretrained(made)
    tokenizer.save(made)
    return made


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[Running]:
    with running(folder) as made:
        yield made


def theirs(folder: Path, text: str) -> tuple[str, str]:
    """What transformers generates: with all special tokens but those around it, and with none."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=MOST)[0]
    written = tokenizer.decode([one for one in ids if one not in (tokenizer.pad_token_id, 1)])
    return written, tokenizer.decode(ids, skip_special_tokens=True)


def completed(server: Running, prompt: str, **more: Any) -> str:
    body = {"prompt": prompt, "max_tokens": MOST, "temperature": 0, **more}
    with server.client() as client:
        return str(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_spans_are_written_behind_their_sentinels(serving: Running, folder: Path) -> None:
    wanted, bare = theirs(folder, ASKED)
    assert "<extra_id_" in wanted
    assert completed(serving, ASKED) == wanted != bare
    with serving.client() as client:
        asked = {"instances": [ASKED], "parameters": {"max_tokens": MOST, "temperature": 0}}
        assert client.post("/predict", json=asked).json()["predictions"] == [wanted]
        beams = asked | {"parameters": {"max_tokens": MOST, "beams": 2}}
        (searched,) = client.post("/predict", json=beams).json()["predictions"]
    assert "<extra_id_" in searched
    plain = "the quick brown fox"
    # A character that is not finished is not given out.
    assert completed(serving, plain) == theirs(folder, plain)[1].rstrip(REPLACEMENT)


def test_predict_reads_sentinels_too(folder: Path) -> None:
    assert predict(folder, ASKED, max_tokens=MOST) == theirs(folder, ASKED)[0]
