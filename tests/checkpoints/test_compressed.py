"""Models in compressed-tensors: every number as that library reads it, and the whole model as
transformers does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ingot.base.errors import Failed, WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints import compressed
from ingot.checkpoints.compressed import KINDS, export_compressed
from ingot.cli.carry import write_compressed
from ingot.config.models.lineage import read_lineage
from ingot.data.batches.loader import fixed_batches
from ingot.evaluate import held_out
from ingot.evaluate.held_out import held_out_loss
from ingot.evaluate.loss import row_losses
from ingot.evaluate.tasks.loss import open_held_out
from ingot.models.hf.compressed import Scheme, pack, unpack, values
from ingot.models.hf.folder import load_model
from ingot.models.native.head import IGNORE
from ingot.train.trainer import train
from tests.lazy import lazy
from tests.models.tiny import FAMILY, make_member, make_reference
from tests.objectives.ways import TINY_MODEL, make_ready, recipe_of
from tests.serve.tiny import make_folder
from tests.tolerances import BF16_LOSS, LOGPROB

torch = lazy("torch")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "model", **SIZES)


def weights_of(folder: Path) -> dict[str, Any]:
    return dict(load_model(folder, device=torch.device("cpu")).named_parameters())


def logits(folder: Path) -> Any:
    """Those of transformers."""
    from ingot.verify.export.transformers import open_transformers

    return open_transformers(folder, "decoder").logits(list(range(3, 30)))


def test_numbers_are_the_nearest_and_packed_as_the_format_says() -> None:
    """By hand: -8 is the lowest of four bits, and the first number lies in the lowest bits."""
    matrix = torch.tensor([[7.5, -7.5, 1.4, 1.6] + [0.0] * 28])
    codes, scales = Scheme(4, 32).quantised(matrix, torch.float32)
    assert scales.tolist() == [[1.0]]
    assert codes[0, :5].tolist() == [7, -8, 1, 2, 0]
    packed = pack(codes, 4)
    assert packed[0, 0].item() & 0xFFFF == 0xA90F
    assert packed[0, 1].item() == 0x88888888 - 2**32
    assert torch.equal(unpack(packed, 4, 32), codes)
    wide = torch.arange(-128, 127, dtype=torch.int8).view(3, 85)
    assert torch.equal(unpack(pack(wide, 8), 8, 85), wide)


@pytest.mark.parametrize("kind", KINDS)
def test_that_library_reads_the_same_numbers(folder: Path, tmp_path: Path, kind: str) -> None:
    library: Any = pytest.importorskip("compressed_tensors.compressors", reason="not installed")
    from compressed_tensors.quantization import QuantizationConfig

    target = tmp_path / kind
    lineage, far = export_compressed(folder, target, kind, overwrite=False)
    told = json.loads((target / "config.json").read_text())["quantization_config"]
    told.pop("quant_method")
    scheme = QuantizationConfig.model_validate(told).config_groups["group_0"]
    compressor = library.BaseCompressor.get_value_from_registry(scheme.format)
    stored = load_file(target / "model.safetensors")
    own = {
        name.removeprefix(NAME.removesuffix("weight")): tensor
        for name, tensor in stored.items()
        if name.startswith(NAME)
    }
    theirs = compressor.decompress(own, scheme)["weight"]
    assert torch.equal(theirs, weights_of(target)[NAME])
    original = weights_of(folder)[NAME]
    step = original.abs().amax() / (7.5 if kind == "w4a16" else 127.5)
    assert 0 < (theirs - original).abs().max() <= 0.5001 * step
    record = lineage[compressed.COMPRESSED]
    assert (record["matrices"], record["type"]) == (14, kind)
    assert (0.05 if kind == "w4a16" else 0.002) < far.relative < far.worst_relative < 0.2
    kept = weights_of(target)["model.embed_tokens.weight"]
    assert torch.equal(kept, weights_of(folder)["model.embed_tokens.weight"])
    assert (read_lineage(target) or {})[compressed.COMPRESSED] == record


@pytest.mark.drawn("compressed-tensors by transformers")
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "phi3", "qwen2", "gemma3", "qwen3_moe"])
def test_transformers_reads_the_model_that_we_read(tmp_path: Path, name: str) -> None:
    """The logits of the folder are those of the numbers that it stands for, written plainly."""
    pytest.importorskip("compressed_tensors", reason="not installed (ingot[compressed-tensors])")
    from ingot.checkpoints.export import copy_model

    source, kind = tmp_path / "source", name if name in KINDS else "w4a16"
    if name in KINDS:
        make_folder(source, **SIZES)
    else:
        wide = {"moe_intermediate_size": 32} if name == "qwen3_moe" else {}
        make_reference(source, norms=0.2, **{**FAMILY[name], **SIZES, **wide, "vocab_size": 331})
        make_folder(tmp_path / "words")
        for file in TOKENIZER:
            (source / file).write_bytes((tmp_path / "words" / file).read_bytes())
    export_compressed(source, tmp_path / "few", kind, overwrite=False)
    copy_model(tmp_path / "few", tmp_path / "plain", overwrite=False)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    found, wanted, before = (logits(tmp_path / each) for each in ("few", "plain", "source"))
    assert (found - wanted).abs().max() <= LOGPROB * wanted.abs().max()
    assert (wanted - before).abs().max() > 1e-3 * wanted.abs().max()


def test_what_was_written_wrong_does_not_take_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed, "pack", lambda codes, bits: pack(codes.flip(1), bits))
    with pytest.raises(Failed, match=r"self_attn.* is not in the files as it was to be|down_proj"):
        export_compressed(folder, tmp_path / "there", "w4a16", overwrite=False)
    assert not list(tmp_path.iterdir())


def test_a_changed_scale_is_seen(folder: Path, tmp_path: Path) -> None:
    export_compressed(folder, tmp_path / "few", "w8a16", overwrite=False)
    tensors = load_file(tmp_path / "few/model.safetensors")
    tensors[f"{NAME}_scale"][0] *= 2
    save_file(tensors, tmp_path / "few/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WrongInput, match=r"down_proj\.weight_scale\) changed since"):
        load_model(tmp_path / "few", device=torch.device("cpu"))


def test_refusals(folder: Path, tmp_path: Path) -> None:
    narrow = make_folder(tmp_path / "narrow", **{**SIZES, "intermediate_size": 72})
    make_member(tmp_path / "stacked", "gpt_oss", vocab_size=331)
    for file in TOKENIZER:
        (tmp_path / "stacked" / file).write_bytes((folder / file).read_bytes())
    for source, kind, says in (
        (folder, "w4a4", "it is one of w4a16, w8a16, w8a8"),
        (narrow, "w4a16", r"down_proj\.weight is 64 x 72, and vLLM has no products"),
        (tmp_path / "stacked", "w4a16", "`gpt_oss` lie in one tensor a layer"),
    ):
        with pytest.raises(WrongInput, match=says):
            export_compressed(source, tmp_path / "there", kind, overwrite=False)
    export_compressed(folder, tmp_path / "few", "w8a16", overwrite=False)
    config = json.loads((tmp_path / "few/config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (tmp_path / "few/config.json").write_text(json.dumps(config))
    with pytest.raises(WrongInput, match="only symmetric integers"):
        load_model(tmp_path / "few", device=torch.device("cpu"), check=False)
    rows = torch.tensor([[1.0, float("inf")] * 16])
    with pytest.raises(ValueError, match="not finite"):
        Scheme(4, 32).quantised(rows, torch.bfloat16)
    zero = torch.zeros(1, 32)
    assert torch.equal(values(*Scheme(4, 32).quantised(zero, torch.bfloat16)).float(), zero)


def test_the_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "few"
    told = write_compressed(str(folder), str(target), "w4a16", overwrite=False)
    err = capsys.readouterr().err
    assert (told["path"], told["matrices"], told["group"]) == (str(target), 14, 32)
    assert "14 matrices in w4a16, read back and compared" in err
    assert "it is another model than" in err
    assert "a model folder has no held-out documents; give its run folder" in err


def test_the_loss_on_the_documents_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after; of all held-out tokens where they are few, as an evaluation counts them."""
    ready = make_ready(tmp_path / "root", ("sft",))
    sizes = {**TINY_MODEL, "hidden_size": 64, "intermediate_size": 96}
    recipe = recipe_of(ready, "sft", model__config=sizes, train__steps=4, train__evaluate_every=4)
    train(recipe)
    measure, _ = held_out_loss(recipe)
    target = tmp_path / "few"
    made, far = export_compressed(
        recipe.folder.model, target, "w4a16", overwrite=False, measure=measure
    )
    loss = made[compressed.COMPRESSED]["held_out_loss"]
    assert far.loss == (loss["before"], loss["after"])
    logged = [line for line in read_lines(recipe.folder.metrics) if "validation/loss" in line]
    assert loss["before"] == pytest.approx(logged[-1]["validation/loss"], rel=BF16_LOSS)
    assert 0 < abs(loss["after"] - loss["before"]) < 0.1
    # Rows in which nothing is predicted are not the first ones; without any other there is no loss.
    model = load_model(recipe.folder.model, device=torch.device("cpu"))
    batches = list(fixed_batches(open_held_out(recipe, "", 48)[1], range(8), 4))
    first = replace(batches[0], labels=torch.full_like(batches[0].labels, IGNORE))
    monkeypatch.setattr(held_out, "ROWS", 4)
    monkeypatch.setattr(held_out, "fixed_batches", lambda *_: iter([first, batches[1]]))
    measure, _ = held_out_loss(recipe)
    assert measure is not None
    found = row_losses(model, [batches[1]])
    assert measure(model) == pytest.approx(found.nll.sum() / found.targets.sum(), rel=LOGPROB)
    monkeypatch.setattr(held_out, "fixed_batches", lambda *_: iter([first]))
    assert held_out_loss(recipe) == (None, "no held-out row has a token to predict")
