"""The same documents stay however the work is cut and dealt out; and they are those that the
plainest way finds.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest

from ingot.data.cleaning import clean as stages
from ingot.data.cleaning.report import CleaningReport
from ingot.data.engines.local import LocalEngine
from ingot.data.raw.ranges import ranges
from ingot.data.raw.store import open_raw
from tests.data.cleaning.small import Kept, Shuffled, cut, kept, places, small

SIMILARITY, NGRAM = 0.7, 3
KNOBS = {
    "normalize": "nfc",
    "min_chars": 20,
    "exact": True,
    "fuzzy": {"similarity": SIMILARITY, "ngram": NGRAM, "permutations": 256},
    "contamination": {"ngram": 8},
}
LETTERS = "abcdefghijklmnopqrstuvwxyzéßΣя"


def corpus(count: int, seed: int) -> list[str]:
    """Texts of which many are copies of others: as they are, in other letters, with some words
    changed, or with a part of them.
    """
    chance = random.Random(seed)
    vocabulary = ["".join(chance.choices(LETTERS, k=chance.randrange(2, 8))) for _ in range(300)]
    texts: list[str] = []
    for _ in range(count):
        kind = chance.random()
        if not texts or kind < 0.4:
            words = chance.choices(vocabulary, k=chance.randrange(1, 90))
        else:
            words = chance.choice(texts).split()
            if kind < 0.5:
                words = [unicodedata.normalize("NFD", word.upper()) for word in words]
            elif kind < 0.8:
                for _ in range(chance.randrange(1, 4)):
                    words[chance.randrange(len(words))] = chance.choice(vocabulary)
            elif kind < 0.9:
                words = chance.choices(vocabulary, k=20) + words[: chance.randrange(5, 30)]
        texts.append(chance.choice([" ", "  ", "\n"]).join(words))
    return texts


TRAIN, VALIDATION = corpus(300, 11), [*corpus(300, 11)[5:200:23], *corpus(12, 12)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CleaningReport, Kept]:
    whole = small(tmp_path_factory.mktemp("undisturbed"), TRAIN, VALIDATION, **KNOBS)
    cleaned, documents = kept(whole)
    return cleaned.report, documents


@pytest.mark.drawn("cuts of cleaning")
@pytest.mark.parametrize(
    ("group", "part", "smallest", "pieces", "buckets"),
    [(10**9, 10**9, 10**9, 2, 1), (15_000, 30_000, 20_000, 4, 2), (700, 6_000, 2_500, 31, 7)],
)
def test_cuts_change_nothing(
    undisturbed: tuple[CleaningReport, Kept],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    part: int,
    smallest: int,
    pieces: int,
    buckets: int,
) -> None:
    report, documents = undisturbed
    assert all(step.documents > 3 for step in report.steps), report
    cut(monkeypatch, group, part, smallest)
    monkeypatch.setattr(stages, "BUCKET_ROWS", len(TRAIN) // buckets + 20)
    monkeypatch.setattr(stages, "CANDIDATES", 250 // buckets)
    made = small(tmp_path / "cut", TRAIN, VALIDATION, **KNOBS)
    assert len(ranges(open_raw(made))) == pieces
    cleaned, found = kept(made, Shuffled(buckets, buckets))
    assert found == documents
    assert cleaned.report == report


@pytest.mark.drawn("cuts of cleaning")
def test_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = {**KNOBS, "contamination": None}
    cleaned, documents = kept(small(tmp_path / "whole", TRAIN, VALIDATION, **knobs))
    cut(monkeypatch, 10_000, 10_000, 10_000)
    again, found = kept(small(tmp_path / "cut", TRAIN, VALIDATION, **knobs), LocalEngine(2))
    assert found == documents
    assert again.report == cleaned.report


def plain_fold(text: str) -> str:
    plain = "".join(
        letter
        for letter in unicodedata.normalize("NFD", text.casefold())
        if not unicodedata.combining(letter)
    )
    return re.sub(r"\s+", " ", plain).strip()


def plain_grams(text: str, size: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", plain_fold(text))
    return {tuple(words[begin : begin + size]) for begin in range(max(len(words) - size + 1, 1))}


def plainly(validation: Sequence[str], train: Sequence[str]) -> tuple[list[str], list[set[str]]]:
    """Who stays, and whom each step drops, by loops over texts."""
    texts = {f"v.jsonl:{number}": text for number, text in enumerate(validation, 1)} | {
        f"t.jsonl:{number}": text for number, text in enumerate(train, 1)
    }
    texts = {name: unicodedata.normalize("NFC", text) for name, text in texts.items()}
    steps = [{name for name, text in texts.items() if len(text) < 20}]
    left = [name for name in texts if name not in steps[0]]
    seen: set[str] = set()
    steps.append(
        {
            name
            for name in left
            if plain_fold(texts[name]) in seen or seen.add(plain_fold(texts[name]))
        }
    )
    left = [name for name in left if name not in steps[1]]
    grams = {name: plain_grams(texts[name], NGRAM) for name in left}
    root = {name: name for name in left}
    for one, other in itertools.combinations(left, 2):
        if (
            root[one] != root[other]
            and len(grams[one] & grams[other]) / len(grams[one] | grams[other]) >= SIMILARITY
        ):
            first, last = sorted((root[one], root[other]), key=left.index)
            root = {name: first if found == last else found for name, found in root.items()}
    steps.append({name for name in left if root[name] != name})
    left = [name for name in left if name not in steps[2]]
    held = set().union(*(plain_grams(texts[name], 8) for name in left if name.startswith("v")))
    steps.append(
        {name for name in left if name.startswith("t") and plain_grams(texts[name], 8) & held}
    )
    return [name for name in left if name not in steps[3]], steps


def test_as_the_plainest_way(undisturbed: tuple[CleaningReport, Kept]) -> None:
    expected, steps = plainly(VALIDATION, TRAIN)
    report, documents = undisturbed
    assert sorted(places(documents)) == sorted(expected)
    assert [step.documents for step in report.steps] == [len(dropped) for dropped in steps]
    for step, dropped in zip(report.steps, steps, strict=True):
        assert {example.doc_id for example in step.examples} <= dropped


def test_recall_at_the_threshold(tmp_path: Path) -> None:
    """Pairs that are just similar enough: at least 97 % of them are found where 99 % are expected,
    and no pair that is less alike.
    """
    chance = random.Random(8)
    texts = []
    for pair in range(300):
        words = [f"w{pair}x{number}" for number in range(90)]
        other = words.copy()
        other[80:] = [f"o{pair}x{number}" for number in range(10)]
        texts += [" ".join(chance.sample(words, 90)), " ".join(chance.sample(other, 90))]
    cleaned, _ = kept(small(tmp_path / "at", texts, fuzzy={"similarity": 0.8, "ngram": 1}))
    assert 0.97 * 300 <= cleaned.dropped["fuzzy"] <= 300
    cleaned, _ = kept(small(tmp_path / "over", texts, fuzzy={"similarity": 0.801, "ngram": 1}))
    assert cleaned.dropped["fuzzy"] == 0


def test_thousands_of_equal_and_alike_documents(tmp_path: Path) -> None:
    """Boilerplate of which each copy has a word of its own; all of it is one cluster, and repeated
    texts are told as repeated.
    """
    base = " ".join(f"w{number}" for number in range(100))
    texts = [f"{base} {number % 2000}" for number in range(6000)]
    cleaned, documents = kept(small(tmp_path, texts, exact=True, fuzzy={}))
    assert places(documents) == ["t.jsonl:1"]
    assert cleaned.dropped == {"exact": 4000, "fuzzy": 1999}
    assert cleaned.report.notes == {"groups of near-duplicates too large to compare in full": 21}
