"""Preferences, pairs and labelled texts as sources: every format gives the same documents, and what
does not fit is told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.raw.store import open_raw
from ingot.data.sources.local_files import STDLIB
from tests.data.small import recipe
from tests.data.test_ingest_chats import found, write, write_table
from tests.lazy import require

KNOBS: dict[str, dict[str, Any]] = {
    "preference": {"objective__kind": "dpo"},
    "pair": {"objective__kind": "seq2seq"},
    "labelled": {"objective__kind": "classify", "objective__labels": ["bad", "good"]},
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "preference": [
        {"prompt": f"Name metal {number}.", "chosen": "Kupfer\n金", "rejected": '"wood"'}
        for number in range(3)
    ],
    "pair": [{"source": f"long, text\n{number}", "target": "short"} for number in range(3)],
    "labelled": [
        {"text": f'"text" {number}', "label": label}
        for number, label in enumerate(("good", "bad", "1"))
    ],
}


def of(kind: str, root: Path, *sources: Any, **knobs: Any) -> Recipe:
    return recipe(root, *sources, **{**KNOBS[kind], **knobs})


@pytest.mark.parametrize("kind", list(ROWS))
@pytest.mark.parametrize("format", ["jsonl", "json", "parquet", "arrow", "csv"])
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str, format: str) -> None:
    made = of(kind, tmp_path, write(tmp_path / f"a.{format}", ROWS[kind]))
    ingest(made)
    wanted: dict[str, list[Any]] = {
        "preference": [
            {
                "prompt": [{"role": "user", "content": row.get("prompt")}],
                "chosen": [{"role": "assistant", "content": row.get("chosen")}],
                "rejected": [{"role": "assistant", "content": row.get("rejected")}],
            }
            for row in ROWS[kind]
        ],
        "pair": ROWS["pair"],
        "labelled": [
            {"text": row.get("text"), "label": label}
            for row, label in zip(ROWS[kind], (1, 0, 1), strict=True)
        ],
    }
    assert found(made) == wanted[kind]
    source = open_raw(made).splits["train"][0]
    assert (source.kind, source.documents, source.labels) == (kind, 3, made.labels)


def test_integer_labels_of_tables(tmp_path: Path) -> None:
    made = of(
        "labelled",
        tmp_path,
        write(tmp_path / "a.parquet", [{"sentence": "x", "idx": 7, "label": 1}]),
    )
    with pytest.raises(
        WrongInput,
        match=(
            r"a\.parquet has no column `text`; it has sentence, idx, label: set `columns` of this"
            r" source, such as \{text: YOURS"
        ),
    ):
        ingest(made)
    for knobs in ({"text": "sentence"}, {"columns": {"text": "sentence"}}):
        made = of("labelled", tmp_path, {"source": str(tmp_path / "a.parquet"), **knobs})
        ingest(made)
        assert found(made) == [{"text": "x", "label": 1}]


@pytest.mark.parametrize("source", ["a.parquet", "a.arrow", "hf:set"])
def test_numbers_go_by_the_names_that_the_data_set_has(tmp_path: Path, source: str) -> None:
    """`datasets` keeps them beside the table, and the hub in the card."""
    numbers, names = [{"text": "awful", "class": 0}, {"text": "great", "class": 1}], ["bad", "good"]
    if source == "hf:set":
        require("datasets", reason="datasets is not installed")
        (tmp_path / "set").mkdir()
        write(tmp_path / "set" / "train.jsonl", numbers)
        features = [{"name": "text", "dtype": "string"}, {"name": "class", "dtype": {
            "class_label": {"names": dict(zip("01", names, strict=True))}}}]  # fmt: skip
        card = {"dataset_info": {"features": features}}
        (tmp_path / "set" / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
        source = f"hf:{tmp_path}/set"
    else:
        features = {"class": {"names": names, "_type": "ClassLabel"}}
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        table = pa.Table.from_pylist(numbers).replace_schema_metadata(about)
        source = str(write_table(tmp_path / source, table))
    settings = {"source": source, "columns": {"label": "class"}}
    made = of("labelled", tmp_path, settings, objective__labels=["good", "bad"])
    ingest(made)
    assert found(made) == [{"text": "awful", "label": 1}, {"text": "great", "label": 0}]


@pytest.mark.parametrize(("ending", "separator"), [("tsv", "\t"), ("csv", ",")])
def test_a_table_without_a_header(tmp_path: Path, ending: str, separator: str) -> None:
    lines = [
        separator.join(fields)
        for fields in (
            ("a fine film", "1"),
            ("bad", "0"),
            ("one field",),
            ("a", "b", "c"),
            ("x", "7"),
        )
    ]
    path = tmp_path / f"a.{ending}"
    path.write_text("\n".join(lines), encoding="utf-8")
    made = of("labelled", tmp_path, {"source": str(path), "names": ["text", "label"]})
    ingest(made)
    assert found(made) == [{"text": "a fine film", "label": 1}, {"text": "bad", "label": 0}]
    source = open_raw(made).splits["train"][0]
    assert source.bad == {"broken row": 2, "label outside objective.labels": 1}
    assert source.examples[0].endswith(f"a.{ending}:3: broken row (1 fields, `names` has 2)")
    assert source.examples[2].endswith(
        "label outside objective.labels (`label` is '7', the labels are bad, good)"
    )
    with pytest.raises(
        WrongInput, match=r"a\.[ct]sv has no column `text` and `label`; it has a fine film, 1"
    ):
        ingest(of("labelled", tmp_path, path))


def test_names_are_for_tables_alone_and_good_for_texts_too(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("one\t1\ntwo\t2\n")
    ingest(texts := recipe(tmp_path, {"source": str(tmp_path / "a.tsv"), "names": ["text", "x"]}))
    assert open_raw(texts).splits["train"][0].documents == 2
    with pytest.raises(
        WrongInput,
        match=(
            r"data\.train\[0\]\.names is for CSV and TSV without a header line, and .* holds jsonl"
            r" \(a\.jsonl\); remove it"
        ),
    ):
        ingest(
            of(
                "pair",
                tmp_path,
                {
                    "source": str(write(tmp_path / "a.jsonl", ROWS["pair"])),
                    "names": ["source", "target"],
                },
            )
        )


@pytest.mark.parametrize(
    ("kind", "words"),
    [("preference", "preferences"), ("pair", "pairs"), ("labelled", "labelled texts")],
)
def test_texts_are_no_such_documents(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(
        WrongInput,
        match=rf"holds text \(.*\), and objective\.kind=.* trains on {words}; give JSONL",
    ):
        ingest(of(kind, tmp_path, STDLIB))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "preference",
            r"has no preference \(layout auto\) in its columns a, b: set `columns`",
        ),
        (
            "pair",
            (
                r"has no column `source` and `target`; it has a, b: set `columns` of this source,"
                r" such as \{source: YOURS, target: YOURS\}"
            ),
        ),
        ("labelled", r"has no column `text` and `label`; it has a, b"),
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_missing_columns_are_named(tmp_path: Path, kind: str, told: str, format: str) -> None:
    with pytest.raises(WrongInput, match=told):
        ingest(of(kind, tmp_path, write(tmp_path / f"a.{format}", [{"a": "x", "b": "y"}])))


def test_bad_ones_are_counted_or_stop(tmp_path: Path) -> None:
    rows = [
        *ROWS["preference"],
        {"prompt": "q", "chosen": "x", "rejected": "x"},
        {"prompt": "q", "chosen": "x", "rejected": ""},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    ingest(made := of("preference", tmp_path, path))
    assert open_raw(made).splits["train"][0].bad == {
        "chosen and rejected are equal": 1,
        "empty rejected": 1,
    }
    with pytest.raises(
        WrongInput,
        match=r"a\.jsonl:4: chosen and rejected are equal; mend it, or set data\.on_bad=skip",
    ):
        ingest(of("preference", tmp_path, path, data__on_bad="stop"))


def test_a_rare_class_0_where_names_count_from_1_stops_whatever_may_be_skipped(
    tmp_path: Path,
) -> None:
    rows = [{"text": f"film {number}", "label": number % 5 or 1} for number in range(40)]
    file = write(tmp_path / "a.jsonl", [*rows, {"text": "the worst", "label": 0}])
    stars = ["1", "2", "3", "4", "5"]
    with pytest.raises(WrongInput, match=r"a\.jsonl:41: label outside .* list the labels 0 to 4"):
        ingest(of("labelled", tmp_path, file, objective__labels=stars))


def test_hh_texts_as_chats(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "x"}]
    )
    ingest(
        made := recipe(
            tmp_path, {"source": str(path), "layout": "hh", "text": "chosen"}, objective__kind="sft"
        )
    )
    assert found(made) == [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    ]


def test_other_documents_or_labels_are_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{**ROWS["labelled"][0], **ROWS["pair"][0]}])
    ingest(of("labelled", tmp_path, path))
    with pytest.raises(
        WrongInput,
        match=r"was ingested as labelled, objective\.kind=seq2seq takes pair; run `ingot ingest`",
    ):
        open_raw(of("pair", tmp_path, path))
    with pytest.raises(
        WrongInput,
        match=(
            r"was ingested with the labels bad, good, objective\.labels is good, bad; run `ingot"
            r" ingest`"
        ),
    ):
        open_raw(
            recipe(tmp_path, path, objective__kind="classify", objective__labels=["good", "bad"])
        )


def test_real_aeslc_and_sst2(test_data: Path, tmp_path: Path) -> None:
    """All of them, of the counts that their README files give."""
    columns = {"source": "email_body", "target": "subject_line"}
    for name, count in (("train", 14_436), ("dev", 1_960), ("test", 1_906)):
        path = test_data / "aeslc" / f"{name}.jsonl"
        ingest(made := of("pair", tmp_path / name, {"source": str(path), "columns": columns}))
        source = open_raw(made).splits["train"][0]
        assert (source.documents, source.bad) == (count, {})
    for name, count in (("train", 6_920), ("dev", 872), ("test", 1_821)):
        path = test_data / "sst2" / f"{name}.tsv"
        ingest(
            made := of(
                "labelled",
                tmp_path / f"sst2-{name}",
                {"source": str(path), "names": ["text", "label"]},
            )
        )
        source = open_raw(made).splits["train"][0]
        assert (source.documents, source.bad) == (count, {})
        lines = [
            line.rsplit("\t", 1) for line in path.read_text(encoding="utf-8").split("\n") if line
        ]
        assert found(made) == [{"text": text, "label": int(label)} for text, label in lines]
