"""A small run on words that we made up: prepared once per test session, copied for each test that
trains on it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare

TINY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WORDS = (
    *("ingot", "melts", "copper", "the", "a", "bright", "mould", "cools", "slowly", "and"),
    *("rings", "true", "für", "naïve"),
)


def write_documents(folder: Path, count: int = 120, seed: int = 0) -> Path:
    """Text files of made-up sentences of very different lengths."""
    generator = random.Random(seed)
    words = [*WORDS, "金", "🔥"]
    folder.mkdir(parents=True)
    for number in range(count):
        sentences = (
            " ".join(generator.choices(words, k=generator.randint(2, 12))) + ".\n"
            for _ in range(generator.randint(1, 12))
        )
        (folder / f"doc{number:04d}.txt").write_text("".join(sentences), encoding="utf-8")
    return folder


def small_recipe(root: Path, **overrides: Any) -> Recipe:
    """A recipe over `root/text`, its runs in `root/runs`; `overrides` are dotted knobs with `__`
    for dots, None leaves one out.
    """
    values = {
        "name": "small",
        "output": str(root / "runs"),
        "data.train": [{"source": str(root / "text")}],
        "data.validation.fraction": 0.1,
        "data.seq_len": 32,
        "tokenizer.source": "train",
        "tokenizer.vocab_size": 320,
        "model.source": "preset:llama-3m",
        "model.config": TINY_MODEL,
        "train.steps": 6,
        "train.global_batch": 4,
        "train.micro_batch": 2,
        "train.optimizer.lr": 0.01,
        "track.every": 1,
        "track.tensorboard": False,
        "data.engine.workers": 1,
        **{key.replace("__", "."): value for key, value in overrides.items()},
    }
    return load_recipe(
        (),
        [f"{key}={value}" for key, value in values.items() if value is not None],
        environ={},
        dotenv=None,
    )


def prepared(root: Path) -> Path:
    """`root` with documents ingested and prepared."""
    write_documents(root / "text")
    recipe = small_recipe(root)
    ingest(recipe)
    prepare(recipe)
    return root


def copy_of(source: Path, target: Path) -> Path:
    """Another root with the same prepared data and nothing else in its run folder."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    return target
