"""Runs on every kind of document that we made up, prepared, with a random model of the right kind
in `model/`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.tokenizers.load import load_tokenizer
from tests.evaluate.small_models import place_model, write_lines
from tests.models.hf import tiny as hub_tiny
from tests.small import WORDS, small_recipe

LABELS = list(hub_tiny.LABELS)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "chat": {"kind": "sft"},
    "preference": {"kind": "dpo"},
    "rated": {"kind": "kto"},
    "pair": {"kind": "seq2seq", "prefix": "short: "},
    "labelled": {"kind": "classify", "labels": LABELS},
}


def said(generator: random.Random, least: int = 2, most: int = 10) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(least, most)))


def records(documents: str, count: int = 60) -> list[dict[str, Any]]:
    """Documents of very different lengths."""
    generator = random.Random(0)
    made = []
    for number in range(count):
        question, answer = f"{said(generator)} {number}?", said(generator)
        made.append(
            {
                "chat": {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                },
                "preference": {
                    "prompt": question,
                    "chosen": answer,
                    "rejected": said(generator, 1, 6),
                },
                "rated": {"prompt": question, "completion": answer, "label": number % 3 > 0},
                "pair": {"source": f"{question}\n{said(generator)}", "target": answer},
                "labelled": {
                    "text": f"{question} {said(generator)}",
                    "label": LABELS[min(number % 4, 2)],
                },
            }[documents]
        )
    return made


def recipe_of(root: Path, documents: str, **knobs: Any) -> Recipe:
    """The recipe on `root/DOCUMENTS.jsonl`."""
    given = {
        "name": documents,
        "data__train": json.dumps([{"source": str(root / f"{documents}.jsonl")}]),
        "data__validation__fraction": 0.3,
        "data__seq_len": 48,
        "data__target_len": 24,
        "objective": json.dumps(OBJECTIVES[documents]),
        "tokenizer__template": "chatml",
        "tokenizer__vocab_size": 400,
        "evaluate__micro_batch": 3,
        **knobs,
    }
    return small_recipe(root, **given)


def prepared(root: Path, documents: str, **knobs: Any) -> Recipe:
    """Everything up to a model in `model/`."""
    root.mkdir(parents=True, exist_ok=True)
    write_lines(root / f"{documents}.jsonl", records(documents))
    recipe = recipe_of(root, documents, **knobs)
    ingest(recipe)
    prepare(recipe)
    place(recipe, recipe.folder.model)
    return recipe


def place(recipe: Recipe, folder: Path, seed: int = 3) -> None:
    """A random model of the kind that the documents are for."""
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    if recipe.documents not in ("pair", "labelled"):
        place_model(recipe, folder, seed=seed)
        return
    own = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.special.eos, "seed": seed}
    hub_tiny.write(
        (
            hub_tiny.varied("t5", **own)
            if recipe.documents == "pair"
            else hub_tiny.drawn("bert", **own)
        ),
        folder,
    )
    tokenizer.save(folder)
