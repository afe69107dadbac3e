"""What ends a turn in training ends it in serving: the exported generation configuration."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.errors import WrongInput
from ingot.base.storage import atomic_folder
from ingot.checkpoints.export import copy_adapter, copy_model, export_model
from ingot.cli.carry import copy_checked, export
from ingot.config.sections.lora import Lora
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.peft import save_adapter
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.serve.native.model import load
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.tokenizers.small import chatty

CONFIG = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("generation", "beside"),
    [
        (None, []),
        ({"eos_token_id": 5, "temperature": 0.7}, [5]),
        ({"eos_token_id": [5, 6]}, [5, 6]),
        ({"max_new_tokens": 9}, []),
    ],
)
def test_the_end_of_turn_token_is_added_to_what_was_there(
    tmp_path: Path, generation: dict[str, Any] | None, beside: list[int]
) -> None:
    tokenizer = chatty()
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(model, 0)
    export_model(
        model, tokenizer, tmp_path / "model", export_type="fp32", lineage={}, generation=generation
    )
    ends = {tokenizer.special.eos, tokenizer.token_id("<|im_end|>")}
    assert len(ends) == 2
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert set(written["eos_token_id"]) == ends | set(beside)
    assert {
        key: value for key, value in written.items() if key in ("temperature", "max_new_tokens")
    } == {key: value for key, value in (generation or {}).items() if key != "eos_token_id"}
    assert load(tmp_path / "model").eos == ends | set(beside)


def test_a_copy_wants_a_tokenizer_that_fits_and_replaces_only_models(tmp_path: Path) -> None:
    tokenizer = chatty()
    model = Decoder(DecoderConfig.from_hf({**CONFIG, "vocab_size": tokenizer.vocab_size - 1}))
    init_weights(model, 0)
    source, target = tmp_path / "model", tmp_path / "copy"
    export_model(model, tokenizer, source, export_type="fp32", lineage={})
    with pytest.raises(
        WrongInput,
        match=(
            rf"its tokenizer has {tokenizer.vocab_size} ids, the model only"
            rf" {tokenizer.vocab_size - 1}"
        ),
    ):
        copy_model(source, target, overwrite=False)
    assert not target.exists()
    fitting = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(fitting, 0)
    export_model(fitting, tokenizer, source, export_type="fp32", lineage={})
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(WrongInput, match="add --overwrite"):
        copy_model(source, target, overwrite=False)
    with pytest.raises(WrongInput, match="is no model folder"):
        copy_model(source, target, overwrite=True)
    (target / "notes.txt").unlink()
    copy_model(source, target, overwrite=True)
    copy_model(source, target, overwrite=True)
    assert (target / "config.json").exists()


def test_a_copy_of_float16_has_the_same_numbers(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    model = Decoder(DecoderConfig.from_hf(CONFIG))
    init_weights(model, 0)
    export_model(model, chatty(), source, export_type="fp32", lineage={})
    (source / "ingot.json").unlink()
    file = source / "model.safetensors"
    save_file({name: one.half() for name, one in load_file(file).items()}, file)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "dtype": "float16"}))
    made = copy_model(source, target, overwrite=False)
    assert made["export_type"] == "fp32"
    before, after = load_file(file), load_file(target / "model.safetensors")
    assert all(torch.equal(after[name], one.float()) for name, one in before.items())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter that changes what its base says, beside a base that has the tokenizer."""
    base = DecoderConfig.from_hf({**CONFIG, "vocab_size": chatty().vocab_size})
    model = Decoder(base)
    init_weights(model, 0)
    export_model(model, chatty(), tmp_path / "base", export_type="fp32", lineage={})
    add_lora(model, Lora(rank=2), 0)
    torch.nn.init.normal_(model.get_parameter("model.layers.0.self_attn.q_proj.lora_B"), std=0.5)
    save_adapter(model, tmp_path / "run" / "adapter", base=str(tmp_path / "base"), kind="decoder")
    return tmp_path / "run" / "adapter"


def test_an_adapter_becomes_a_whole_model(adapter: Path, tmp_path: Path) -> None:
    copy_model(adapter, tmp_path / "whole", overwrite=False)
    tokens, positions = torch.tensor([[5, 6, 7, 8]]), torch.arange(4)[None]
    said = [
        model.logits(model.hidden(tokens, positions))
        for model in (
            load(folder, any_template=True).model
            for folder in (tmp_path / "whole", adapter, tmp_path / "base")
        )
        if isinstance(model, Decoder)
    ]
    assert torch.allclose(said[0], said[1], atol=tolerances.LOGITS_FP32)
    assert not torch.allclose(said[0], said[2], atol=0.01)
    assert load_tokenizer(tmp_path / "whole").identity() == chatty().identity()


def test_an_adapter_is_copied_once_its_tensors_are_checked(adapter: Path, tmp_path: Path) -> None:
    copy_adapter(adapter, tmp_path / "copy", overwrite=False)
    assert {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()} == {
        file.name: file.read_bytes() for file in adapter.iterdir()
    }
    with pytest.raises(WrongInput, match=r"copy exists; choose another folder, or add --overwrite"):
        copy_adapter(adapter, tmp_path / "copy", overwrite=False)
    with pytest.raises(
        WrongInput, match=r"base is no adapter, and --overwrite replaces only those"
    ):
        copy_adapter(adapter, tmp_path / "base", overwrite=True)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-40])
    with pytest.raises(WrongInput, match="adapter_model"):
        copy_adapter(adapter, tmp_path / "copy", overwrite=True)
    assert is_adapter(tmp_path / "copy"), "what was there stays"


def test_what_came_under_the_name_meanwhile_is_not_replaced(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as another export, which ended first."""
    target = tmp_path / "copy"

    @contextlib.contextmanager
    def taken(folder: Path) -> Iterator[Path]:
        with atomic_folder(folder) as partial:
            target.mkdir(exist_ok=True)
            (target / "theirs").write_text("")
            yield partial

    monkeypatch.setattr("ingot.checkpoints.export.atomic_folder", taken)
    copies: tuple[Callable[..., Any], ...] = (copy_adapter, copy_model)
    for copy in copies:
        with pytest.raises(WrongInput, match=r"copy exists; choose another folder"):
            copy(adapter, target, overwrite=False)
        assert [file.name for file in target.iterdir()] == ["theirs"]
        (target / "theirs").unlink()
        target.rmdir()


def test_the_command_exports_the_adapter_of_a_run(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_model(adapter, tmp_path / "run" / "model", overwrite=False)
    assert export(str(tmp_path / "run"), str(tmp_path / "out"), "peft") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert is_adapter(tmp_path / "out")
    with pytest.raises(WrongInput, match=r"has none beside it; train one with model.lora"):
        copy_checked(str(tmp_path / "base"), str(tmp_path / "other"), "peft", overwrite=False)
