"""Samples and their batches against a slow, obvious making of the same; which records have none;
what is cut and what stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry, entry_of
from ingot.base.progress import Progress
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Batch, Loader, fixed_batches
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import (
    ColumnPart,
    PreparedData,
    PreparedSource,
    column_dtype,
    read_prepared,
    token_columns,
    write_prepared,
)
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import RowTables, pack
from tests.exhaustive import examples

Record = dict[str, list[int]]
CLOSING = 2


def write(folder: Path, kind: Documents, sources: list[list[list[Record]]]) -> Path:
    """Columns of sources, each of parts, each of records, as `prepare` lays them down."""
    made, entries, count = [], list[FileEntry](), 0
    for number, parts in enumerate(sources):
        written = []
        for records in parts:
            sizes = {}
            for name in COLUMNS[kind]:
                prefix = column_prefix(folder, "train", name, count)
                flat = [value for record in records for value in record[name]]
                with ColumnWriter(prefix, column_dtype(name, 100)) as writer:
                    writer.append(
                        np.array(flat, np.int64),
                        np.array([len(record[name]) for record in records], np.int64),
                    )
                sizes[name] = len(flat)
                entries += [
                    entry_of(folder, path.name) for path in (bin_path(prefix), idx_path(prefix))
                ]
            written.append(
                ColumnPart(
                    count,
                    len(records),
                    sum(sizes[name] for name in token_columns(COLUMNS[kind])),
                    0,
                    "0",
                    sizes,
                )
            )
            count += 1
        made.append(
            PreparedSource(
                f"s{number}",
                1.0,
                sum(part.documents for part in written),
                sum(part.tokens for part in written),
                0,
                written,
            )
        )
    kinds = [{"name": name, "dtype": column_dtype(name, 100).name} for name in COLUMNS[kind]]
    prepared = PreparedData(
        "x",
        kinds,
        {"train": made},
        "tokenizer",
        None,
        100,
        {"train": "data"},
        {"train": "set"},
        closing=CLOSING,
        labels=["a", "b", "c"],
    )
    write_prepared(folder, prepared, {}, entries)
    return folder


def packed(folder: Path, seq_len: int, target_len: int | None = None) -> RowTables:
    return pack(
        folder,
        read_prepared(folder),
        seq_len,
        "none",
        LocalEngine(1),
        Progress("pack", None, "MB", quiet=True),
        target_len,
    )


def opened(folder: Path, kind: Documents, seq_len: int, target_len: int = 128) -> Samples:
    packed(folder, seq_len, target_len if kind == "pair" else None)
    rows = open_rows(folder, "train", seq_len, pack="none", pad_last=False, target_len=target_len)
    assert isinstance(rows, Samples)
    return rows


def kept(record: Record, seq_len: int) -> bool:
    """Whether anything can be learnt from each side of a record."""
    if "chosen" in record:
        return all(any(record[f"{name}_mask"][1:seq_len]) for name in ("chosen", "rejected"))
    return all(record[name] for name in record)


def cut(ids: list[int], most: int) -> list[int]:
    return ids if len(ids) <= most else ids[: max(most - CLOSING, 0)] + ids[-min(CLOSING, most) :]


def slowly(record: Record, seq_len: int, target_len: int) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) of each of a sample's rows, without padding."""
    if "chosen" in record:
        rows = []
        for name in ("chosen", "rejected"):
            ids, mask = record[name][:seq_len], record[f"{name}_mask"][:seq_len]
            rows.append(
                (
                    ids,
                    [
                        after if trained else IGNORE
                        for after, trained in zip(ids[1:], mask[1:], strict=True)
                    ]
                    + [IGNORE],
                )
            )
        return rows
    if "source" in record:
        return [(cut(record["source"], seq_len), cut(record["target"], target_len))]
    return [(cut(record["tokens"], seq_len), record["label"])]


def check(batch: Batch, records: list[Record | None], seq_len: int, target_len: int) -> None:
    """`records` are those of the batch; None: a dead row."""
    assert all(
        tensor.dtype == torch.int64
        for tensor in (batch.tokens, batch.labels, batch.positions, batch.segments, batch.rows)
    )
    rows = [
        row
        for record in records
        for row in (
            slowly(record, seq_len, target_len)
            if record
            else [([], [])] * (len(batch.tokens) // len(records))
        )
    ]
    assert len(rows) == len(batch.tokens)
    width = max(len(tokens) for tokens, _ in rows)
    assert batch.tokens.shape[1] == min(max(-(-width // 16), 1) * 16, seq_len), (
        "no wider than the longest, in steps of 16"
    )
    for place, (tokens, labels) in enumerate(rows):
        dead = [0] * (batch.tokens.shape[1] - len(tokens))
        assert batch.tokens[place].tolist() == tokens + dead
        assert batch.positions[place].tolist() == list(range(len(tokens))) + dead
        assert batch.segments[place].tolist() == [1] * len(tokens) + dead
        if batch.labels.ndim == 1:
            assert batch.labels[place] == (labels[0] if labels else IGNORE)
        else:
            assert batch.labels[place].tolist() == labels + [IGNORE] * (
                batch.labels.shape[1] - len(labels)
            )


IDS = st.lists(st.integers(1, 99), max_size=40)


@st.composite
def preferences(draw: st.DrawFn) -> Record:
    found: Record = {}
    for name in ("chosen", "rejected"):
        found[name] = draw(IDS)
        found[f"{name}_mask"] = draw(
            st.lists(st.integers(0, 1), min_size=len(found[name]), max_size=len(found[name]))
        )
    return found


PAIRS = st.fixed_dictionaries({"source": IDS, "target": IDS})
LABELLED = st.fixed_dictionaries(
    {"tokens": IDS, "label": st.lists(st.integers(0, 2), min_size=1, max_size=1)}
)
KINDS: list[tuple[Documents, Any]] = [
    ("preference", preferences()),
    ("pair", PAIRS),
    ("labelled", LABELLED),
]


@pytest.mark.parametrize(("kind", "record"), KINDS, ids=[kind for kind, _ in KINDS])
@settings(max_examples=examples(12, 40), deadline=None)
@given(data=st.data())
def test_batches_are_made_record_by_record(
    tmp_path_factory: pytest.TempPathFactory, kind: Documents, record: Any, data: st.DataObject
) -> None:
    sources = data.draw(
        st.lists(st.lists(st.lists(record, max_size=5), max_size=3), min_size=1, max_size=3)
    )
    seq_len, target_len, micro = (
        data.draw(st.sampled_from(choice)) for choice in ((2, 9, 16, 24, 64), (1, 3, 20), (1, 2, 3))
    )
    folder = write(tmp_path_factory.mktemp("samples"), kind, sources)
    flat = [record for source in sources for part in source for record in part]
    alive = [record for record in flat if kept(record, seq_len)]
    if not alive:
        with pytest.raises(
            WrongInput,
            match=f"train documents none can be learnt from with data.seq_len={seq_len}; raise it",
        ):
            opened(folder, kind, seq_len, target_len)
        return
    rows = opened(folder, kind, seq_len, target_len)
    assert rows.sizes == [
        sum(kept(record, seq_len) for part in source for record in part) for source in sources
    ]
    ids = data.draw(st.permutations(range(len(alive))))
    batches = list(fixed_batches(rows, ids, micro))
    numbers = [number for batch in batches for number in batch.rows.tolist()]
    assert numbers == [*ids, *[-1] * (len(batches) * micro - len(ids))]
    for batch in batches:
        check(
            batch,
            [alive[number] if number >= 0 else None for number in batch.rows.tolist()],
            seq_len,
            target_len,
        )
    tokens = sum(len(record[name]) for record in flat for name in token_columns(list(record)))
    most = {"target": target_len}
    inside = sum(
        min(len(record[name]), most.get(name, seq_len))
        for record in alive
        for name in token_columns(list(record))
    )
    assert (rows.tokens, rows.left_out, rows.documents) == (tokens, tokens - inside, len(flat))


def test_an_example_by_hand(tmp_path: Path) -> None:
    record = {
        "chosen": [5, 6, 7, 8],
        "chosen_mask": [0, 0, 1, 1],
        "rejected": [5, 6, 9],
        "rejected_mask": [0, 0, 1],
    }
    batch = next(
        fixed_batches(opened(write(tmp_path, "preference", [[[record]]]), "preference", 64), [0], 2)
    )
    assert batch.tokens.shape == (4, 16)
    assert batch.tokens[:2, :5].tolist() == [[5, 6, 7, 8, 0], [5, 6, 9, 0, 0]]
    assert batch.labels[:2, :5].tolist() == [
        [IGNORE, 7, 8, IGNORE, IGNORE],
        [IGNORE, 9, IGNORE, IGNORE, IGNORE],
    ]
    assert not batch.segments[2:].any()
    assert (batch.labels[2:] == IGNORE).all()
    assert batch.rows.tolist() == [0, -1]
    assert batch.text_tokens == 7, "padding is no text"


def test_the_closing_ids_stay_where_a_text_is_cut(tmp_path: Path) -> None:
    """[SEP] or </s> ends what an encoder reads, however long it was."""
    rows = opened(
        write(
            tmp_path,
            "pair",
            [[[{"source": [1, *range(10, 40), 98, 99], "target": [*range(50, 60), 98, 99]}]]],
        ),
        "pair",
        6,
        4,
    )
    batch = next(fixed_batches(rows, [0], 1))
    assert batch.tokens[0].tolist() == [1, 10, 11, 12, 98, 99]
    assert batch.labels[0].tolist() == [50, 51, 98, 99]
    assert next(fixed_batches(rows, [0], 3)).text_tokens == 6 + 4, "source and target"


COUNTED: list[tuple[Documents, list[Record], dict[str, int], str]] = [
    (
        "preference",
        [
            {
                "chosen": [1] * 9,
                "chosen_mask": [0] * 3 + [1] * 6,
                "rejected": [1, 2],
                "rejected_mask": [0, 1],
            },  # cut
            {
                "chosen": [1] * 9,
                "chosen_mask": [0] * 8 + [1],
                "rejected": [1, 2],
                "rejected_mask": [0, 1],
            },  # one side lost
            {
                "chosen": [1, 2],
                "chosen_mask": [0, 1],
                "rejected": [1, 2],
                "rejected_mask": [1, 0],
            },  # the first id is never predicted
            {"chosen": [1, 2], "chosen_mask": [0, 1], "rejected": [1, 2], "rejected_mask": [0, 1]},
        ],
        {"rows": 2, "tokens": 6 + 2 + 2 + 2, "truncated": 1, "lost": 1, "untrained": 1},
        (
            "2 preferences of up to 6 tokens a side; 1 records were longer and cut; 1 records were"
            " left out: what remained of them has nothing that is trained"
        ),
    ),
    (
        "pair",
        [
            {"source": [1] * 9, "target": [1]},
            {"source": [1], "target": [1] * 9},
            {"source": [1], "target": []},
            {"source": [1], "target": [1]},
        ],
        {"rows": 3, "tokens": 6 + 1 + 1 + 4 + 2, "truncated": 2, "lost": 0, "untrained": 1},
        (
            "3 pairs of up to 6 tokens in the source and 4 in the target; 2 records were longer and"
            " cut; 1 records were left out: nothing in them is trained"
        ),
    ),
    (
        "labelled",
        [
            {"tokens": [1] * 9, "label": [0]},
            {"tokens": [], "label": [0]},
            {"tokens": [1] * 6, "label": [0]},
        ],
        {"rows": 2, "tokens": 12, "truncated": 1, "lost": 0, "untrained": 1},
        "2 labelled texts of up to 6 tokens; 1 records were longer and cut",
    ),
]


@pytest.mark.parametrize(
    ("kind", "records", "counts", "words"), COUNTED, ids=[kind for kind, *_ in COUNTED]
)
@pytest.mark.parametrize("window", [1, 2, 65_536])
def test_what_is_left_out_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Documents,
    records: list[Record],
    counts: dict[str, int],
    words: str,
    window: int,
) -> None:
    monkeypatch.setattr("ingot.data.packing.planning.WINDOW", window)
    made = packed(write(tmp_path, kind, [[records]]), 6, 4 if kind == "pair" else None)
    assert vars(made.total) == {"split": 0, "too_long": 0, **counts}
    assert str(made).startswith(words)
    assert made.padding == 0.0


def test_documents_of_two_sources_are_two(tmp_path: Path) -> None:
    """Though both are the first record of a first part."""
    (body,) = COLUMNS["masked"]
    rows = opened(write(tmp_path, "masked", [[[{body: [1] * 9}]], [[{body: [2]}]]]), "masked", 6)
    assert rows.documents_of(4).tolist() == [0, 0, 0, 1]


def test_records_behind_a_window_are_those_that_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.data.packing.planning.WINDOW", 2)
    records = [{"tokens": [number], "label": [0]} for number in range(1, 6)]
    rows = opened(write(tmp_path, "labelled", [[records]]), "labelled", 6)
    assert rows.fields(range(5)).tokens[:, 0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("prompts", [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [0, 1, 2, 3, 4, 5] * 2])
def test_a_prompt_meets_no_other_answer_to_itself(prompts: list[int], tmp_path: Path) -> None:
    """Which stands beside its own, or in the other half of the file."""
    records = [
        {"answer": [1 + prompt, 50 + number], "answer_mask": [0, 1], "label": [1]}
        for number, prompt in enumerate(prompts)
    ]
    rows = opened(write(tmp_path, "rated", [[records]]), "rated", 8)
    (batch,) = fixed_batches(rows, range(12), 12)
    met = (batch.tokens[1::2, 1] - 50).tolist()
    assert sorted(met) == list(range(12))
    assert all(prompts[one] != prompts[other] for one, other in enumerate(met))


def test_another_length_of_targets_is_planned_anew(tmp_path: Path) -> None:
    folder = write(tmp_path, "pair", [[[{"source": [1], "target": [1] * 9}]]])
    opened(folder, "pair", 16, 4)
    with pytest.raises(
        WrongInput,
        match=(
            r"holds no rows of data\.seq_len=16, data\.target_len=5, data\.pack=none; run `ingot"
            r" prepare`"
        ),
    ):
        open_rows(folder, "train", 16, pack="none", pad_last=False, target_len=5)
    with pytest.raises(
        WrongInput,
        match=(
            r"holds a pair in each record, which data\.pack=best_fit cannot put side by side; set"
            r" it to none"
        ),
    ):
        open_rows(folder, "train", 16, pack="best_fit", pad_last=False)


def ten(tmp_path: Path) -> Samples:
    return opened(
        write(
            tmp_path,
            "labelled",
            [[[{"tokens": [number] * number, "label": [number % 3]} for number in range(1, 11)]]],
        ),
        "labelled",
        8,
    )


def test_ranks_deal_the_same_global_batch(tmp_path: Path) -> None:
    rows, order = ten(tmp_path), SampleOrder([10], 3)
    for world in (1, 2, 4):
        dealt = []
        for rank in range(world):
            loader = Loader(rows, order, BatchPlan(8, min(3, 8 // world), world), rank)
            dealt += [
                number for batch in loader.step(5) for number in batch.rows.tolist() if number >= 0
            ]
            loader.close()
        assert dealt == order.rows(40, 8).tolist()


def test_rows_beyond_the_last_and_damaged_tables(tmp_path: Path) -> None:
    rows = ten(tmp_path)
    for number in (-1, 10):
        with pytest.raises(IndexError, match=f"row {number} of 10"):
            rows.fields([number])
    prefix = column_prefix(tmp_path, "train", "rows-none-8", 0)
    with ColumnWriter(prefix, np.dtype("int64")) as writer:
        writer.append(
            np.array([[number + 5, 0, 1] for number in range(10)]).ravel(), np.full(10, 3)
        )
    rows = open_rows(tmp_path, "train", 8, pack="none", pad_last=False)  # type: ignore[assignment]
    assert rows.fields([0]).tokens[0, 0] == 6
    with pytest.raises(
        WrongInput,
        match=(
            r"rows-none-8-00000\.bin plans row 7 of what is not there; it is damaged, run `ingot"
            r" prepare --again`"
        ),
    ):
        rows.fields([7])


def test_a_part_that_is_not_the_manifests(tmp_path: Path) -> None:
    rows = ten(tmp_path)
    with ColumnWriter(column_prefix(tmp_path, "train", "label", 0), np.dtype("uint8")) as writer:
        writer.append(np.zeros(10), np.full(10, 1))
    with pytest.raises(
        WrongInput,
        match=r"label-00000\.bin holds uint8, manifest\.json says int32; run `ingot prepare --again`",
    ):
        rows.fields([0])


def test_batches_move_with_their_rows(tmp_path: Path) -> None:
    def shapes(batches: Iterator[Batch]) -> list[tuple[int, ...]]:
        batch = next(batches).to("meta")
        return [
            tuple(tensor.shape)
            for tensor in (batch.tokens, batch.labels, batch.positions, batch.segments, batch.rows)
        ]

    assert shapes(fixed_batches(ten(tmp_path), [0, 1], 4)) == [(4, 8), (4,), (4, 8), (4, 8), (4,)]
    assert Batch(*[torch.zeros(1, 2)] * 4).rows.tolist() == [], "nobody has to give the numbers"
