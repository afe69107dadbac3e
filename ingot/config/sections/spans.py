"""The knobs of span corruption, named as T5's own code and transformers' `run_t5_mlm_flax.py` name
them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ingot.config.sections.objective import ObjectiveSettings
from ingot.config.spans import SpanLengths


class SpanCorruptionSettings(ObjectiveSettings):
    """Span corruption (Raffel et al. 2020): of a text some spans are replaced by one sentinel each,
    `<extra_id_0>`, `<extra_id_1>` and so on, and an encoder-decoder learns to write the spans, each
    behind its sentinel. Which spans is drawn anew each time that a text is read, and once and for
    all for held-out documents. It is how T5 and mT5 were pretrained.

    `data.seq_len` bounds what the encoder reads. How much text becomes so long, and how long the
    target is, follows from it: with the defaults 568 tokens of text become 512 and a target of 114.
    """

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "masked"
    kind: Literal["span_corruption"]
    """The way of training."""
    noise_density: Annotated[float, Field(gt=0, le=0.5)] = 0.15
    """The share of the tokens that are hidden."""
    mean_noise_span_length: Annotated[float, Field(ge=1, le=1000)] = 3.0
    """How many tokens a hidden span has on average."""

    @property
    def spans(self) -> SpanLengths:
        return SpanLengths(self.noise_density, self.mean_noise_span_length)

    def check_recipe(self, recipe: Any) -> None:
        """Raises ValueError for a length that follows from another knob."""
        usual = type(recipe.data).model_fields["target_len"].default
        if recipe.data.target_len not in (usual, recipe.target_len):
            raise ValueError(
                f"data.target_len follows from data.seq_len for objective.kind {self.kind}: targets"
                f" are up to {recipe.target_len} tokens long; remove it"
            )
