"""The knobs of masked language modelling, named as transformers' `DataCollatorForLanguageModeling`
names them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.config.sections.objective import ObjectiveSettings

Probability = Annotated[float, Field(ge=0, le=1)]


class MLMSettings(ObjectiveSettings):
    """Masked language modelling (Devlin et al. 2018): an encoder that reads both sides of a token
    learns to name it where it is hidden. Which tokens are hidden is drawn anew each time that a
    text is read (RoBERTa, Liu et al. 2019), and once and for all for held-out documents. Never
    special tokens.
    """

    implementation = "ingot.objectives.cross_entropy:CrossEntropy.from_settings"
    document_kind = "masked"
    kind: Literal["mlm"]
    """The way of training."""
    mlm_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """The share of the tokens that the model is asked for."""
    mask_replace_prob: Probability = 0.8
    """The share of those that become the tokenizer's mask token."""
    random_replace_prob: Probability = 0.1
    """The share of those that become any token of the vocabulary. The rest stay as they are."""
    whole_word_mask: bool = False
    """Whether the tokens of a word are asked for together or not at all; the share is then one of
    words. What becomes of each of them is drawn by itself, as in BERT's own code: transformers'
    collator hides all of them. A word is what the tokenizer cuts texts into before tokens.
    """

    @model_validator(mode="after")
    def _shares(self) -> MLMSettings:
        if (total := self.mask_replace_prob + self.random_replace_prob) > 1 + 1e-9:
            raise ValueError(
                f"mask_replace_prob {self.mask_replace_prob:g} and random_replace_prob"
                f" {self.random_replace_prob:g} are {total:g} together; lower one of them to have"
                " at most 1"
            )
        if not total:
            raise ValueError(
                "mask_replace_prob and random_replace_prob are both 0, so that the model sees every"
                " token that it is asked for; raise one of them"
            )
        return self
