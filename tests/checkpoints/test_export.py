"""What ends a turn in training ends it in serving: the exported generation configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.checkpoints.export import copy_model, export_model
from ingot.models.architecture import DecoderConfig
from ingot.models.decoder import Decoder
from ingot.models.initial import initialise
from ingot.serve.loaded import load
from tests.tokenizers.small import chatty

CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu",
}


@pytest.mark.parametrize(("generation", "beside"), [
    (None, []), ({"eos_token_id": 5, "temperature": 0.7}, [5]), ({"eos_token_id": [5, 6]}, [5, 6]), ({"max_new_tokens": 9}, []),
])
def test_the_end_of_turn_token_is_added_to_what_was_there(tmp_path: Path, generation: dict[str, Any] | None, beside: list[int]) -> None:
    tokenizer = chatty()
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    initialise(model, 0)
    export_model(model, tokenizer, tmp_path / "model", export_type="fp32", lineage={}, generation=generation)
    ends = {tokenizer.special.eos, tokenizer.token_id("<|im_end|>")}
    assert len(ends) == 2
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == ends | set(beside)
    assert {key: value for key, value in written.items() if key in ("temperature", "max_new_tokens")} == {
        key: value for key, value in (generation or {}).items() if key != "eos_token_id"
    }
    assert load(tmp_path / "model").eos == ends | set(beside)


def test_a_copy_wants_a_tokenizer_that_fits_and_replaces_only_models(tmp_path: Path) -> None:
    tokenizer = chatty()
    model = Decoder(DecoderConfig.from_hf({**CONFIG, "vocab_size": tokenizer.vocab_size - 1}))
    initialise(model, 0)
    source, target = tmp_path / "model", tmp_path / "copy"
    export_model(model, tokenizer, source, export_type="fp32", lineage={})
    with pytest.raises(WrongInput, match=rf"its tokenizer has {tokenizer.vocab_size} ids, the model only {tokenizer.vocab_size - 1}"):
        copy_model(source, target, export_type=None, overwrite=False)
    assert not target.exists()
    fitting = Decoder(DecoderConfig.from_hf(CONFIG))
    initialise(fitting, 0)
    export_model(fitting, tokenizer, source, export_type="fp32", lineage={})
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(WrongInput, match="add --overwrite"):
        copy_model(source, target, export_type=None, overwrite=False)
    with pytest.raises(WrongInput, match="is no model folder"):
        copy_model(source, target, export_type=None, overwrite=True)
    (target / "notes.txt").unlink()
    copy_model(source, target, export_type=None, overwrite=True)
    copy_model(source, target, export_type=None, overwrite=True)
    assert (target / "config.json").exists()
