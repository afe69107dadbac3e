"""Normal forms by looking at characters first give what normalising everything gives."""

from __future__ import annotations

import unicodedata

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import Failed
from ingot.data.cleaning import unicode as normal
from ingot.data.cleaning.cleaned import normalize_stored
from ingot.data.cleaning.corpus import plain_texts
from ingot.data.cleaning.unicode import normalize

TRICKY = (
    "aéeA\u0301\u0327\u0323\u3099か가\u1100\u1161\u11a8ﬁ²Å\u0915\u093c\u09c7\u09be金\U0002f800𠀀𝐀 "
)


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
@given(
    texts=st.lists(
        st.text(
            st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=("Cs",))),
            max_size=12,
        ),
        max_size=5,
    )
)
def test_as_normalising_everything(form: str, texts: list[str]) -> None:
    array = pa.array(texts, pa.string())
    assert normalize(array, form).equals(pc.utf8_normalize(array, form.upper()))


@given(st.text(st.sampled_from(TRICKY), max_size=12))
def test_as_python_normalises(text: str) -> None:
    assert normalize(pa.array([text]), "nfc").to_pylist() == [unicodedata.normalize("NFC", text)]


def test_none_leaves_texts_alone() -> None:
    assert normalize(pa.array(["e\u0301"]), "none").to_pylist() == ["e\u0301"]


def test_chats() -> None:
    chat = '{"messages":[{"role":"user","content":"e\u0301?"},{"role":"assistant","content":"ﬁ","tool":"e\u0301"}]}'
    assert plain_texts("chat", pa.array([chat])).to_pylist() == ["e\u0301?\nﬁ"]
    assert normalize_stored("chat", pa.array([chat]), "nfc").to_pylist() == [
        chat.replace("e\u0301?", "é?")
    ]
    assert normalize_stored("chat", pa.array([chat]), "none").to_pylist() == [chat]


def test_a_library_that_gets_the_form_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyarrow 25 does, which leaves NFC decomposed."""
    real = pc.utf8_normalize
    monkeypatch.setattr(normal.pc, "utf8_normalize", lambda texts, form: real(texts, "NFD"))
    normal._check_library.cache_clear()
    with pytest.raises(
        Failed, match="gets the Unicode normal form NFC wrong; install another version"
    ):
        normalize(pa.array(["f\u00fcr"]), "nfc")
    normal._check_library.cache_clear()
