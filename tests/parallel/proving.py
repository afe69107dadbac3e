"""The models that layouts are proved on, and the recipe of each, on one set of prepared texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config.recipe import Recipe
from ingot.config.sections.training import OptimizerSettings
from ingot.models.hf.tensorfile import save_weights
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.verify.layout import PRELOAD, LayoutBounds, LayoutProver, LayoutReference
from tests import tolerances
from tests.small import small_recipe

BOUNDS = LayoutBounds(
    loss=tolerances.SPLIT_LOSS, norm=tolerances.SPLIT_LOSS, weights=tolerances.SPLIT_WEIGHTS
)
# Eight heads over four: enough for four ranks of `tensor`, or two of it and two of Ulysses.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen3": {**LLAMA, "model_type": "qwen3"},
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 10},
    "qwen2": {
        **LLAMA,
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 1,
    },
    "lora": LLAMA,
}

TRANSFORMERS = ("transformers.models.t5.modeling_t5", "transformers.models.bert.modeling_bert")
"""What the models of `tests.objectives.ways` need; imported once, not on each rank."""


def recipe_of(root: Path, model: str, **knobs: Any) -> Recipe:
    """The recipe of one of `MODELS` over the prepared texts in `root`; its configuration, and
    weights for an adapter, are written where they lack.
    """
    folder = root / "models" / model
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(MODELS[model]))
        if model == "lora":
            whole = Decoder(DecoderConfig.from_hf(MODELS[model]))
            init_weights(whole, 0)
            save_weights(
                {name: parameter.detach() for name, parameter in whole.named_parameters()}, folder
            )
    given = {"model__source": str(folder), "model__config": None, "model__init": "random"}
    if model == "lora":
        given |= {"model__init": "weights", "model__lora": json.dumps({"rank": 4, "alpha": 8})}
    return small_recipe(root, **given, **knobs)


class Proving:
    """Ranks that live as long as the tests of a file, and what one process makes of each recipe."""

    def __init__(self) -> None:
        self.prover = LayoutProver(
            preload=(*PRELOAD, "tests.parallel.faults", *TRANSFORMERS), case_s=60.0, bounds=BOUNDS
        )
        self._references: dict[str, LayoutReference] = {}

    def reference(
        self, recipe: Recipe, optimizer: OptimizerSettings | None = None
    ) -> LayoutReference:
        key = f"{recipe.model_dump_json()} {optimizer!r}"
        if key not in self._references:
            self._references[key] = self.prover.reference(recipe, optimizer)
        return self._references[key]
