"""A training with a base in few bits: gone on with it makes the same bytes, only the adapter is
kept, and the export is the model that was trained or says that it is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ingot.base.errors import WrongInput
from ingot.base.runlog import read_lines
from ingot.checkpoints.reader import StoredTensors
from ingot.checkpoints.store import committed
from ingot.config.models.lineage import read_lineage
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count
from ingot.models.kinds import open_model
from ingot.models.quantized import Quantization
from ingot.train.trainer import train
from ingot.verify.export import proof as export
from ingot.verify.export.proof import verify_export
from ingot.verify.export.trained import BASES
from tests.parallel.proving import recipe_of
from tests.small import copy_of
from tests.train.test_run import stop_after
from tests.verify.serving import served_here

DOUBLE = "{kind: nf4, double: true}"
ORIGINAL = "{kind: nf4, double: true, merge_into: original}"


def recipe(root: Path, **knobs: Any) -> Recipe:
    """A few steps of an adapter, with a checkpoint every second one."""
    given = {
        "model__quantize": DOUBLE,
        "train__steps": 4,
        "checkpoint__every": 2,
        "precision__compute": "bf16",
    }
    return recipe_of(root, "lora", **{**given, **knobs})


def losses(made: Recipe) -> list[float]:
    return [line["train/loss"] for line in read_lines(made.folder.metrics) if "train/loss" in line]


def test_the_exported_model_is_the_trained_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Base as training saw it, with the products; the adapter alone says that it is another."""
    made = recipe(root)
    train(made)
    kept = StoredTensors(committed(made.folder.checkpoints)[-1].folder).names
    assert kept
    assert all(".lora_" in name for name in kept)
    adapter = load_file(made.folder.adapter / "adapter_model.safetensors")
    base = load_file(Path(made.model.source) / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    rounded = Quantization("nf4", double=True).rounded(base[f"{name}.weight"])
    found = load_file(made.folder.model / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(found, torch.addmm(rounded, b, a, alpha=2).to(found.dtype))
    assert (read_lineage(made.folder.model) or {})["quantize"]["merge_into"] == "quantized"
    # Neither the packed bytes nor the adapter's factors count: the weights of the files do.
    whole = parameter_count(json.loads((made.folder.model / "config.json").read_bytes()))
    for folder in (made.folder.model, made.folder.adapter):
        assert (read_lineage(folder) or {})["parameters"] == whole
    capsys.readouterr()
    open_model(made.folder.adapter, device=torch.device("cpu"))
    assert "was trained beside its base in nf4: beside" in capsys.readouterr().err
    monkeypatch.setattr(export, "server", served_here)
    proof = verify_export(made)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    told = next(one.detail for one in proof.checks if one.what == BASES)
    assert "merged into the nf4 base that it was trained beside; beside the source's own" in told


@pytest.mark.drawn
def test_a_run_gone_on_with_is_the_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recipe(root)
    other = recipe(copy_of(root, tmp_path / "other"))
    train(whole)
    stop_after(other, 3, monkeypatch)
    with pytest.raises(WrongInput, match=r"model\.quantize\.double true -> false"):
        train(recipe(tmp_path / "other", model__quantize="nf4"))
    train(other)
    assert losses(other)[-2:] == losses(whole)[-2:]
    for part in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        one, two = (each.folder.root / part for each in (whole, other))
        assert one.read_bytes() == two.read_bytes(), part


@pytest.mark.drawn
@pytest.mark.parametrize("quantize", [ORIGINAL, "int8", "nf4"])
def test_verify_export_tells_what_was_merged(
    quantize: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe(root, model__quantize=quantize)
    train(made)
    monkeypatch.setattr(export, "server", served_here)
    proof = verify_export(made)
    assert proof.holds, [one for one in proof.checks if one.passed is False]
    told = next(one.detail for one in proof.checks if one.what == BASES)
    assert ("is not the model that was trained" in told) == (quantize == ORIGINAL)
