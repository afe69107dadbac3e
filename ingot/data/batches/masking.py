"""Which tokens of a text are hidden from a masked language model: arithmetic of a key and of places
in the text, without a generator that would have to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.mlm import MLMSettings
from ingot.data.batches.hiding import Hiding
from ingot.data.batches.permutation import GOLDEN, Words, mix
from ingot.data.columns.reader import IGNORE, Ids
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.tokenizers.words import WordStarts, word_starts


def mask_token(tokenizer: Tokenizer) -> int:
    """The id that hides a token. Raises WrongInput if the tokenizer has none."""
    if tokenizer.mask is None:
        raise WrongInput(
            f"{tokenizer.where} has no mask token, which objective.kind mlm hides tokens behind;"
            " set tokenizer.source to one that has (hf:google-bert/bert-base-uncased,"
            " hf:FacebookAI/roberta-base), or to train"
        )
    return tokenizer.mask


@dataclass(frozen=True)
class Masking(Hiding):
    """What transformers' `DataCollatorForLanguageModeling` does to a text."""

    mask: int
    vocab_size: int
    special: Ids
    """Tokens that are never chosen."""
    knobs: MLMSettings
    words: WordStarts | None = None
    """What finds words, where these are masked as a whole."""

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Tokenizer) -> Masking | None:
        """How a recipe hides tokens; None for objectives that hide none.

        Raises:
            WrongInput: the tokenizer has no mask token, or where its words begin is not known.
        """
        if not isinstance(recipe.objective, MLMSettings):
            return None
        before, after = (np.array(ids, np.int64) for ids in tokenizer.frame)
        return cls(
            (before, after),
            recipe.seed,
            mask_token(tokenizer),
            tokenizer.vocab_size,
            np.array(sorted(tokenizer.never_masked), np.int64),
            recipe.objective,
            word_starts(tokenizer) if recipe.objective.whole_word_mask else None,
        )

    def most_labels(self, seq_len: int) -> int:
        return seq_len

    def hide(self, ids: Ids, key: Words) -> tuple[Ids, Ids]:
        """(tokens, labels) of a framed text `[T]`: what the model reads, and the tokens that it is
        asked for, -100 elsewhere.
        """
        each = mix(key + np.arange(1, len(ids) + 1, dtype=np.uint64) * np.uint64(GOLDEN))
        chance = each if self.words is None else mix(key + self._words(ids) * np.uint64(GOLDEN))
        chosen = _below(chance, self.knobs.mlm_probability) & ~np.isin(ids, self.special)
        how = mix(each ^ np.uint64(GOLDEN))
        masked = chosen & _below(how, self.knobs.mask_replace_prob)
        replaced = self.knobs.mask_replace_prob + self.knobs.random_replace_prob
        drawn = chosen & ~masked & _below(how, replaced)
        other = (mix(how + np.uint64(GOLDEN)) % np.uint64(self.vocab_size)).astype(np.int64)
        tokens = np.where(masked, self.mask, np.where(drawn, other, ids))
        return tokens, np.where(chosen, ids, IGNORE)

    def _words(self, ids: Ids) -> Words:
        """The number of the word that each token of a framed text belongs to, from 1."""
        assert self.words is not None
        before, after = map(len, self.frame)
        begins = np.ones(len(ids), np.uint64)
        begins[before : len(ids) - after] = self.words(ids[before : len(ids) - after])
        return np.cumsum(begins, dtype=np.uint64)


def _below(words: Words, share: float) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """True with probability `share`, for words drawn evenly from all of 64 bits."""
    return words >> np.uint64(11) < np.uint64(round(min(share, 1.0) * 2**53))
