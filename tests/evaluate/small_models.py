"""A run with prepared data and a random model of transformers in its `model/`, as `train` would
have left it; and a subject of such a folder.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ingot.config.recipe import Recipe
from ingot.evaluate.subject import EvalModel
from ingot.models.generation.generator import eos_ids
from ingot.models.kinds import kind_of_folder, open_model
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.load import load_tokenizer
from tests.models.tiny import make_reference
from tests.small import small_recipe


def with_model(root: Path, folder: Path | None = None, **overrides: Any) -> Recipe:
    """The recipe; its model (in `folder`, else the run's own) has the run's tokenizer."""
    # The prepared root is a copy: its documents were read from where the original stands.
    manifest = json.loads(
        (small_recipe(root).folder.raw / "manifest.json").read_text(encoding="utf-8")
    )
    sources = [{"source": source["source"]} for source in manifest["splits"]["train"]]
    recipe = small_recipe(root, data__train=sources, **overrides)
    place_model(recipe, folder or recipe.folder.model)
    return recipe


def place_model(recipe: Recipe, folder: Path, **config: Any) -> None:
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    make_reference(folder, vocab_size=tokenizer.vocab_size, **config)
    tokenizer.save(folder)


def subject_in(folder: Path, recipe: Recipe, mesh: Mesh) -> EvalModel:
    """The model in `folder`, in float32."""
    tokenizer = load_tokenizer(folder)
    model = open_model(folder, device=mesh.device)
    return EvalModel(
        recipe,
        model,
        kind_of_folder(folder),
        tokenizer,
        eos_ids(folder, tokenizer.special.eos),
        "fp32",
        mesh,
        str(folder),
        quiet=True,
    )


def hellaswag_lines(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Items in HellaSwag's own columns, with its marks, an empty second half, and letters outside
    of ASCII; the sentences mean nothing.
    """
    generator = random.Random(seed)
    words = [
        "ingot",
        "melts",
        "copper",
        "the",
        "a",
        "bright",
        "mould",
        "cools",
        "slowly",
        "für",
        "naïve",
        "金",
        "rings",
    ]

    def phrase(least: int, most: int) -> str:
        return " ".join(generator.choices(words, k=generator.randint(least, most)))

    marks = ("", " [title] ", " [step] ", " [substeps] ")
    return [
        {
            "ind": number,
            "activity_label": phrase(1, 2).capitalize(),
            "ctx_a": phrase(3, 9) + generator.choice(marks) + phrase(1, 3) + ".",
            "ctx_b": generator.choice(["", phrase(1, 2)]),
            "endings": [phrase(1, 8) + generator.choice(marks) + "." for _ in range(4)],
            "label": str(generator.randrange(4)),
        }
        for number in range(count)
    ]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path
