"""Row tables: nothing lost, nothing twice, no row too long, little padding; labels as for each
document by itself.
"""

from __future__ import annotations

import itertools
from collections import Counter as Tally
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.data.batches.rows import IGNORE, Rows, open_rows
from ingot.data.batches.samples import RowArrays
from ingot.data.columns.column import Column, bin_path, column_prefix
from ingot.data.columns.manifest import read_prepared
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.planning import best_fit
from ingot.data.packing.tables import RowTables, pack
from tests.data.batches.test_rows import Documents, write
from tests.exhaustive import examples
from tests.markers import changed

QUIET = Progress("pack", None, "MB", quiet=True)


def planned(folder: Path, seq_len: int, how: str = "best_fit", workers: int = 1) -> RowTables:
    return pack(folder, read_prepared(folder), seq_len, how, LocalEngine(workers), QUIET)


def numbered(lengths: list[int]) -> Documents:
    """Documents whose tokens are all different."""
    first = np.cumsum([1, *lengths]).tolist()
    return [
        list(range(begin, begin + length)) for begin, length in zip(first, lengths, strict=False)
    ]


def all_rows(rows: Rows) -> RowArrays:
    return rows.batch(range(len(rows)))


def slowly(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing as one would do it by hand: what lies in each bin."""
    bins: list[list[int]] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, bin in enumerate(bins) if sum(bin) + size <= capacity]
        # Of equally full ones that which was filled last, which therefore always is put at the end.
        chosen = (
            bins.pop(max(fitting, key=lambda number: (sum(bins[number]), number)))
            if fitting
            else []
        )
        bins.append([*chosen, size])
    return bins


@settings(max_examples=examples(66, 200))
@given(capacity=st.integers(1, 40), data=st.data())
def test_best_fit_is_best_fit(capacity: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit(np.array(sizes, np.int64), capacity)
    filled = [
        sorted(size for size, bin in zip(sizes, bins, strict=True) if bin == number)
        for number in range(bins.max() + 1 if sizes else 0)
    ]
    assert sorted(filled) == sorted(sorted(bin) for bin in slowly(sizes, capacity))


@settings(max_examples=examples(33, 100))
@given(
    parts=st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=3),
    seq_len=st.integers(1, 12),
    how=st.sampled_from(["best_fit", "none"]),
)
def test_every_target_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], seq_len: int, how: str
) -> None:
    """Whatever is split and wherever it goes: of each token but a document's first, one prediction,
    made after the token before it.
    """
    documents = numbered([length for part in parts for length in part])
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    folder = write(
        tmp_path_factory.mktemp("packed"),
        [[documents[first:last] for first, last in itertools.pairwise(ends)]],
    )
    packed = planned(folder, seq_len, how)
    pairs = Tally(
        (before, after) for document in documents for before, after in itertools.pairwise(document)
    )
    if not pairs:
        with pytest.raises(WrongInput, match=f"not one row of data.seq_len={seq_len}"):
            open_rows(folder, "train", seq_len, pack=how, pad_last=False)
        return
    rows = open_rows(folder, "train", seq_len, pack=how, pad_last=False)
    made = all_rows(rows)
    target = made.labels != IGNORE
    assert (
        Tally(zip(made.tokens[target].tolist(), made.labels[target].tolist(), strict=True)) == pairs
    )
    assert packed.total.tokens == int((made.segments > 0).sum()) == rows.tokens - rows.left_out
    assert packed.total.untrained == sum(len(document) < 2 for document in documents)
    assert packed.total.split == sum(len(document) > seq_len + 1 for document in documents)
    check_form(made, one_each=how == "none")


def check_form(rows: RowArrays, *, one_each: bool) -> None:
    """Padding only at the end, segments 1, 2, ..., positions from 0 in each, labels nowhere
    else.
    """
    for tokens, labels, positions, segments in zip(*rows, strict=True):
        live = int((segments > 0).sum())
        assert segments[:live].tolist() == sorted(segments[:live].tolist())
        assert set(segments[:live]) == set(range(1, segments.max() + 1))
        assert not (segments[live:] | tokens[live:]).any()
        assert not positions[live:].any()
        assert set(labels[live:]) <= {IGNORE}
        for segment in range(1, segments.max() + 1):
            assert positions[segments == segment].tolist() == list(
                range(int((segments == segment).sum()))
            )
        assert not one_each or segments.max() <= 1


def test_an_example_by_hand(tmp_path: Path) -> None:
    folder = write(tmp_path, [[[[10, 11, 12], [20, 21, 22, 23, 24, 25, 26], [30], [40, 41]]]])
    packed = planned(folder, 4)
    # 20..26 is split into 4 and 3 tokens; 30 teaches nothing; 10..12 and 24..26 leave no room for
    # 40, 41.
    assert packed.rows == {"train": [[4]]}
    made = all_rows(open_rows(folder, "train", 4, pack="best_fit", pad_last=False))
    assert made.tokens.tolist() == [
        [10, 11, 12, 0],
        [20, 21, 22, 23],
        [24, 25, 26, 0],
        [40, 41, 0, 0],
    ]
    assert made.labels.tolist() == [
        [11, 12, IGNORE, IGNORE],
        [21, 22, 23, 24],
        [25, 26, IGNORE, IGNORE],
        [41, IGNORE, IGNORE, IGNORE],
    ]
    assert (
        str(packed)
        == "4 rows of 4 tokens, 25.00% of it padding; 1 records were split over several rows; 1"
        " records were left out: nothing in them is trained"
    )


def test_masks_and_truncation(tmp_path: Path) -> None:
    """Only where the mask says so; what is too long loses its end, and is left out where nothing
    trained remains.
    """
    documents = [
        [1, 2, 3],
        [11, 12, 13, 14, 15, 16, 17],
        [21, 22, 23, 24, 25, 26],
        [31, 32],
        [41, 42, 43, 44, 45, 46],
    ]
    masks = [[0, 1, 1], [0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0], [1, 0, 0, 0, 0, 1]]
    folder = write(tmp_path, [[documents]], masks=[[masks]])
    packed = planned(folder, 5)
    assert (
        packed.total.rows,
        packed.total.truncated,
        packed.total.lost,
        packed.total.untrained,
        packed.total.split,
    ) == (2, 1, 2, 1, 0)
    made = all_rows(open_rows(folder, "train", 5, pack="best_fit", pad_last=False))
    assert made.tokens.tolist() == [[1, 2, 3, 0, 0], [11, 12, 13, 14, 15]]
    assert made.labels.tolist() == [
        [2, 3, IGNORE, IGNORE, IGNORE],
        [IGNORE, 13, 14, IGNORE, IGNORE],
    ]
    assert (
        "1 records were longer and cut to their first 5 tokens; 2 records were left out: what"
        " remained of them has nothing that is trained" in str(packed)
    )
    with pytest.raises(WrongInput, match=r"holds chats, which data\.pack=cut would cut apart"):
        open_rows(folder, "train", 5, pad_last=False)


@settings(max_examples=examples(25, 60))
@given(data=st.data(), seq_len=st.integers(1, 10))
def test_masked_rows_against_each_record_by_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seq_len: int
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=15))
    documents = numbered(lengths)
    masks = [
        data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        for length in lengths
    ]
    folder = write(tmp_path_factory.mktemp("masked"), [[documents]], masks=[[masks]])
    packed = planned(folder, seq_len)
    expected, lost, untrained = Tally[tuple[int, int]](), 0, 0
    for document, mask in zip(documents, masks, strict=True):
        pairs = [
            (document[at], document[at + 1], at) for at in range(len(document) - 1) if mask[at + 1]
        ]
        kept = [(before, after) for before, after, at in pairs if at + 1 < seq_len]
        expected.update(kept)
        lost, untrained = lost + (bool(pairs) and not kept), untrained + (not pairs)
    assert (packed.total.lost, packed.total.untrained) == (lost, untrained)
    if expected:
        made = all_rows(open_rows(folder, "train", seq_len, pack="best_fit", pad_last=False))
        target = made.labels != IGNORE
        assert (
            Tally(zip(made.tokens[target].tolist(), made.labels[target].tolist(), strict=True))
            == expected
        )
        check_form(made, one_each=False)


def test_little_padding_and_the_same_rows_from_any_engine(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 3000).astype(int).clip(2, 2000).tolist()
    sources = [
        [
            [[1] * length for length in lengths[:1500]],
            [[2] * length for length in lengths[1500:2500]],
        ],
        [[[3] * length for length in lengths[2500:]]],
    ]
    one, other = write(tmp_path / "one", sources), write(tmp_path / "other", sources)
    packed = planned(one, 256)
    assert packed == planned(other, 256, workers=2)
    assert packed.padding < 0.01
    tables = sorted(path.name for path in one.glob("*.rows-*"))
    assert len(tables) == 6
    assert all((one / name).read_bytes() == (other / name).read_bytes() for name in tables)


def test_windows_are_planned_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.data.packing.planning.WINDOW", 2)
    folder = write(tmp_path, [[[[1] * 3, [2] * 3, [3] * 2, [4] * 2]]])
    planned(folder, 5)
    made = all_rows(open_rows(folder, "train", 5, pack="best_fit", pad_last=False))
    assert [sorted(set(row)) for row in made.tokens.tolist()] == [[0, 1], [0, 2], [0, 3, 4]]


def test_rows_of_another_plan_are_not_taken(tmp_path: Path) -> None:
    folder = write(tmp_path, [[numbered([3, 4, 5])]])
    planned(folder, 8)
    changed(folder, "rows-best_fit-8.json", plan="of another version")
    with pytest.raises(WrongInput, match=r"holds no rows of data\.seq_len=8"):
        open_rows(folder, "train", 8, pack="best_fit", pad_last=False)


def test_tables_are_kept_and_swept(tmp_path: Path) -> None:
    """Planned once; another length beside it; all of them gone when the data are others; a torn one
    made again.
    """
    folder = write(tmp_path, [[numbered([3, 4, 5])]])
    first = planned(folder, 8)
    table = bin_path(column_prefix(folder, "train", "rows-best_fit-8", 0))
    made = table.stat().st_mtime_ns
    assert planned(folder, 8) == first
    assert table.stat().st_mtime_ns == made
    planned(folder, 6)
    assert table.exists()
    table.write_bytes(table.read_bytes()[:-8])
    with pytest.raises(
        WrongInput,
        match=(
            r"rows-best_fit-8-00000.bin has \d+ bytes, \d+ were written; run `ingot prepare --again`"
        ),
    ):
        open_rows(folder, "train", 8, pack="best_fit", pad_last=False)
    assert planned(folder, 8) == first
    (folder / ".train.rows-best_fit-8-00000.bin.partial-99999999").write_bytes(
        b"left by a killed run"
    )
    changed(folder, "manifest.json", data={"train": "other", "validation": "other"})
    with pytest.raises(
        WrongInput,
        match=(
            r"holds no rows of data\.seq_len=8, data\.pack=best_fit; run `ingot prepare` with this"
            r" recipe"
        ),
    ):
        open_rows(folder, "train", 8, pack="best_fit", pad_last=False)
    (folder / "rows-best_fit-8.json").write_text("{")
    with pytest.raises(WrongInput, match=r"holds no rows of .*; run `ingot prepare --again`"):
        open_rows(folder, "train", 8, pack="best_fit", pad_last=False)
    planned(folder, 5)
    assert {path.name for path in folder.glob("*rows-*")} == {
        "rows-best_fit-5.json",
        "train.rows-best_fit-5-00000.bin",
        "train.rows-best_fit-5-00000.idx",
    }


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    """Of the right size and wrong in itself: no row is made of tokens that are not there."""
    folder = write(tmp_path, [[numbered([3, 4, 5])]])
    planned(folder, 8)
    table = bin_path(column_prefix(folder, "train", "rows-best_fit-8", 0))
    whole = np.frombuffer(table.read_bytes(), np.int64)
    assert len(Column(column_prefix(folder, "train", "rows-best_fit-8", 0))) == 2
    for place, value in ((0, 99), (0, -1), (1, -2), (1, 3), (2, 40), (2, 2**62), (2, 0), (2, -3)):
        changed = whole.copy()
        changed[place] = value
        table.write_bytes(changed.tobytes())
        with pytest.raises(
            WrongInput, match=r"train\.(tokens|rows-best_fit-8)-00000.*run `ingot prepare --again`"
        ):
            open_rows(folder, "train", 8, pack="best_fit", pad_last=False).row(0)
