"""A training on the device that is killed twice and resumed, against one in one go: metrics,
weights, optimizer, exported model, bit for bit. `ingot verify resume`, with checkpoints written
while training goes on, from pinned copies.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Asked, Record
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.verify.resume import verify_resume
from tests.small import write_documents

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TINY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def prepared(folder: Path, asked: Asked, **more: Any) -> Recipe:
    """A small recipe with prepared text of made-up sentences, packed, in bf16."""
    if not (folder / "text").exists():
        write_documents(folder / "text")
    given = {
        "name": "small",
        "output": str(folder / "runs"),
        "data.train": [{"source": str(folder / "text")}],
        "data.validation.fraction": 0.1,
        "data.seq_len": 32 if asked.tiny else 128,
        "data.engine.workers": 1,
        "tokenizer.source": "train",
        "tokenizer.vocab_size": 320,
        "model.source": "preset:llama-3m",
        "model.config": TINY_MODEL if asked.tiny else MODEL,
        "train.steps": 6,
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "train.optimizer.lr": 0.003,
        "precision.compute": "bf16",
        "track.tensorboard": False,
        **more,
    }
    if not given["model.config"]:
        del given["model.config"], given["tokenizer.vocab_size"]
    lines = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    recipe = load_recipe((), lines, environ={}, dotenv=None)
    ingest(recipe)
    prepare(recipe)
    return recipe


def run(asked: Asked, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for check in verify_resume(prepared(Path(folder), asked)).checks:
            if check.passed is None:
                record.not_run(check.what, check.detail)
            else:
                record.holds(check.what, check.passed, check.detail)
