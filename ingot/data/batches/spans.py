"""Which spans of a text are hidden from an encoder-decoder that learns to write them. Also what
hides a part of a recipe's texts, whichever way it is hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.spans import SpanLengths
from ingot.data.batches.hiding import Hiding
from ingot.data.batches.masking import Masking
from ingot.data.batches.permutation import CIRCLE, GOLDEN, Words, mix
from ingot.data.columns.reader import Ids
from ingot.tokenizers.sentinels import sentinels_of
from ingot.tokenizers.tokenizer import Tokenizer


def hiding_of(recipe: Recipe, tokenizer: Tokenizer) -> Hiding | None:
    """How a recipe hides a part of its texts; None for objectives that hide none.

    Raises:
        WrongInput: the tokenizer lacks what stands for it.
    """
    return Masking.of(recipe, tokenizer) or SpanCorruption.of(recipe, tokenizer)


@dataclass(frozen=True)
class SpanCorruption(Hiding):
    """What T5's `span_corruption` and the collator of transformers' `run_t5_mlm_flax.py` do to a
    text: kept and hidden spans alternate, a kept one first and a hidden one last, and of all ways
    to cut the text so each is as likely.
    """

    writes: ClassVar[bool] = True
    target_frame: tuple[Ids, Ids]
    sentinels: Ids
    """What stands for the first hidden span, the second, and so on."""
    lengths: SpanLengths

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Tokenizer) -> SpanCorruption | None:
        """How a recipe hides spans; None for objectives that hide none.

        Raises:
            WrongInput: the tokenizer has no sentinels, or fewer than a text has spans, or nothing
                to end a target with.
        """
        if (lengths := recipe.objective.spans) is None:
            return None
        frames = [
            (np.array(before, np.int64), np.array(after, np.int64))
            for before, after in (tokenizer.frame, tokenizer.target_frame)
        ]
        made = cls(
            frames[0], recipe.seed, frames[1], np.array(sentinels_of(tokenizer), np.int64), lengths
        )
        made._check(tokenizer, recipe.data.seq_len)
        return made

    def _check(self, tokenizer: Tokenizer, seq_len: int) -> None:
        if not len(self.sentinels):
            raise WrongInput(
                f"{tokenizer.where} has no sentinels (<extra_id_0>, <extra_id_1>, ...), which"
                " objective.kind span_corruption puts in place of spans; BART and its kin were"
                " pretrained otherwise: set model.source to a T5 (hf:google-t5/t5-small,"
                " hf:google/mt5-small), or tokenizer.source to train"
            )
        if not len(self.target_frame[1]):
            raise WrongInput(
                f"{tokenizer.where} has no EOS token, so that a model would not learn where hidden"
                " spans end; set tokenizer.source to one that has, or to train"
            )
        longest = self.lengths.longest(seq_len - self.room)
        most = self.lengths.hidden(longest)[1] if longest else 0
        if most > len(self.sentinels):
            raise WrongInput(
                f"data.seq_len {seq_len} has {most:,} hidden spans, and {tokenizer.where} only"
                f" {len(self.sentinels):,} sentinels; lower data.seq_len, or raise"
                " objective.mean_noise_span_length"
            )

    def most_labels(self, seq_len: int) -> int:
        longest = self.lengths.longest(seq_len - self.room)
        return self.lengths.corrupted(longest)[1] + sum(map(len, self.target_frame))

    def hide(self, ids: Ids, key: Words) -> tuple[Ids, Ids]:
        """(source, target) of a framed text `[T]` of at least two tokens: the text with a sentinel
        in place of each hidden span, and the spans, each behind its sentinel.
        """
        body = ids[len(self.frame[0]) : len(ids) - len(self.frame[1])]
        hidden, begins = self._cut(len(body), key)
        number = self.sentinels[np.cumsum(begins & hidden) - 1]
        source = np.where(hidden, number, body)[~hidden | begins]
        # A kept span stands before the hidden one whose sentinel it becomes.
        number = self.sentinels[np.cumsum(begins & ~hidden) - 1]
        target = np.where(hidden, body, number)[hidden | begins]
        before, after = self.target_frame
        return self.framed(source), np.concatenate((before, target, after))

    def _cut(
        self, length: int, key: Words
    ) -> tuple[
        np.ndarray[tuple[int], np.dtype[np.bool_]], np.ndarray[tuple[int], np.dtype[np.bool_]]
    ]:
        """Which tokens of a text are hidden, and at which ones a span of either kind begins."""
        tokens, spans = self.lengths.hidden(length)
        sizes = np.empty(2 * spans, np.int64)
        sizes[::2] = _parts(length - tokens, spans, mix(key ^ np.uint64(GOLDEN)))
        sizes[1::2] = _parts(tokens, spans, mix(key ^ np.uint64(2 * GOLDEN % CIRCLE)))
        hidden = np.repeat(np.arange(2 * spans) % 2 == 1, sizes)
        begins = np.zeros(length, np.bool_)
        begins[np.cumsum(sizes) - sizes] = True
        return hidden, begins


def _parts(items: int, count: int, key: Words) -> Ids:
    """The sizes of `count` parts of `items`, none of them empty: the places between two items are
    ordered by their hash, and the first ones are cut.
    """
    chance = mix(key + np.arange(1, items, dtype=np.uint64) * np.uint64(GOLDEN))
    cuts = np.sort(np.argsort(chance, kind="stable")[: count - 1]) + 1
    return np.diff(cuts, prepend=0, append=items)
