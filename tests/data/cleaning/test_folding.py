"""Folding sets case, diacritics and white space aside, and nothing else; whole buffers give what
each text gives alone.
"""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.data.cleaning import folding as fold_module
from ingot.data.cleaning.folding import check_fold, digests, fold, fold_identity
from ingot.data.cleaning.unicode import LIMIT
from tests.data.cleaning.small import folded

LETTERS = st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn", "Co"))
WRITTEN = st.text(
    st.one_of(st.sampled_from("aA zZ\n\t éÉß ΣσςάΆ йЙ  金がカ가\u0301\u3099\u00a0"), LETTERS),
    max_size=30,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Straße", "STRASSE"),
        ("GROẞ", "groß"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
        ("Café", "cafe"),
        ("Cafe\u0301", "CAFÉ"),
        ("Ёлка", "елка"),
        ("ﬅ ſ", "ﬅ s"),
        (" a \t\n b ", "a b"),
        ("a\u00a0\u2003b", "a b"),
        ("が", "か\u3099"),
        ("가", "\u1100\u1161"),
        ("Ⱥ", "ⱥ"),
        ("İ", "i"),
        ("K", "k"),
        ("Å", "å"),
        ("שָׁלוֹם", "שלום"),
        ("مُحَمَّد", "محمد"),
        ("\u1e9b\u0323", "s"),
        ("ệ", "e"),
        ("\u0958\u0947", "\u0915\u093c\u0947"),  # Hindi
        ("\u0a5b", "\u0a1c\u0a3c"),  # Punjabi
        ("\u0b5c", "\u0b21\u0b3c"),  # Odia
        ("\u0f43", "\u0f42\u0fb7"),  # Tibetan
        ("\u1fa7", "\u03c9\u0314\u0342\u0345"),  # Greek
        ("\ufa6c", "\U000242ee"),
    ],
)
def test_alike(one: str, other: str) -> None:
    assert folded(one) == folded(other)


def test_canonically_equal_characters_fold_alike() -> None:
    """Of every character, alone or decomposed; else one text in two spellings is two texts."""
    written = [chr(point) for point in range(0x80, 0x30000) if not 0xD800 <= point < 0xE000]
    parted = [unicodedata.normalize("NFD", letter) for letter in written]
    apart = [pair for pair in zip(written, parted, strict=True) if pair[0] != pair[1]]
    ones, others = (folded(*texts) for texts in zip(*apart, strict=True))
    assert [
        letter for (letter, _), one, other in zip(apart, ones, others, strict=True) if one != other
    ] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a b", "ab"),
        ("か", "が"),
        ("कि", "कु"),
        ("a.", "a"),
        ("1", "2"),
        ("o", "ø"),
        ("x²", "x2"),
        ("𠀀", "𠀁"),
    ],
)
def test_not_alike(one: str, other: str) -> None:
    assert folded(one) != folded(other)


def test_in_words() -> None:
    assert folded("  Ein\r\nTest: STRASSE ", "", " \u00a0\n", "\u0301", "金 属") == [
        "ein test: strasse",
        "",
        "",
        "",
        "金 属",
    ]


@given(st.lists(WRITTEN, max_size=6))
def test_a_buffer_gives_what_each_text_gives_alone(texts: list[str]) -> None:
    assert folded(*texts) == [folded(text)[0] for text in texts]


@given(WRITTEN)
def test_folding_twice_changes_nothing(text: str) -> None:
    once = folded(text)[0]
    assert folded(once) == [once]


@given(
    st.text(
        st.one_of(
            st.characters(max_codepoint=0x17F, exclude_categories=("Cs", "Cn", "Cc")),
            st.sampled_from("άΆσςΣ \n\t"),
        ),
        max_size=40,
    )
)
def test_as_python_folds_latin_and_greek(text: str) -> None:
    plain = "".join(
        letter
        for letter in unicodedata.normalize("NFD", text.casefold())
        if not 0x300 <= ord(letter) < 0x370
    )
    # Two letters that Python's full case folding takes apart and a mapping of single letters does
    # not.
    expected = re.sub(r"\s+", " ", unicodedata.normalize("NFC", plain.replace("ŉ", "ʼn"))).strip()
    assert [found.replace("ŉ", "ʼn").replace("ı", "i") for found in folded(text)] == [
        expected.replace("ı", "i")
    ]


def test_slices_of_arrays() -> None:
    texts = pa.array(["Ä", "B ", "Ç", "d"])
    assert np.array_equal(digests(fold(texts.slice(1, 2))), digests(fold(pa.array(["b", "c"]))))
    assert np.array_equal(digests(fold(texts.cast(pa.large_string()))), digests(fold(texts)))
    assert len(fold(texts.slice(4))) == 0


def test_a_buffer_never_grows() -> None:
    tables = fold_module._tables()
    own = np.array(
        [
            1 if point < 0x80 else 2 if point < 0x800 else 3 if point < 0x10000 else 4
            for point in range(LIMIT)
        ]
    )
    own[0xD800:0xE000] = 4
    assert (tables.sizes <= own).all()


def test_long_mixed_texts() -> None:
    chance = random.Random(3)
    texts = [
        "".join(chance.choices("abc DEF\n\t éßΣς金が\u3099か—’", k=chance.randrange(5000)))
        for _ in range(20)
    ]
    assert folded(*texts) == [folded(text)[0] for text in texts]


def test_other_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fold(fold_identity())
    with pytest.raises(WrongInput, match="install the same pyarrow on every worker"):
        check_fold("0" * 16)
