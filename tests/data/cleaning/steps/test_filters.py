"""Documents in other languages go; what is missing or unknown is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pytest

from ingot.base.errors import WrongInput
from ingot.data.cleaning.steps import filters as languages
from ingot.data.cleaning.steps.filters import check_languages, in_languages
from tests.data.cleaning.small import kept, small, stays

TEXTS = [
    "The copper melts slowly in the furnace while the workers prepare the moulds for the next day.",
    (
        "Das Kupfer schmilzt langsam im Ofen, während die Arbeiter die Formen für den nächsten Tag"
        " vorbereiten."
    ),
    (
        "Le cuivre fond lentement dans le four pendant que les ouvriers préparent les moules pour"
        " demain."
    ),
    "Медь медленно плавится в печи, пока рабочие готовят формы на следующий день.",
    "铜在炉子里慢慢融化，工人们正在为第二天准备模具。",
]


@pytest.fixture(autouse=True)
def library() -> None:
    pytest.importorskip("py3langid", reason="the extra `languages` is not installed")


@pytest.mark.parametrize(
    ("wanted", "expected"), [(["en"], [1]), (["de", "fr"], [2, 3]), (["ru", "zh", "en"], [1, 4, 5])]
)
def test_languages(tmp_path: Path, wanted: list[str], expected: list[int]) -> None:
    assert stays(tmp_path, TEXTS, languages=wanted) == [f"t.jsonl:{number}" for number in expected]


def test_judged_by_the_beginning() -> None:
    texts = pa.array([TEXTS[0] * 30 + TEXTS[1] * 500, "", "12 34"])
    assert in_languages(texts, ["en"])[0]
    assert in_languages(pa.array([], pa.string()), ["en"]).tolist() == []


def test_too_short_documents_are_not_judged(tmp_path: Path) -> None:
    cleaned, _ = kept(small(tmp_path, ["Kupfer", *TEXTS], languages=["en"], min_chars=10))
    assert cleaned.dropped == {"min_chars": 1, "languages": 4}


def test_an_unknown_language(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=r"data.clean.languages has 'english', which is not one of .*use ISO 639-1 codes",
    ):
        check_languages(["en", "english"])


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    languages._library.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(WrongInput, match=r"pip install 'ingot\[languages\]'"):
        check_languages(["en"])
