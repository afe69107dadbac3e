"""Recipes over a folder of small files, and a look at everything that a verb wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe


def recipe(root: Path, *sources: Any, **knobs: Any) -> Recipe:
    """A recipe whose runs are in `root/runs`; a source is a path or a mapping of its knobs; `knobs`
    have `__` for dots, None unsets.
    """
    listed = [source if isinstance(source, dict) else {"source": str(source)} for source in sources]
    values = {
        "name": "small",
        "output": str(root / "runs"),
        "data.train": listed,
        "data.validation.fraction": 0.2,
        "data.seq_len": 16,
        "tokenizer.source": "train",
        "tokenizer.vocab_size": 280,
        "train.global_batch": 2,
        "data.engine.workers": 1,
        **{knob.replace("__", "."): value for knob, value in knobs.items()},
    }
    return load_recipe(
        (),
        [f"{knob}={json.dumps(value)}" for knob, value in values.items() if value is not None],
        environ={},
        dotenv=None,
    )


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def sentences(count: int, offset: int = 0) -> list[str]:
    """Texts of very different lengths, all different."""
    return [
        f"Text {number}: "
        + "the copper melts, the mould cools. " * (number * 7 % 11 + 1)
        + "für 金 🔥"
        for number in range(offset, offset + count)
    ]


def everything(folder: Path) -> dict[str, str]:
    """Relative path -> hash of each file below `folder`."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
