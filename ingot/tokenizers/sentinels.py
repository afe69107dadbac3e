"""Sentinels, which stand for the hidden spans of a text: `<extra_id_0>`, `<extra_id_1>` and so on,
as T5's tokenizers have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache

from ingot.tokenizers.tokenizer import Tokenizer

NAMES = ("<extra_id_{}>", "\N{LOWER ONE EIGHTH BLOCK}<extra_id_{}>")
"""The second one is mT5's."""
SENTINEL = NAMES[0].format(0)
"""What stands for the first hidden span of a text that is asked about."""


@lru_cache(maxsize=8)
def sentinels_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of the sentinels in their order; none for most tokenizers."""
    for name in NAMES:
        found: list[int] = []
        for number in itertools.count():
            if (token := tokenizer.token_id(name.format(number))) is None:
                break
            found.append(token)
        if found:
            return tuple(found)
    return ()


def encode_with_sentinels(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a framed text. Sentinels in it stand for hidden spans, as transformers reads
    them; without any, it is text and nothing else.
    """
    if sentinels_of(tokenizer) and SENTINEL in text:
        return tokenizer.encode_masked(text)
    return tokenizer.encode_framed(text)


def decoder_for(tokenizer: Tokenizer, source: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """How what is written to a source becomes text: with sentinels where the source has some, since
    they tell which span is which, and without other special tokens.
    """
    sentinels = set(sentinels_of(tokenizer))
    if sentinels.isdisjoint(source):
        return tokenizer.decode
    left_out = set(tokenizer.special_ids.values()) - sentinels

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode([one for one in ids if one not in left_out], skip_special=False)

    return decode
