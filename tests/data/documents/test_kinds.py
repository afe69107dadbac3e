"""Pairs and labelled texts: what comes in, and what is bad about the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.sections.data import SourceSettings
from ingot.data.cleaning.documents import read_documents
from ingot.data.documents.examples import (
    Labelled,
    Pair,
    from_labelled,
    from_pair,
    to_labelled,
    to_pair,
)
from ingot.data.documents.kinds import (
    DocumentExtractor,
    plain_text,
    said,
    with_texts,
)
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.data.splits import Shares, chosen
from tests.data.small import recipe, sentences, write_jsonl

LABELS = ["negative", "positive"]


def label(value: Any, labels: list[str] = LABELS, classes: Sequence[str] = ()) -> int | str:
    """The number of a label, or why it has none."""
    found = to_labelled(1, {"text": "x", "label": value}, {}, labels, classes)
    return (
        f"{found.reason} ({found.detail})"
        if isinstance(found, BadRecord)
        else from_labelled(found.text).label
    )


def test_pairs() -> None:
    assert to_pair(1, {"source": "a", "target": "b", "x": 1}, {}) == ParsedDocument(
        1, '{"source":"a","target":"b"}'
    )
    assert to_pair(
        1, {"body": "ä", "line": "b"}, {"source": "body", "target": "line"}
    ) == ParsedDocument(1, '{"source":"ä","target":"b"}')
    with pytest.raises(
        WrongInput,
        match=(
            "renames text, which a pair does not have; write USUAL: YOURS, where USUAL is one of"
            " source, target"
        ),
    ):
        to_pair(1, {}, {"text": "x"})


@pytest.mark.parametrize("said", [{"text": "body"}, {"columns": {"text": "body"}}])
def test_texts_are_read_from_the_column_that_was_named_either_way(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "not this one", "body": "this one"}\n' * 9)
    small = recipe(tmp_path, {"source": str(file), **said})
    ingest(small)
    assert {document.text for document in read_documents(small, "train")} == {"this one"}


def test_a_text_has_no_other_column() -> None:
    source = SourceSettings(source="a.jsonl", columns={"texts": "body"})
    with pytest.raises(WrongInput, match=r"renames texts, which a text does not have.*of text$"):
        DocumentExtractor.for_source(source, "text")


@pytest.mark.parametrize("documents", ["text", "masked", "pair", "labelled"])
def test_what_has_one_form_takes_no_layout_of_chats(documents: Any) -> None:
    source = SourceSettings(source="a.jsonl", layout="alpaca")
    with pytest.raises(WrongInput, match=r"a\.jsonl: layout alpaca is how chats .* are written"):
        DocumentExtractor.for_source(source, documents)
    assert DocumentExtractor.for_source(source, "chat").layout == "alpaca"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"source": "a", "target": " "}, "empty `target`"),
        ({"source": "", "target": "b"}, "empty `source`"),
        ({"source": None, "target": "b"}, "null `source`"),
        ({"source": ["a"], "target": "b"}, "`source` is not text"),
        ({"source": "a"}, "no `target`"),
        ({"source": "\ud800", "target": "b"}, "invalid UTF-8"),
    ],
)
def test_bad_pairs(record: dict[str, Any], reason: str) -> None:
    found = to_pair(3, record, {})
    assert isinstance(found, BadRecord)
    assert (found.row, found.reason) == (3, reason)
    assert found.keys == (("source",) if reason == "no `target`" else ())


@pytest.mark.parametrize(
    ("value", "number"), [("negative", 0), ("positive", 1), (0, 0), (1, 1), ("0", 0), ("1", 1)]
)
def test_labels_by_name_or_number(value: Any, number: int) -> None:
    assert label(value) == number


@pytest.mark.parametrize(
    "value", [2, -1, "2", "-1", "Positive", " positive", "1.0", 1.0, True, "", "²", "9" * 5000, [1]]
)
def test_labels_outside(value: Any) -> None:
    told = str(label(value))
    assert told.startswith("label outside objective.labels (`label` is ")
    assert str(value)[:40] in told
    assert "the labels are negative, positive" in told


def test_null_and_missing_labels() -> None:
    assert label(None) == "null `label` ()"
    missing = to_labelled(1, {"text": "x", "y": 1}, {}, LABELS)
    assert isinstance(missing, BadRecord)
    assert (missing.reason, missing.keys) == ("no `label`", ("text", "y"))


def test_a_number_that_is_a_name_is_a_name() -> None:
    """Stars from 1 to 3 are not shifted by one, whether the file has numbers or texts."""
    stars = ["1", "2", "3"]
    assert [label(value, stars) for value in (1, "1", 3, "3")] == [0, 0, 2, 2]
    for value in (4, "-1"):
        told = str(label(value, stars))
        assert told.startswith(f"label outside objective.labels (`label` is '{value}', the labels")
        assert told.endswith("numbers are names here)")


def test_a_data_set_that_counts_from_0_is_not_read_by_names_that_are_other_numbers() -> None:
    """A rare class 0 alone would be skipped, and all others be shifted by one."""
    for number, names in (
        (0, ["1", "2", "3"]),
        ("0", ["1", "2", "3"]),
        (2, ["-1", "0", "1"]),
        (0, ["1.0", "2.0"]),
        (0, ["1", "2", "none"]),
    ):
        found = to_labelled(1, {"text": "x", "label": number}, {}, names)
        assert isinstance(found, BadRecord)
        assert found.stops
        assert f"counts its classes from 0, list the labels 0 to {len(names) - 1}; if" in str(found)
    for other in (4, -1, "4"):
        found = to_labelled(1, {"text": "x", "label": other}, {}, ["1", "2", "3"])
        assert isinstance(found, BadRecord)
        assert not found.stops, "a number that counts no class"


def test_numbers_have_the_names_that_the_file_has_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which are often in another order, or fewer or more."""

    def numbers(labels: list[str], classes: list[str]) -> list[int | str]:
        return [label(value, labels, classes) for value in range(3)]

    outside = "label outside objective.labels (`label` is '{}'{}, the labels are {})"
    even = ", which the data set calls even"
    assert numbers(["pos", "neg"], ["neg", "pos"])[:2] == [1, 0]
    assert label("pos", ["pos", "neg"], ["neg", "pos"]) == 0
    assert label(-1, ["pos", "neg"], ["neg", "pos"]) == outside.format(-1, "", "pos, neg")
    assert numbers(["neg", "pos"], ["neg", "even", "pos"]) == [
        0,
        outside.format(1, even, "neg, pos"),
        1,
    ]
    assert numbers(["1", "2", "3"], ["3", "2", "1"]) == [2, 1, 0]
    assert capsys.readouterr().err == ""
    assert numbers(["1", "2", "3"], ["1 star", "2 stars", "3 stars"]) == [0, 1, 2]
    assert capsys.readouterr().err == (
        "warning: the data set calls its classes 1 star, 2 stars, 3 stars, objective.labels"
        " 1, 2, 3: its numbers are taken in this order, 0 for 1\n"
    ), "said once"


def test_numbers_go_by_order_where_names_are_but_spelled_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless a name of both stands elsewhere, which says that the order is another one."""
    classes = ["negative", "even", "positive"]
    spelled = ["neg", "even", "pos"]
    assert [label(value, spelled, classes) for value in range(3)] == [0, 1, 2]
    told = capsys.readouterr().err
    assert told.startswith("warning: the data set calls its classes negative, even, positive, ")
    assert [label(value, classes, classes) for value in range(3)] == [0, 1, 2]
    assert label(1, ["even", "neg", "pos"], classes) == 0
    assert "is '0', which the data set calls negative, the labels" in str(
        label(0, ["even", "neg", "pos"], classes)
    )
    assert capsys.readouterr().err == ""


def test_other_columns() -> None:
    found = to_labelled(
        1, {"sentence": "x", "class": "positive"}, {"text": "sentence", "label": "class"}, LABELS
    )
    assert found == ParsedDocument(1, '{"text":"x","label":1}')
    assert isinstance(to_labelled(1, {"text": "", "label": 0}, {}, LABELS), BadRecord)


def test_what_is_said_and_changing_it() -> None:
    assert said("pair", '{"source":"a","target":"b"}') == ["a", "b"]
    assert plain_text("labelled", '{"text":"a","label":1}') == "a"
    assert from_pair(
        with_texts(
            "pair", '{"source":"a","target":"b"}', lambda texts: [text * 2 for text in texts]
        )
    ) == Pair("aa", "bb")
    assert from_labelled(
        with_texts("labelled", '{"text":"a","label":1}', lambda texts: ["c"])
    ) == Labelled("c", 1)
    assert with_texts("text", "a", lambda texts: ["c"]) == "c"
    for read in (from_pair, from_labelled):
        for stored in ("", "x", "[]", "{}", '{"messages":[]}'):
            with pytest.raises(
                WrongInput, match=r"as `ingot ingest` stores it; run `ingot ingest --again`"
            ):
                read(stored)


@given(
    st.dictionaries(
        st.sampled_from(["source", "target", "text", "label"]),
        st.none() | st.text(max_size=3) | st.integers() | st.floats(),
        max_size=4,
    )
)
def test_any_record_is_taken_or_bad(record: dict[str, Any]) -> None:
    for found in (to_pair(1, record, {}), to_labelled(1, record, {}, LABELS)):
        assert isinstance(found, BadRecord) or json.loads(found.text)


def test_shares_are_kept_and_nest() -> None:
    ids = [f"a.jsonl:{row}" for row in range(20_000)]
    tenth = {doc_id for doc_id in ids if chosen(doc_id, "validation", 0.1)}
    half = {doc_id for doc_id in ids if chosen(doc_id, "validation", 0.5)}
    assert abs(len(tenth) - 2000) < 200
    assert tenth < half, "a larger share keeps what a smaller one had"
    other = {doc_id for doc_id in ids if chosen(doc_id, "fraction", 0.1)}
    assert abs(len(tenth & other) - 200) < 70, "the choices are independent of each other"


def test_chosen_is_never_changed() -> None:
    """Held-out documents must stay held out in every later version."""
    assert [row for row in range(60) if chosen(f"a.jsonl:{row}", "validation", 0.1)] == [
        7,
        8,
        39,
        48,
        53,
        56,
        57,
    ]


def test_all_or_nothing() -> None:
    shares = Shares(None, 1.0)
    assert {shares.split("train", str(row)) for row in range(100)} == {"train"}
    assert {Shares(0.5, 1e-9).split("validation", str(row)) for row in range(100)} == {"validation"}
    assert {Shares(None, 1e-12).split("train", str(row)) for row in range(100)} == {None}


def test_a_group_is_held_out_as_a_whole() -> None:
    """What the pattern does not find goes alone, as it did without one."""
    shares = Shares(0.3, 1.0, r"(?:test/)?(\w+)/")
    names = [f"{at}{folder}{n}/x.py:{row}" for at in ("", "test/") for folder in "abc" for n in
             range(30) for row in range(2)]  # fmt: skip
    held = {name for name in names if shares.split("train", name) == "validation"}
    folders = {name.removeprefix("test/").partition("/")[0] for name in held}
    assert 10 < len(folders) < 45
    assert held == {
        name for name in names if name.removeprefix("test/").partition("/")[0] in folders
    }
    alone = [f"{n}.py:0" for n in range(200)]
    assert [shares.split("train", name) for name in alone] == [
        Shares(0.3, 1.0).split("train", name) for name in alone
    ]
    whole, optional = Shares(0.3, 1.0, r"\w/"), Shares(0.3, 1.0, r"\w/(y)?")
    assert len({whole.split("train", f"a/{n}:0") for n in range(50)}) == 1
    assert len({optional.split("train", f"a/{n}:0") for n in range(50)}) == 2


def test_what_is_held_out_of_a_source_does_not_depend_on_those_before_it(tmp_path: Path) -> None:
    """Whose files of the same names make its own names longer."""
    for name in ("web", "wiki", "news"):
        write_jsonl(tmp_path / name / "part.jsonl", [f"{name} {text}" for text in sentences(60)])

    def held(*sources: str) -> dict[str, list[str]]:
        small = recipe(tmp_path, *(tmp_path / name for name in sources))
        ingest(small)
        prepare(small)
        texts = [document.text for document in read_documents(small, "validation")]
        return {name: [one for one in texts if one.startswith(name)] for name in sources}

    before = held("wiki", "news")
    assert before["wiki"]
    assert before["news"]
    after = held("web", "wiki", "news")
    assert {name: after[name] for name in before} == held("news", "wiki") == before
    files = Shares(0.3, 1.0, r"[^:]+")
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        assert files.split("train", f"{name}:0") == files.split("train", f"{name}~0123abcd:0")


def test_splits_by_other_groups_are_others() -> None:
    assert Shares(0.3, 1.0).identity() != Shares(0.3, 1.0, "a").identity()


def test_documents_of_each_split(tmp_path: Path) -> None:
    small = recipe(tmp_path, write_jsonl(tmp_path / "a.jsonl", sentences(100)), data__fraction=0.5)
    ingest(small)
    train, held = (list(read_documents(small, split)) for split in ("train", "validation"))
    assert not {document.doc_id for document in train} & {document.doc_id for document in held}
    assert (10 < len(held) < 32, 25 < len(train) < 55) == (True, True)
    rows = [int(document.doc_id.rpartition(":")[2]) for document in train]
    assert rows == sorted(rows)
    assert all(
        document.text == sentences(1, row - 1)[0] for row, document in zip(rows, train, strict=True)
    )


def test_before_ingest(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match="no ingested documents; run `ingot ingest` with this recipe first"
    ):
        list(read_documents(recipe(tmp_path, "a.jsonl"), "train"))
