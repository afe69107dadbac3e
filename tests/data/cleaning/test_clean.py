"""What each step drops and which documents stay, step by step and in sum."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.cleaning.arrays import Columns, sorted_by
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.corpus import drop_rows
from ingot.data.cleaning.report import DroppedExample, StepReport
from ingot.data.cleaning.steps import exact_duplicates as duplicates
from ingot.data.cleaning.steps import near_duplicates as fuzzy
from ingot.data.raw.ranges import pieces, read_range
from ingot.data.raw.store import open_raw
from ingot.data.splits import Shares
from tests.data.cleaning.small import kept, numbered, places, small, stays, text


def test_nothing_asked_for(tmp_path: Path) -> None:
    cleaned, documents = kept(small(tmp_path, ["a", "a"]))
    assert cleaned == CleaningResult.nothing()
    assert places(documents) == numbered(1, 2)


def test_only_a_normal_form(tmp_path: Path) -> None:
    made = small(tmp_path, ["e\u0301", "ﬁ²"], normalize="nfkc")
    cleaned, documents = kept(made)
    assert [text for _, text in documents] == ["é", "fi2"]
    assert cleaned.dropped == {}
    assert not (made.folder.data / "clean").exists()


def test_a_worker_with_other_unicode_tables_is_refused(tmp_path: Path) -> None:
    made = small(tmp_path, ["e\u0301"], normalize="nfc")
    raw, other = open_raw(made), replace(kept(made)[0], fold="0" * 16)
    (task,) = pieces(raw, "train")
    with pytest.raises(WrongInput, match="folds text otherwise"):
        list(other.tables(task, read_range(raw.folder, task)))


def test_lengths_are_in_characters_of_the_normal_form(tmp_path: Path) -> None:
    texts = ["éé", "e\u0301e\u0301", "ééé", "\u0301", "éééé"]
    cleaned, documents = kept(small(tmp_path, texts, normalize="nfc", min_chars=3, max_chars=3))
    assert places(documents) == numbered(3)
    assert cleaned.report.steps == [
        StepReport(
            "min_chars",
            3,
            10,
            [
                DroppedExample("t.jsonl:1", "éé"),
                DroppedExample("t.jsonl:2", "éé"),
                DroppedExample("t.jsonl:4", "\u0301"),
            ],
        ),
        StepReport("max_chars", 1, 8, [DroppedExample("t.jsonl:5", "éééé")]),
    ]
    assert (cleaned.report.documents, cleaned.report.bytes) == (5, 24)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["Straße  a", "STRASSE a", "Strasse a", "Strase a"], [1, 4]),
        (["Σίσυφος", "ΣΊΣΥΦΟΣ"], [1]),
        (["Café", "Cafe\u0301", "cafe", "cafe."], [1, 4]),
        (["金属", "金 属", " 金属\n"], [1, 2]),
        (["\u0301", "\u0301 ", "\u0300"], [1, 2, 3]),
        (["-", "--", "-"], [1, 2]),
    ],
)
def test_exact_duplicates(tmp_path: Path, texts: list[str], expected: list[int]) -> None:
    assert stays(tmp_path, texts, exact=True) == numbered(*expected)


def test_empty_texts_are_told(tmp_path: Path) -> None:
    cleaned, _ = kept(small(tmp_path, ["\u0301", "\u0301", "...", "a"], exact=True, fuzzy={}))
    assert cleaned.report.notes == {
        "without text, compared with nothing for exact duplicates": 2,
        "without words, compared with nothing for near-duplicates": 3,
    }


def test_validation_stays_and_training_goes(tmp_path: Path) -> None:
    cleaned, documents = kept(
        small(tmp_path, ["One.", "two", "Three"], ["two", "one.", "four", "TWO"], exact=True)
    )
    assert sorted(places(documents)) == numbered(3) + numbered(1, 2, 3, split="v")
    assert cleaned.report.steps[0].examples == [
        DroppedExample("v.jsonl:4", "TWO", "v.jsonl:1"),
        DroppedExample("t.jsonl:1", "One.", "v.jsonl:2"),
        DroppedExample("t.jsonl:2", "two", "v.jsonl:1"),
    ]


def changed(base: str, count: int, seed: int) -> str:
    """The text with `count` of its words, far apart, replaced."""
    found = base.split()
    for place in range(count):
        found[10 + place * 12] = f"new{seed}x{place}"
    return " ".join(found)


def test_fuzzy_clusters_and_chains(tmp_path: Path) -> None:
    """60 words, 3-grams: each changed word costs three of 59 grams, so one change leaves 56 / 62,
    two 53 / 65 in common.
    """
    base = text(1)
    second = changed(base, 1, 1)
    third = (
        second.replace(second.split()[40], "other40", 1)
        if second.split().count(second.split()[40]) == 1
        else " ".join([*second.split()[:40], "other40", *second.split()[41:]])
    )
    texts = [text(2), third, text(3), base, second, text(4)]
    assert stays(tmp_path / "chain", texts, fuzzy={"similarity": 0.88, "ngram": 3}) == numbered(
        1, 2, 3, 6
    )
    without = [text(2), third, text(3), base, text(4)]
    assert stays(tmp_path / "apart", without, fuzzy={"similarity": 0.88, "ngram": 3}) == numbered(
        1, 2, 3, 4, 5
    )


def test_ties_at_the_threshold(tmp_path: Path) -> None:
    """Eight of ten words in common with 1-grams: similarity is 8 / 10, just what is asked for."""
    texts = ["a b c d e f g h i", "a b c d e f g h j", "k l m n o p q r s", "k l m n o p q t u"]
    assert stays(
        tmp_path / "at", texts, fuzzy={"similarity": 0.8, "ngram": 1, "permutations": 1024}
    ) == numbered(1, 3, 4)
    assert stays(tmp_path / "over", texts, fuzzy={"similarity": 0.80001, "ngram": 1}) == numbered(
        1, 2, 3, 4
    )


def test_identical_sets_are_duplicates(tmp_path: Path) -> None:
    """Repeated words and short texts: other texts, the same n-grams."""
    texts = ["tin " * 9, "tin " * 30, "Iron, rod!", "iron rod", "rod iron", "tin tin"]
    cleaned, documents = kept(small(tmp_path, texts, fuzzy={"similarity": 1.0}))
    assert places(documents) == numbered(1, 3, 5, 6)
    assert [example.similarity for example in cleaned.report.steps[0].examples] == [1.0, 1.0]


def test_texts_without_spaces(tmp_path: Path) -> None:
    chance = random.Random(6)
    base = "".join(chance.choices([chr(0x4E00 + number) for number in range(500)], k=200))
    near = base[:100] + "金" + base[101:]
    assert stays(tmp_path, [base, near, base[::-1]], fuzzy={}) == numbered(1, 3)


def test_dropped_documents_decide_nothing(tmp_path: Path) -> None:
    """The first of three is too long: it is no survivor, and what the steps drop adds up."""
    long, near = text(1, 80) + " " * 50, changed(text(1, 80), 1, 0)
    texts = [long, text(1, 80), text(1, 80).upper(), near, text(9, 80)]
    cleaned, documents = kept(
        small(tmp_path, texts, max_chars=len(long) - 1, exact=True, fuzzy={"similarity": 0.7})
    )
    assert places(documents) == numbered(2, 5)
    assert cleaned.dropped == {"max_chars": 1, "exact": 1, "fuzzy": 1}
    assert [step.examples[0].survivor for step in cleaned.report.steps] == [
        None,
        "t.jsonl:2",
        "t.jsonl:2",
    ]


def test_documents_outside_the_fraction_decide_nothing(tmp_path: Path) -> None:
    """Of equal texts the first that is used at all stays."""
    made = small(tmp_path, ["same"] * 40, ["another"], exact=True)

    def with_fraction(fraction: float) -> tuple[Recipe, list[int]]:
        changed = made.model_copy(
            update={"data": made.data.model_copy(update={"fraction": fraction})}
        )
        return changed, [
            number
            for number in range(1, 41)
            if Shares.of(changed.data).split("train", f"t.jsonl:{number}")
        ]

    changed, used = next(
        found for found in map(with_fraction, (0.8, 0.5, 0.3, 0.2, 0.1, 0.05)) if found[1][0] > 1
    )
    cleaned, documents = kept(changed)
    assert places(documents) == [*numbered(used[0]), "v.jsonl:1"]
    assert (cleaned.report.documents, cleaned.dropped) == (len(used) + 1, {"exact": len(used) - 1})


def test_contamination(tmp_path: Path) -> None:
    question = " ".join(f"word{number}" for number in range(20))
    texts = [
        f"Before. {question.upper()} after",
        "-- ".join(question.split()[3:16]),
        " ".join(question.split()[3:15]),
        "yes",
        "Yes!",
        "yes and no",
        text(1),
    ]
    cleaned, documents = kept(small(tmp_path, texts, [question, "Yes."], contamination={}))
    assert sorted(places(documents)) == numbered(3, 6, 7) + numbered(1, 2, split="v")
    assert cleaned.report.notes == {"n-grams of validation documents": 9}


def test_contamination_by_items_of_benchmarks(tmp_path: Path) -> None:
    """All texts of a record count, at any depth; other files of the same name are noticed."""
    question = " ".join(f"word{number}" for number in range(13))
    choice = " ".join(f"choice{number}" for number in range(14))
    texts = [f"Before. {question.upper()} after", f"So {choice}.", "a few words", text(1)]
    bench = tmp_path / "bench.jsonl"
    item = {"id": 7, "q": question, "choices": [choice, "a few words"]}
    bench.write_text(json.dumps(item) + "\n", encoding="utf-8")
    knobs = {"contamination": {"against": [str(bench)]}}
    cleaned, documents = kept(small(tmp_path, texts, ["held out"], **knobs))
    assert places(documents) == numbered(3, 4) + numbered(1, split="v")
    assert cleaned.dropped == {"contamination": 2}
    assert list(cleaned.report.notes) == ["n-grams of evaluation documents"]
    bench.write_text(json.dumps(item | {"q": "other"}) + "\n", encoding="utf-8")
    _, documents = kept(small(tmp_path, texts, ["held out"], **knobs))
    assert places(documents) == numbered(1, 3, 4) + numbered(1, split="v")
    bench.write_text("{\n", encoding="utf-8")
    with pytest.raises(WrongInput, match=r"bench\.jsonl:1: broken JSON .*; mend it"):
        kept(small(tmp_path, texts, ["held out"], **knobs))


def test_contamination_counts_different_matches(tmp_path: Path) -> None:
    question = " ".join(f"word{number}" for number in range(20))
    texts = [
        " ".join(question.split()[:13]) + " and so on",
        " x ".join([" ".join(question.split()[:13])] * 2),
        " ".join(question.split()[:14]),
        "yes",
        "word1",
    ]
    assert stays(tmp_path, texts, [question, "Yes"], contamination={"matches": 2})[:3] == numbered(
        1, 2, 5
    )


def test_a_copy_of_what_repeats_itself_is_contaminated_whatever_matches_is(tmp_path: Path) -> None:
    """A refrain has few different n-grams, and many in all."""
    refrain = "row row row your boat " * 12
    texts = [f"{refrain}gently", text(1), f"{text(2)} and then {refrain}"]
    for matches in (1, 5, 12, 60):
        found = stays(tmp_path, texts, [f"{refrain}gently"], contamination={"matches": matches})
        assert found[:-1] == numbered(2) + numbered(3) * (matches > 5), matches


def test_contamination_by_held_out_documents(tmp_path: Path) -> None:
    texts = [text(number) for number in range(40)]
    made = small(tmp_path, texts + [f"again: {copied}" for copied in texts], contamination={})
    shares = Shares.of(made.data)
    held = {
        number
        for number in range(1, 81)
        if shares.split("train", f"t.jsonl:{number}") == "validation"
    }
    gone = {
        number for number in range(1, 81) if number not in held and ((number + 39) % 80) + 1 in held
    }
    assert gone
    assert held
    assert places(kept(made)[1]) == numbered(
        *(number for number in range(1, 81) if number not in gone)
    )


def test_a_validation_document_that_was_dropped_contaminates_nothing(tmp_path: Path) -> None:
    question = " ".join(f"word{number}" for number in range(20))
    train = [f"{question} and more", "something else that is long enough"]
    assert stays(
        tmp_path,
        train,
        [question + "!" * 300, "a good question of our own"],
        max_chars=250,
        contamination={},
    ) == [*numbered(1, 2), "v.jsonl:2"]


def test_pieces_of_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.data.raw.store.GROUP_BYTES", 500)
    made = small(tmp_path, [text(number % 17) for number in range(40)], exact=True)
    cleaned, documents = kept(made)
    raw = open_raw(made)
    found = [
        doc_id
        for piece in pieces(raw, "train")
        for table in cleaned.tables(piece, read_range(raw.folder, piece))
        for doc_id in table["doc_id"].to_pylist()
    ]
    assert found == places(documents) == numbered(*range(1, 18))


def test_damaged_fates_are_refused(tmp_path: Path) -> None:
    made = small(tmp_path, ["a", "a"], exact=True)
    cleaned, _ = kept(made)
    assert cleaned.folder is not None
    raw = open_raw(made)
    (task,) = pieces(raw, "train")
    next(iter(cleaned.folder.iterdir())).write_bytes(b"")
    with pytest.raises(
        WrongInput, match=r"train-00000.npy is missing or damaged; run `ingot prepare --again`"
    ):
        list(cleaned.tables(task, read_range(raw.folder, task)))


def test_damaged_raw_documents_are_refused(tmp_path: Path) -> None:
    made = small(tmp_path, ["a", "a"], exact=True)
    path = made.folder.raw / "train-00000.parquet"
    size = path.stat().st_size
    path.write_bytes(b"\0" * size)
    with pytest.raises(
        WrongInput, match=r"train-00000.parquet is damaged .* run `ingot ingest --again`"
    ):
        kept(made)


def latest_survives(rows: Columns) -> Columns:
    """A planted fault: the last of equal documents stays."""
    last = duplicates.firsts(rows["high"][::-1], rows["low"][::-1])[::-1]
    return sorted_by(drop_rows(rows["number"][~last]), "number")


def test_the_wrong_survivor_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_later", latest_survives)
    assert stays(tmp_path, ["one", "two", "One"], exact=True) != numbered(1, 2)


def test_forgotten_verification_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were candidates taken for duplicates, texts below the threshold would go."""
    texts = ["a b c d e f g h i", "a b c d e f g h j"]
    monkeypatch.setattr(
        fuzzy, "cluster", lambda members, groups, similarity: (members.numbers * 0, 0)
    )
    assert stays(
        tmp_path, texts, fuzzy={"similarity": 0.80001, "ngram": 1, "permutations": 1024}
    ) != numbered(1, 2)
