"""Stand-ins for what training and evaluation leave behind: the registry looks at files and hashes,
never at weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.base.reports import EvaluationReport, Metric, write_report
from ingot.config.recipe import Recipe
from ingot.registry.verbs import registered_version
from ingot.registry.versions import ModelRegistry


def a_report(model: str, value: float = 2.5, on: str = "set1") -> EvaluationReport:
    return EvaluationReport(
        model,
        "tokenizer",
        {"loss/bits_per_byte": Metric(value, value - 0.1, value + 0.1, "lower", 100, on)},
    )


def a_model(folder: Path, model: str) -> Path:
    """A model folder as training exports it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "ingot.json").write_text(json.dumps({"schema": 1, "model_hash": model, "run": "r"}))
    (folder / "model.safetensors").write_bytes(f"weights of {model}".encode())
    return folder


def a_recipe(root: Path, name: str = "run", **sections: object) -> Recipe:
    values = {
        "name": name,
        "output": str(root),
        "registry": {"name": "words"},
        "data": {"train": [{"source": "x"}]},
        **sections,
    }
    return Recipe.model_validate(values)


def trained(recipe: Recipe, model: str, value: float = 2.5, on: str = "set1") -> Recipe:
    """`recipe` with a trained and evaluated model in its run folder."""
    for path in recipe.folder.model.glob("*"):
        path.unlink()  # as an export does: new files, never old ones written over
    a_model(recipe.folder.model, model)
    write_report(recipe.folder.reports / "evaluate.json", a_report(model, value, on))
    return recipe


def registered_folder(registry: ModelRegistry[Any], name: str, number: int | None = None) -> Path:
    """The folder of a version, or of the live one, as `ingot serve NAME` comes to it."""
    return registry.fetch(registered_version(registry, name, number))
