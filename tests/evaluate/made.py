"""A run with prepared data and a random model of transformers in its `model/`, as `train` would have left it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config.recipe import Recipe
from ingot.tokenizers.load import load_tokenizer
from tests.models.tiny import make_reference
from tests.small import small_recipe


def with_model(root: Path, folder: Path | None = None, **overrides: Any) -> Recipe:
    """The recipe; its model (in `folder`, else the run's own) has the run's tokenizer."""
    # The prepared root is a copy: its documents were read from where the original stands.
    manifest = json.loads((small_recipe(root).folder.raw / "manifest.json").read_text(encoding="utf-8"))
    sources = [{"source": source["source"]} for source in manifest["splits"]["train"]]
    recipe = small_recipe(root, data__train=sources, **overrides)
    place_model(recipe, folder or recipe.folder.model)
    return recipe


def place_model(recipe: Recipe, folder: Path, **config: Any) -> None:
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    make_reference(folder, vocab_size=tokenizer.vocab_size, **config)
    tokenizer.save(folder)
