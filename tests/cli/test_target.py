"""What TARGET may be, and what is told when it is none of these."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    begin_record,
    write_record,
)
from ingot.cli.model import find_target, predict_once
from ingot.registry.local import LocalRegistry


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, its run with a model, and two registered versions of which the first
    is live.
    """
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        "name: mine\ndata: {train: [{source: a}]}\nserve: {port: 1234}\n", encoding="utf-8"
    )
    model = tmp_path / "runs/mine/model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    shutil.copy("r.yaml", "runs/mine/recipe.yaml")
    registry = LocalRegistry(Path("runs/registry.sqlite"))
    metric = Metric(1.0, 0.9, 1.1, "lower", 3, "set")
    for number in (1, 2):
        registry.add(
            "mine",
            model,
            EvaluationReport(f"model{number}", "tokenizer", {"loss/loss": metric}),
            {},
        )
    registry.point("mine", 1, "test")
    return tmp_path


def test_a_model_folder(place: Path) -> None:
    found = find_target("runs/mine/model", ["serve.port=99"])
    assert found.folder == Path("runs/mine/model")
    assert found.name == "model"
    assert found.recipe.serve.port == 99


def test_a_run_folder_brings_its_recipe(place: Path) -> None:
    found = find_target("runs/mine")
    assert (found.name, found.folder, found.recipe.serve.port) == (
        "mine",
        Path("runs/mine/model"),
        1234,
    )


@pytest.mark.parametrize("target", ["runs/mine", "r.yaml"])
def test_a_model_that_may_be_of_an_earlier_training_is_told_as_such(
    place: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "runs/mine/model/ingot.json").write_text('{"step": 40}', encoding="utf-8")
    begin_record(Path("runs/mine/reports/steps"), "train")
    with pytest.raises(WrongInput, match="tokenizer"):
        predict_once(target, "a", [])
    told = "note: `train` was begun in .*runs/mine and has not ended, so .* .step 40. may be an"
    assert re.search(told, capsys.readouterr().err)
    write_record(
        Path("runs/mine/reports/steps"), PipelineStepRecord("train", "in", "out", 1.0, "", "")
    )
    assert find_target(target).doubt is None


def test_a_recipe(place: Path) -> None:
    found = find_target("r.yaml", ["serve.port=5"])
    assert (found.name, found.folder, found.recipe.serve.port) == (
        "mine",
        Path("runs/mine/model"),
        5,
    )


@pytest.mark.parametrize(
    ("target", "version"), [("mine", 1), ("mine@v1", 1), ("mine@v2", 2), ("mine@2", 2)]
)
def test_a_registered_name(place: Path, target: str, version: int) -> None:
    found = find_target(target)
    assert found.folder is not None
    assert found.folder.name == f"v{version}"
    assert (found.folder / "config.json").exists()
    assert found.name == target


def test_an_address() -> None:
    found = find_target("http://127.0.0.1:8000/")
    assert (found.url, found.folder) == ("http://127.0.0.1:8000", None)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mine@v7", "has no version 7"),
        ("other", "other is no model folder, .* and nothing is registered so in .*knows"),
        ("not/there", "recipe, address or name of a registered model; check the path"),
        ("missing.yaml", "missing.yaml does not exist"),
        ("mine.gguf", "is for llama.cpp; give the run or the model folder"),
        (".", "neither a model folder"),
    ],
)
def test_what_is_not_there_is_told(place: Path, target: str, says: str) -> None:
    Path("mine.gguf").write_bytes(b"GGUF\xff")
    with pytest.raises(WrongInput, match=says):
        find_target(target)


def test_a_run_without_a_model_says_what_to_do(place: Path) -> None:
    shutil.rmtree("runs/mine/model")
    for target in ("runs/mine", "r.yaml"):
        with pytest.raises(WrongInput, match=r"holds no trained model.*run `ingot train` first"):
            find_target(target)
