"""Meta's original files, made from tiny models of transformers: whole, in shares, and in every way
in which they may be bad.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.checkpoints.export import copy_model
from ingot.config.models.source import model_config
from ingot.models.hf.folder import load_model
from ingot.models.hf.meta import is_meta, load_meta, meta_config
from tests import tolerances
from tests.cli.commands import ingot
from tests.models.native.test_decoder import tokens_and_positions
from tests.models.tiny import make_reference
from tests.tokenizers.models import pieces_file, ranks_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 4, 2, 16, 2
VOCAB = {"llama2": 340, "llama3.1": 530, "llama3.2": 530}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LIKE: dict[str, dict[str, Any]] = {
    "llama2": {"max_position_embeddings": 4096},
    "llama3.1": {"max_position_embeddings": 131_072, "rope_parameters": {**SCALED, "factor": 8.0}},
    "llama3.2": {
        "max_position_embeddings": 131_072,
        "rope_parameters": {**SCALED, "factor": 32.0},
        "tie_word_embeddings": True,
    },
}


def side_by_side(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys in Meta's rotary layout: channel i of the first half beside channel i
    of the second.
    """
    first, second = weight.view(heads, 2, HEAD_SIZE // 2, -1).unbind(1)
    return torch.stack((first, second), dim=2).reshape(weight.shape)


def whole_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's weights under Meta's names."""
    ours = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    made = {
        "tok_embeddings.weight": ours["model.embed_tokens.weight"],
        "norm.weight": ours["model.norm.weight"],
        "output.weight": ours["lm_head.weight"],
        "rope.freqs": torch.ones(HEAD_SIZE // 2),
    }
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}.", f"layers.{layer}."
        made[new + "attention.wq.weight"] = side_by_side(
            ours[old + "self_attn.q_proj.weight"], HEADS
        )
        made[new + "attention.wk.weight"] = side_by_side(
            ours[old + "self_attn.k_proj.weight"], KV_HEADS
        )
        made[new + "attention.wv.weight"] = ours[old + "self_attn.v_proj.weight"]
        made[new + "attention.wo.weight"] = ours[old + "self_attn.o_proj.weight"]
        made[new + "feed_forward.w1.weight"] = ours[old + "mlp.gate_proj.weight"]
        made[new + "feed_forward.w2.weight"] = ours[old + "mlp.down_proj.weight"]
        made[new + "feed_forward.w3.weight"] = ours[old + "mlp.up_proj.weight"]
        made[new + "attention_norm.weight"] = ours[old + "input_layernorm.weight"]
        made[new + "ffn_norm.weight"] = ours[old + "post_attention_layernorm.weight"]
    return {name: tensor.clone() for name, tensor in made.items()}


def share(name: str, tensor: torch.Tensor, rank: int, world: int, like: str) -> torch.Tensor:
    """What one rank of Meta's model parallelism holds."""
    if name.endswith(("wo.weight", "w2.weight")) or (
        name.startswith("tok_embeddings") and like == "llama2"
    ):
        return tensor.chunk(world, dim=1)[rank].clone()
    if tensor.ndim == 1:
        return tensor
    return tensor.chunk(world, dim=0)[rank].clone()


def make_meta(
    root: Path,
    like: str = "llama2",
    world: int = 1,
    dtype: torch.dtype = torch.float32,
    **params: Any,
) -> Path:
    """`root/meta` in Meta's layout and `root/hf`, the same model as transformers wrote it."""
    from transformers import AutoModelForCausalLM

    hf = make_reference(
        root / "hf", norms=0.2, vocab_size=VOCAB[like], rms_norm_eps=1e-5, dtype=dtype, **LIKE[like]
    )
    tensors = whole_tensors(AutoModelForCausalLM.from_pretrained(hf, dtype=dtype))
    folder = root / "meta"
    folder.mkdir()
    for rank in range(world):
        torch.save(
            {name: share(name, tensor, rank, world, like) for name, tensor in tensors.items()},
            folder / f"consolidated.{rank:02d}.pth",
        )
    made = {
        "dim": 64,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "norm_eps": 1e-5,
        "multiple_of": 16,
        "vocab_size": -1,
    }
    if like != "llama2":
        made |= {
            "vocab_size": VOCAB[like],
            "rope_theta": 500_000.0,
            "use_scaled_rope": True,
            "ffn_dim_multiplier": 1.3,
        }
    (folder / "params.json").write_text(json.dumps({**made, **params}))
    (folder / "tokenizer.model").write_bytes(
        pieces_file("bpe") if like == "llama2" else ranks_file()
    )
    return folder


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("like", "world"),
    [("llama2", 1), ("llama2", 2), ("llama3.1", 1), ("llama3.1", 2), ("llama3.2", 1)],
)
def test_meta_files_import_as_the_model_that_they_were_made_of(
    like: str, world: int, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_meta(tmp_path, like, world)
    made = copy_model(folder, tmp_path / "copy", overwrite=False)
    assert made["export_type"] == "fp32"
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf"),
        load_model(tmp_path / "copy", device=CPU),
    )
    reference = load_model(tmp_path / "hf", device=CPU)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, reference.get_parameter(name)), name
    assert (ours.config.ropes, ours.config.max_position_embeddings) == (
        reference.config.ropes,
        reference.config.max_position_embeddings,
    )
    assert ours.config.tie_word_embeddings == reference.config.tie_word_embeddings
    tokens, positions = tokens_and_positions()
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(
            ours.logits(ours.hidden(tokens, positions)), wanted, atol=tolerances.LOGITS_FP32, rtol=0
        )
        copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")(tokens).logits
        torch.testing.assert_close(copied, wanted, atol=tolerances.LOGITS_FP32, rtol=0)


def test_the_type_of_the_weights_is_kept(tmp_path: Path) -> None:
    folder = make_meta(tmp_path, dtype=torch.bfloat16)
    model, stored = load_meta(folder, device=CPU)
    assert stored == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert copy_model(folder, tmp_path / "copy", overwrite=False)["export_type"] == "bf16"
    assert model_config(tmp_path / "copy")["dtype"] == "bfloat16"


def test_files_of_before_the_zip_format_are_read_too(tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    file = folder / "consolidated.00.pth"
    torch.save(torch.load(file, weights_only=True), file, _use_new_zipfile_serialization=False)
    load_meta(folder, device=CPU)


@pytest.mark.parametrize(
    ("params", "factor", "positions"),
    [
        ({"use_scaled_rope": True, "rope_theta": 5e5, "rope_scaling_factor": 16}, 16.0, 131_072),
        ({"use_scaled_rope": True, "rope_theta": 5e5}, 8.0, 131_072),
        ({"rope_theta": 5e5}, None, 8192),
        ({"rope_theta": 1e6}, None, 16_384),
        ({"norm_eps": 1e-6}, None, 2048),
        ({}, None, 4096),
        ({"max_seq_len": 512}, None, 512),
    ],
)
def test_what_params_leave_open_is_settled_by_the_version(
    params: dict[str, Any], factor: float | None, positions: int
) -> None:
    weights = {
        "tok_embeddings.weight": torch.zeros(9, 8),
        "output.weight": torch.ones(9, 8),
        "layers.0.feed_forward.w1.weight": torch.zeros(20, 8),
    }
    base = {"dim": 8, "n_layers": 1, "n_heads": 2, "norm_eps": 1e-5, "vocab_size": -1}
    config = meta_config({**base, **params}, [weights], "params.json")
    assert config["rope_parameters"].get("factor") == factor
    assert config["rope_parameters"]["rope_theta"] == params.get("rope_theta", 10_000.0)
    assert (
        config["max_position_embeddings"],
        config["vocab_size"],
        config["intermediate_size"],
        config["num_key_value_heads"],
    ) == (positions, 9, 20, 2)
    assert not config["tie_word_embeddings"]


def edit(folder: Path, change: Callable[[dict[str, Any]], object], rank: int = 0) -> None:
    file = folder / f"consolidated.{rank:02d}.pth"
    tensors = torch.load(file, weights_only=True)
    change(tensors)
    torch.save(tensors, file)


def refused(folder: Path) -> str:
    with pytest.raises(WrongInput) as error:
        load_meta(folder, device=CPU)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = make_meta(tmp_path, world=2)

    def spoil(tensors: dict[str, Any]) -> None:
        for layer in range(LAYERS):
            del tensors[f"layers.{layer}.attention.wv.weight"]
        tensors["layers.0.attention.wo.weight"] = torch.zeros(64, 31)
        tensors["layers.7.attention.wo.weight"] = torch.zeros(64, 32)
        tensors["norm.weight"] = torch.zeros(63)

    edit(folder, spoil, rank=1)
    error = refused(folder)
    for named in (
        "layers.0-1.attention.wv.weight is missing in consolidated.01.pth",
        "layers.7.attention.wo.weight is not part of this model",
        "layers.0.attention.wo.weight is [64, 32] + [64, 31], [64, 64] is wanted",
        "norm.weight is [64] + [63], [64] is wanted",
    ):
        assert named in error


def test_norms_that_differ_between_the_files_are_refused(tmp_path: Path) -> None:
    folder = make_meta(tmp_path, world=2)
    edit(folder, lambda tensors: tensors["layers.1.ffn_norm.weight"].add_(1), rank=1)
    assert "layers.1.ffn_norm.weight differs between" in refused(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_meta(tmp_path, world=2)
    (folder / "consolidated.01.pth").rename(folder / "consolidated.03.pth")
    assert "consolidated.01.pth, consolidated.02.pth missing" in refused(folder)
    (folder / "consolidated.03.pth").unlink()
    error = refused(folder)
    assert "layers.0-1.attention.wq.weight is [32, 64], [64, 64] is wanted" in error
    assert "are all of its consolidated.*.pth there?" in error
    (folder / "consolidated.00.pth").unlink()
    assert "consolidated.00.pth missing" in refused(folder)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    file = folder / "consolidated.00.pth"
    whole = file.read_bytes()
    for kept in (len(whole) - 100, len(whole) // 2, 10, 0):
        file.write_bytes(whole[:kept])
        assert "consolidated.00.pth" in refused(folder)


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(zipped: bool, tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    ran = tmp_path / "ran"
    torch.save(
        {"tok_embeddings.weight": Payload(ran)},
        folder / "consolidated.00.pth",
        _use_new_zipfile_serialization=zipped,
    )
    error = refused(folder)
    assert "holds more than tensors" in error
    assert "mkdir" in error
    assert not ran.exists()
    torch.load(folder / "consolidated.00.pth", weights_only=False)
    assert ran.exists(), "the payload has to be one that runs where it is let"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ([1, 2], "not a mapping"),
        ({"tok_embeddings.weight": "text"}, "not a mapping"),
        ({"tok_embeddings.weight": torch.ones(2, dtype=torch.int8)}, "unquantized"),
    ],
)
def test_other_pickles_are_refused(value: object, named: str, tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    torch.save(value, folder / "consolidated.00.pth")
    assert named in refused(folder)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"moe": {"num_experts": 8}}, "moe is not known"),
        ({"sliding_window": 4096, "lora_args": 1}, "lora_args, sliding_window is not known"),
        ({"dim": "wide"}, "not a number"),
        ({"n_heads": 0}, "not a number that fits"),
        ({"vocab_size": 341}, "tok_embeddings.weight is [340, 64], [341, 64] is wanted"),
        ({"n_kv_heads": 4}, "layers.0-1.attention.wk.weight is [32, 64], [64, 64] is wanted"),
        ({"n_layers": 3}, "layers.2.attention.wq.weight is missing"),
        ({"n_layers": 1}, "layers.1.attention.wq.weight is not part of this model"),
    ],
)
def test_params_that_do_not_fit_are_refused(
    params: dict[str, Any], named: str, tmp_path: Path
) -> None:
    assert named in refused(make_meta(tmp_path, **params))


def test_params_that_are_no_mapping_or_lack_a_key(tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    for text, named in (
        ("{", "is not JSON"),
        ("[]", "is not a mapping"),
        ('{"dim": 64}', "n_heads is missing"),
    ):
        (folder / "params.json").write_text(text)
        assert named in refused(folder)


def test_a_folder_of_metas_given_as_a_model_says_how_to_import_it(tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    assert is_meta(folder)
    assert not is_meta(tmp_path / "hf")
    with pytest.raises(WrongInput, match=r"run `ingot import .*meta NEW`"):
        load_model(folder, device=CPU)


def test_import_as_a_person_types_it(tmp_path: Path) -> None:
    folder = make_meta(tmp_path)
    target = tmp_path / "new"
    done = ingot("import", str(folder), str(target))
    assert (done.returncode, done.stdout) == (0, f"{target}\n"), done.stderr
    assert "every tensor read" in done.stderr
    again = ingot("import", str(folder), str(target))
    assert again.returncode == 2
    assert "--overwrite" in again.stderr
    load_model(target, device=CPU)


def test_import_wants_a_tokenizer_that_fits_and_a_free_folder(tmp_path: Path) -> None:
    folder, target = make_meta(tmp_path), tmp_path / "copy"
    copy_model(folder, target, overwrite=False)
    with pytest.raises(WrongInput, match="add --overwrite"):
        copy_model(folder, target, overwrite=False)
    copy_model(folder, target, overwrite=True)
    (folder / "tokenizer.model").write_bytes(ranks_file())
    before = sorted(target.iterdir())
    with pytest.raises(WrongInput, match="its tokenizer has 530 ids, the model only 340"):
        copy_model(folder, target, overwrite=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(WrongInput, match="is no model folder, and --overwrite replaces only those"):
        copy_model(folder, other, overwrite=True)
    assert (other / "thesis.tex").exists()
    (folder / "tokenizer.model").unlink()
    with pytest.raises(WrongInput, match="tokenizer"):
        copy_model(folder, target, overwrite=True)
    assert sorted(target.iterdir()) == before
