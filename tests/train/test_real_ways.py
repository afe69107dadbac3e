"""The shipped recipes on real weights and real data, a few steps each: the loss falls from that of
the model that was loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import committed
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.adapters.peft_config import is_adapter
from ingot.train.trainer import train
from tests.train.shipped import shipped

# Each trains SmolLM2 for minutes; objectives/test_every_way trains every way on tiny models.
pytestmark = pytest.mark.slow

FEW = {
    "train.epochs": "null",
    "train.global_batch": 2,
    "train.micro_batch": 2,
    "data.seq_len": 128,
    "track.every": 1,
    "track.tensorboard": False,
    "track.gpu": False,
    "data.engine.workers": 1,
    "data.validation": "{fraction: 0.1}",
    "train.early_stop": "null",
    "checkpoint.best": "null",
}


def trained(recipe: Recipe) -> list[float]:
    """The loss of every step of a run from its sources on."""
    ingest(recipe)
    prepare(recipe)
    train(recipe)
    return [
        line["train/loss"] for line in read_lines(recipe.folder.metrics) if "train/loss" in line
    ]


def some(source: Path, target: Path, count: int, most: int) -> Path:
    """The first few records of a JSON list that are short enough."""
    records = [
        record
        for record in json.loads(source.read_text(encoding="utf-8"))
        if len(json.dumps(record)) < most
    ][:count]
    assert len(records) == count
    target.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return target


@pytest.mark.parametrize("name", ["sft_llama.yaml", "lora_llama.yaml"])
def test_chats_are_learnt(name: str, smollm2: Path, test_data: Path, tmp_path: Path) -> None:
    """Few chats again and again: the first loss is that of the loaded model, or of the base under
    its adapter.
    """
    chats = some(
        test_data / "llamafactory_demo" / "alpaca_en_demo.json", tmp_path / "chats.jsonl", 12, 400
    )
    recipe = shipped(
        name,
        tmp_path,
        FEW,
        model__source=smollm2,
        tokenizer__template="chatml",
        data__train=[{"source": str(chats)}],
        train__steps=6,
        train__evaluate_every=6,
        train__evaluate_rows=1,
        train__optimizer__lr=2e-4 if name.startswith("sft") else 2e-3,
        train__schedule="{kind: constant, warmup: 0}",
    )
    losses = trained(recipe)
    assert losses[0] < 4, "what was loaded is a language model"
    assert losses[-1] < losses[0] - 0.1, losses
    if recipe.model.lora is not None:
        assert is_adapter(recipe.folder.adapter)
        size = sum(
            file["bytes"] for file in committed(recipe.folder.checkpoints)[0].commit["files"]
        )
        assert size < 80e6, (
            "only the adapter and its optimizer are in a checkpoint; the base alone has 538 MB"
        )


def test_preferences_are_learnt(smollm2: Path, test_data: Path, tmp_path: Path) -> None:
    pairs = some(
        test_data / "llamafactory_demo" / "dpo_en_demo.json", tmp_path / "pairs.jsonl", 8, 1200
    )
    recipe = shipped(
        "dpo_llama.yaml",
        tmp_path,
        FEW,
        model__source=smollm2,
        data__train=[{"source": str(pairs)}],
        train__steps=5,
        train__evaluate_every="null",
        train__optimizer__lr=1e-3,
        train__schedule="{kind: constant, warmup: 0}",
        data__seq_len=192,
        data__validation="{fraction: 0.2}",
    )
    losses = trained(recipe)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3), "the policy begins as its reference"
    assert losses[-1] < 0.6, losses
    margins = [
        line["train/rewards/margin"]
        for line in read_lines(recipe.folder.metrics)
        if "train/rewards/margin" in line
    ]
    assert margins[-1] > margins[0]


def test_a_small_student_learns_from_smollm2(
    smollm2: Path, test_data: Path, tmp_path: Path
) -> None:
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
    }
    recipe = shipped(
        "distill_llama.yaml",
        tmp_path,
        FEW,
        model__source="preset:llama-135m",
        model__config=size,
        tokenizer__source=smollm2,
        objective__teacher=smollm2,
        data__train=[{"source": str(test_data / "tiny_shakespeare" / "input.txt")}],
        data__fraction=1.0,
        train__steps=6,
        train__evaluate_every="null",
        train__optimizer__lr=1e-2,
        train__schedule="{kind: constant, warmup: 0}",
        data__validation=[{"source": str(test_data / "tiny_shakespeare" / "input.txt")}],
    )
    losses = trained(recipe)
    assert losses[-1] < losses[0] - 1, losses
    assert RunFolder(recipe.folder.root).model.is_dir()
