"""predict, export, import and deploy as a person types them, on a real model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.cli.carry import copy_checked, import_
from ingot.cli.model import predict_once
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.hf.folder import load_model
from ingot.serve.predict import predict
from ingot.tokenizers.load import load_tokenizer
from tests.cli.commands import ingot, ingot_afresh
from tests.serve.native.test_causal import unknown


def _greedy(folder: Path, prompt: str, count: int) -> str:
    tokenizer = load_tokenizer(folder)
    generator = Generator(
        load_model(folder, device=torch.device("cpu")),
        eos={tokenizer.special.eos or 0},
        decode=tokenizer.decode,
    )
    return generator.run([Request(tokenizer.encode_prompt(prompt), count)])[0].text


def test_predict_prints_the_completion_and_nothing_else(model_folder: Path) -> None:
    done = ingot("predict", str(model_folder), "the bright", "max_tokens=12")
    assert done.returncode == 0, done.stderr
    assert done.stdout == _greedy(model_folder, "the bright", 12) + "\n"
    assert done.stderr == ""


def test_predict_as_json(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert predict_once(str(model_folder), "the bright", ["max_tokens=12"], as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    answer = _greedy(model_folder, "the bright", 12)
    assert (told["prompt"], told["answer"]) == ("the bright", answer)


@pytest.mark.drawn("an interpreter of its own")
def test_a_model_of_transformers_answers_and_ends_well(tmp_path: Path) -> None:
    """In an interpreter of its own, which is taken apart at its end."""
    done = ingot_afresh("predict", str(unknown(tmp_path / "gpt2")), "the", "max_tokens=5")
    assert done.returncode == 0, done.stderr
    assert "so transformers generates" in done.stderr
    assert "terminate" not in done.stderr
    assert len(done.stdout.splitlines()) >= 1


def test_predict_samples_by_its_seed(model_folder: Path) -> None:
    answers = [
        predict(model_folder, "the", max_tokens=12, temperature=1.0, seed=seed)
        for seed in (3, 3, 4)
    ]
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("prompt", "settings", "says"),
    [
        ("x" * 5000, {}, "positions"),
        ("the", {"max_tokens": 0}, "max_tokens is 0"),
        ("the", {"chat": True}, "template"),
        (os.fsdecode(b"caf\xe9"), {}, "^the prompt has bytes that are not UTF-8, or that the lo"),
    ],
)
def test_predict_refuses_in_words(
    model_folder: Path, prompt: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(WrongInput, match=says):
        predict(model_folder, prompt, **settings)


def test_a_folder_without_a_tokenizer_is_refused(model_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    done = ingot("predict", str(tmp_path), "the")
    assert done.returncode == 2
    assert "tokenizer" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_address_that_does_not_answer() -> None:
    done = ingot("predict", "http://127.0.0.1:9", "the")
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:9 does not answer")
    assert len(done.stderr.splitlines()) == 1


def test_export_and_import_copy_a_checked_model(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = ingot("export", str(model_folder), str(tmp_path / "out"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out'}\n"), done.stderr
    import_(str(tmp_path / "out"), str(tmp_path / "in"), as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["verb"], told["path"], told["format"]) == ("import", str(tmp_path / "in"), "hf")
    assert told["model_hash"] == json.loads((tmp_path / "in/ingot.json").read_bytes())["model_hash"]
    here, there = (
        load_model(folder, device=torch.device("cpu")).state_dict()
        for folder in (model_folder, tmp_path / "in")
    )
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    with pytest.raises(WrongInput, match="--overwrite"):
        copy_checked(str(model_folder), str(tmp_path / "out"), "hf", overwrite=False)
    copy_checked(str(model_folder), str(tmp_path / "out"), "hf", overwrite=True)
    assert "every tensor is as it was exported" in capsys.readouterr().err


def test_deploy_moves_the_live_pointer_and_back(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        f"name: mine\ndata: {{train: [{{source: a}}]}}\nevaluate: {{model: {model_folder}}}\n",
        encoding="utf-8",
    )
    reports = tmp_path / "runs/mine/reports"
    reports.mkdir(parents=True)
    made = json.loads((model_folder / "ingot.json").read_bytes())
    metric = {
        "value": 1.0,
        "ci_low": 0.9,
        "ci_high": 1.1,
        "direction": "lower",
        "n": 3,
        "set_fingerprint": "set",
    }
    for tokenizer in ("first", "second"):  # another tokenizer hash is another version
        report = {
            "schema": 1,
            "model_hash": made["model_hash"],
            "tokenizer_hash": tokenizer,
            "metrics": {"loss/bits_per_byte": metric},
        }
        (reports / "evaluate.json").write_text(json.dumps(report), encoding="utf-8")
        assert (
            ingot("gate", "r.yaml", "--again", "gate.override=deploy", cwd=tmp_path).returncode == 0
        )
        done = ingot("register", "r.yaml", "--again", "gate.override=deploy", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "mine v2, live" in done.stdout
    assert ingot("deploy", "mine", "--version", "1", cwd=tmp_path).stdout.startswith(
        "mine@v1 is live"
    )
    assert ingot("deploy", "r.yaml", "--rollback", cwd=tmp_path).stdout.startswith(
        "mine@v2 is live"
    )
    assert ingot("deploy", "mine", "--rollback", "--version", "1", cwd=tmp_path).returncode == 2
