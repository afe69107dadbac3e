"""Model folders: round trip through transformers, and every way in which weights may not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ingot.base.errors import WrongInput
from ingot.config.models.source import model_config
from ingot.config.models.weights import INDEX, hash_model, weight_files
from ingot.models import packed_folder
from ingot.models import spec as spec_module
from ingot.models.hf import folder as folder_module
from ingot.models.hf.folder import load_model, load_weights, stored_shapes, stored_tensors
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from tests.models.tiny import make_member, make_reference

CPU = torch.device("cpu")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, change: object) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, file)


def test_sharded_weights_load_the_same(tmp_path: Path) -> None:
    whole = make_reference(tmp_path / "whole")
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((whole / "config.json").read_text())
    files = save_weights(load_file(whole / "model.safetensors"), sharded, shard_bytes=50_000)
    assert len(files) > 2
    assert weight_files(sharded) == files
    assert stored_shapes(sharded) == stored_shapes(whole)
    ours, other = load_model(whole, device=CPU), load_model(sharded, device=CPU)
    for (name, one), (_, two) in zip(
        ours.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name


def test_loaded_in_the_type_asked_for(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        folder = make_reference(tmp_path, dtype=dtype)
        assert {
            str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()
        } == {str(dtype)}
        assert {parameter.dtype for parameter in load_model(folder, device=CPU).parameters()} == {
            torch.float32
        }
    assert {
        parameter.dtype
        for parameter in load_model(folder, device=CPU, dtype=torch.bfloat16).parameters()
    } == {torch.bfloat16}


def test_hash_follows_every_weight_and_the_configuration(tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    before = hash_model(folder)
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].add_(1e-3))
    assert hash_model(folder) != before
    again = hash_model(folder)
    edit_config(folder, rms_norm_eps=1e-4)
    assert hash_model(folder) != again


def drop(name: str) -> object:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "model.layers.1.mlp.up_proj.weight is missing",
        ),
        (
            lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}),
            "model.layers.9.mlp.up_proj.weight is not part",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            "model.norm.weight is [63], [64] is wanted",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "q_proj.bias is not part",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: object, named: str, tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    edit_weights(folder, change)
    with pytest.raises(WrongInput) as error:
        load_model(folder, device=CPU)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_everything_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    folder = make_reference(tmp_path, num_hidden_layers=6)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("self_attn.v_proj.weight"):
                del tensors[name]
        for layer in (0, 1, 3):
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.ones(3, 4)
        tensors["extra.weight"] = torch.ones(1)
        del tensors["model.norm.weight"]

    edit_weights(folder, spoil)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(model_config(folder)))
    with pytest.raises(WrongInput) as error:
        load_weights(model, folder)
    for named in (
        "model.layers.0-5.self_attn.v_proj.weight is missing",
        "model.norm.weight is missing",
        "extra.weight is not part of this model",
        "model.layers.0-1,3.mlp.up_proj.weight is [3, 4], [112, 64] is wanted",
    ):
        assert named in str(error.value)
    assert "\n" not in str(error.value)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_memory_is_taken_once_the_weights_are_known_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, taken = make_reference(tmp_path), list[str]()
    edit_config(folder, intermediate_size=4_000_000)
    for module in (folder_module, packed_folder, spec_module):
        monkeypatch.setattr(module, "allocate", lambda *_, by=module.__name__: taken.append(by))
    config = DecoderConfig.from_hf(model_config(folder), "")
    spec = spec_module.ModelSpec("decoder", config, folder, False)
    drafted = spec_module.create_model(spec, 1)
    for load in (
        lambda: load_model(folder, device=CPU),
        lambda: packed_folder.open_packed(folder, "bf16"),
        lambda: spec_module.materialize_model(drafted, spec, 1, CPU, filled=True),
    ):
        with pytest.raises(WrongInput, match=r"weights do not fit config\.json: .*mlp"):
            load()
    assert not taken


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 10**19}, "vocab_size is 10,000,000,000,000,000,000"),
        ({"hidden_size": 2**40}, "hidden_size is"),
        ({"intermediate_size": 10**14}, "intermediate_size is"),
        ({"head_dim": 2**40}, "num_attention_heads times head_dim is"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers is 20,000"),
    ],
)
def test_sizes_of_no_model_are_named(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(WrongInput, match=rf"config\.json: {said}.*, and no model has more than"):
        load_model(folder, device=CPU)


def test_so_many_experts_are_of_no_model(tmp_path: Path) -> None:
    folder = make_member(tmp_path, "mixtral")
    edit_config(folder, num_local_experts=10**8)
    with pytest.raises(WrongInput, match="number of experts is 100,000,000"):
        load_model(folder, device=CPU)


def test_quantized_tensors_are_not_taken_for_weights(tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    edit_weights(
        folder,
        lambda tensors: tensors.update(
            {"model.layers.1.mlp.up_proj.weight": torch.ones(112, 64, dtype=torch.int8)}
        ),
    )
    with pytest.raises(WrongInput, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds int8"):
        load_model(folder, device=CPU)


def test_files_that_the_index_names_and_that_are_not_there_are_all_named(tmp_path: Path) -> None:
    whole, folder = make_reference(tmp_path / "whole"), tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text((whole / "config.json").read_text())
    files = save_weights(load_file(whole / "model.safetensors"), folder, shard_bytes=50_000)
    for file in files[1:]:
        file.unlink()
    with pytest.raises(WrongInput) as error:
        load_model(folder, device=CPU)
    assert all(file.name in str(error.value) for file in files[1:])
    assert files[0].name not in str(error.value)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(WrongInput, match="not an index"):
        load_model(folder, device=CPU)


def test_other_weights_beside_a_models_own_are_not_read(tmp_path: Path) -> None:
    """As those of an earlier export that somebody kept there."""
    folder, other = make_reference(tmp_path / "model"), make_reference(tmp_path / "other", seed=1)
    model, hashed = load_model(folder, device=CPU), hash_model(folder)
    shutil.copy(other / "model.safetensors", folder / "model_old.safetensors")
    shutil.copy(other / "model.safetensors", folder / "model-00001-of-00001.safetensors")
    again = load_model(folder, device=CPU)
    assert all(
        torch.equal(tensor, model.get_parameter(name)) for name, tensor in again.named_parameters()
    )
    assert hash_model(folder) == hashed


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """As where the parts of two exports lie together."""
    folder = make_reference(tmp_path)
    whole = folder / "model.safetensors"
    shutil.copy(whole, folder / "model-00001-of-00002.safetensors")
    whole.rename(folder / "model-00001-of-00003.safetensors")
    with pytest.raises(
        WrongInput,
        match=r"\S+ is in model-00001-of-00002\.safetensors and in model-00001-of-00003\.safeten",
    ):
        load_model(folder, device=CPU)


@pytest.mark.parametrize("most", [0, 1])
def test_a_tensor_in_two_files_is_that_of_the_one_that_the_index_names(
    most: int, tmp_path: Path
) -> None:
    """As transformers reads a part that somebody repaired and kept beside the others."""
    folder, other = make_reference(tmp_path / "model"), make_reference(tmp_path / "other", seed=1)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    models = [load_model(one, device=CPU) for one in (folder, other)]
    (folder / "model.safetensors").rename(folder / files[0])
    shutil.copy(other / "model.safetensors", folder / files[1])
    chosen = dict.fromkeys(load_file(folder / files[0]), most)
    chosen["model.embed_tokens.weight"] = 1 - most
    index = {name: files[at] for name, at in chosen.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    again, stored = load_model(folder, device=CPU), dict(stored_tensors(folder))
    assert stored.keys() == chosen.keys()
    for name, tensor in again.named_parameters():
        wanted = models[chosen.get(name, most)].get_parameter(name)
        assert torch.equal(tensor, wanted), name
    expected = load_file(folder / files[1 - most])["model.embed_tokens.weight"]
    assert torch.equal(stored["model.embed_tokens.weight"], expected)
    (folder / INDEX).unlink()
    with pytest.raises(WrongInput, match="keep the files of one model"):
        dict(stored_tensors(folder))


def test_old_rotary_buffers_are_passed_over(tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    edit_weights(
        folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    load_model(folder, device=CPU)


def test_a_tied_head_that_differs_is_refused_and_an_equal_one_is_not(tmp_path: Path) -> None:
    folder = make_reference(tmp_path, tie_word_embeddings=True)
    edit_weights(
        folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    load_model(folder, device=CPU)
    edit_weights(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(WrongInput, match="set tie_word_embeddings to false"):
        load_model(folder, device=CPU)


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    folder = make_reference(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 100, 4, 0):
        file.write_bytes(whole[:kept])
        with pytest.raises(WrongInput, match=r"model\.safetensors is torn"):
            load_model(folder, device=CPU)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match="is an empty folder; give"):
        model_config(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(WrongInput, match=r"config\.json is missing"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WrongInput, match="is not JSON"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WrongInput, match="pickled weights are not read"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "lama"}, "nearest: `llama`"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type `longrope`"),
        ({"hidden_size": None}, "no number"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_configurations_that_mean_another_model_are_refused(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    config = model_config(make_reference(tmp_path))
    with pytest.raises(WrongInput) as error:
        DecoderConfig.from_hf({**config, **changes})
    assert named in str(error.value)


def test_both_spellings_of_rotary_scaling_are_read(tmp_path: Path) -> None:
    config = model_config(make_reference(tmp_path))
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    new = DecoderConfig.from_hf(
        {**config, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    )
    old_config = {key: value for key, value in config.items() if key != "rope_parameters"}
    old = DecoderConfig.from_hf(
        {**old_config, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    )
    assert new.ropes == old.ropes


@pytest.mark.parametrize("layout", ["language_model.model.", "model.language_model."])
def test_the_language_part_of_a_multimodal_model_is_read(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of Gemma 3's files, in the spelling of transformers 4 and of 5."""
    alone, whole = make_member(tmp_path / "alone", "gemma3"), tmp_path / "whole"
    text = model_config(alone)
    tensors = load_file(alone / "model.safetensors")
    named = {layout + name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    whole.mkdir()
    save_file({**named, "vision_tower.weight": torch.ones(2)}, whole / "model.safetensors")
    outer = {"model_type": "gemma3", "vision_config": {}, "eos_token_id": [1, 106]}
    (whole / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    wanted, found = (
        dict(load_model(folder, device=CPU).named_parameters()) for folder in (alone, whole)
    )
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    said = capsys.readouterr()
    assert "1 tensors beside it are left out" in said.out + said.err
    assert model_config(whole)["eos_token_id"] == [1, 106]
    assert model_config(whole)["architectures"] == ["Gemma3ForCausalLM"]
