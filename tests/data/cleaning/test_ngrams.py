"""Words and n-grams over whole buffers are those of each text; scripts without spaces have a word
for each character.
"""

from __future__ import annotations

import random
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.data.cleaning import ngrams as minhash
from ingot.data.cleaning.folding import fold
from ingot.data.cleaning.ngrams import (
    FOUND,
    LONGEST_WORD,
    HashedTexts,
    band_keys,
    bands,
    ngrams,
    signatures,
    words,
)

TEXTS = st.text(st.sampled_from("ab1 éя.,-'_\n金がカー𠀀’—สก¼"), max_size=40)


def hashed(*texts: str) -> HashedTexts:
    return words(fold(pa.array(texts, pa.string())))


def plain_words(text: str) -> list[str]:
    """Words by a regular expression, of folded text."""
    return re.findall(r"[金がカー𠀀สก]|[a-z0-9éяe¼]+", text)


@given(st.lists(TEXTS, max_size=5))
def test_words_are_counted_and_told_apart(texts: list[str]) -> None:
    found = hashed(*texts)
    plain = [plain_words(text) for text in texts]
    assert found.counts.tolist() == [len(of_text) for of_text in plain]
    every = [word for of_text in plain for word in of_text]
    by_hash = {}
    for word, value in zip(every, found.values.tolist(), strict=True):
        assert by_hash.setdefault(value, word.replace("é", "e")) == word.replace("é", "e")
    assert len(by_hash) == len({word.replace("é", "e") for word in every})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("don't stop", 3),
        ("e-mail, x_y", 4),
        ("漢字とカナ", 5),
        ("ภาษาไทย", 7),
        ("नमस्ते दुनिया", 2),
        ("안녕 세계", 2),
        ("...", 0),
        ("", 0),
        ("a金b", 3),
        ("𠀀𠀁", 2),
        ("3.14", 2),
    ],
)
def test_what_a_word_is(text: str, count: int) -> None:
    assert hashed(text).counts.tolist() == [count]


def plain_grams(text: list[str], size: int) -> list[tuple[str, ...]]:
    return (
        [tuple(text[begin : begin + size]) for begin in range(max(len(text) - size + 1, 1))]
        if text
        else []
    )


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "cc", "金"]), max_size=9), max_size=6),
    st.integers(1, 6),
)
def test_ngrams(texts: list[list[str]], size: int) -> None:
    found = ngrams(hashed(*(" ".join(text) for text in texts)), size)
    plain = [plain_grams(text, size) for text in texts]
    assert found.counts.tolist() == [len(grams) for grams in plain]
    by_hash = dict(
        zip(found.values.tolist(), (gram for grams in plain for gram in grams), strict=True)
    )
    assert len(by_hash) == len({gram for grams in plain for gram in grams})
    sets = found.sets()
    assert sets.counts.tolist() == [len(set(grams)) for grams in plain]
    for begin, end in zip(sets.offsets[:-1], sets.offsets[1:], strict=True):
        assert (np.diff(sets.values[begin:end].astype(object)) > 0).all()


def test_the_order_of_words_counts() -> None:
    one, other = (set(ngrams(hashed(text), 2).values.tolist()) for text in ("a b a", "b a a"))
    assert one != other
    assert len(one & other) == 1


def test_over_blocks() -> None:
    """Long texts, words and gaps that reach over the blocks in which words are hashed."""
    chance = random.Random(5)
    texts = [
        " ".join(chance.choices(["copper", "melts", "金", "für", "x" * 3000], k=4000)),
        "-" * 300_000,
        "y" + "-" * 300_000 + "z",
    ]
    together, alone = hashed(*texts), [hashed(text) for text in texts]
    assert np.array_equal(together.values, np.concatenate([one.values for one in alone]))
    assert alone[0].counts[0] == 4000
    assert len(set(alone[0].values.tolist())) == 5
    assert [one.counts[0] for one in alone[1:]] == [0, 2]


def test_a_very_long_word_is_several() -> None:
    found = hashed("a" * (3 * LONGEST_WORD + 1), "b")
    assert found.counts.tolist() == [4, 1]
    assert len(set(found.values.tolist()[:4])) == 2


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("permutations", [64, 128, 256])
def test_bands(similarity: float, permutations: int) -> None:
    count, rows = bands(similarity, permutations)
    assert count * rows <= permutations
    assert 1 - (1 - similarity**rows) ** count >= FOUND
    longer = rows + 1
    assert 1 - (1 - similarity**longer) ** (permutations // longer) < FOUND


def test_bands_at_the_ends() -> None:
    assert bands(1.0, 128) == (1, 128)
    assert bands(0.01, 16) == (16, 1)


def pairs(similarity: float, size: int, count: int, seed: int) -> HashedTexts:
    """`count` pairs of sets of `size` with this Jaccard similarity, one after another."""
    chance = np.random.default_rng(seed)
    common = round(2 * size * similarity / (1 + similarity))
    sets = []
    for _ in range(count):
        values = chance.integers(0, 2**64, 2 * size - common, np.uint64)
        sets += [values[:size], values[size - common :]]
    return HashedTexts(np.concatenate(sets), np.arange(0, 2 * count * size + 1, size))


def test_the_share_of_equal_values_is_the_similarity() -> None:
    found = signatures(pairs(0.6, 80, 400, 1), 128)
    assert abs((found[::2] == found[1::2]).mean() - 0.6) < 0.01


@pytest.mark.parametrize("size", [9, 90, 900])
def test_pairs_at_the_threshold_share_a_band(size: int) -> None:
    keys = band_keys(signatures(pairs(0.8, size, 400, size), 128), 0.8)
    assert keys.shape == (800, 21)
    assert (keys[::2] == keys[1::2]).any(axis=1).mean() >= 0.98


def test_far_pairs_share_none() -> None:
    keys = band_keys(signatures(pairs(0.2, 90, 400, 2), 128), 0.8)
    assert (keys[::2] == keys[1::2]).any(axis=1).mean() < 0.02


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = pairs(0.5, 30, 20, 3)
    whole = signatures(sets, 32)
    monkeypatch.setattr(minhash, "CHUNK", 70)
    assert np.array_equal(signatures(sets, 32), whole)
