"""megatron-core's own reader opens what is written here, and what its builder writes is read
here.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.columns.column import (
    Column,
    ColumnWriter,
    bin_path,
    column_prefix,
    idx_path,
    token_dtype,
)
from ingot.data.columns.manifest import read_prepared
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.packing.tables import pack
from ingot.data.prepare import prepare
from ingot.data.raw.ranges import RawRange
from ingot.data.sources.megatron import token_groups
from ingot.data.sources.source_file import SourceFile
from ingot.data.splits import Shares
from ingot.data.tokenizing.encode import existing_records
from ingot.models.native.attention import document_mask
from ingot.tokenizers.tokenizer import Tokenizer
from tests.data.batches.test_rows import write
from tests.data.small import recipe, sentences, write_jsonl
from tests.exhaustive import examples
from tests.lazy import lazy, require
from tests.tokenizers.small import bpe_files

require(
    "megatron.core",
    reason="megatron-core is not installed; pip install 'ingot[dev]'",
)
indexed = lazy("megatron.core.datasets.indexed_dataset")
RECORDS = st.lists(st.lists(st.integers(0, 65_499), max_size=20), max_size=20).filter(any)


def build(
    prefix: Path,
    documents: list[list[list[int]]],
    dtype: type[np.number],
    *,
    multimodal: bool = False,
) -> Path:
    """Documents of sequences of tokens, as megatron-core writes them."""
    builder = indexed.IndexedDatasetBuilder(
        str(bin_path(prefix)), dtype=dtype, multimodal=multimodal
    )
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(idx_path(prefix)))
    return prefix


@settings(max_examples=examples(15, 40))
@given(records=RECORDS, vocab_size=st.sampled_from([65_499, 65_500, 128_256]))
def test_theirs_opens_ours(
    tmp_path_factory: pytest.TempPathFactory, records: list[list[int]], vocab_size: int
) -> None:
    prefix = tmp_path_factory.mktemp("ours") / "train.tokens-00000"
    records = [[min(token, vocab_size - 1) for token in record] for record in records]
    with ColumnWriter(prefix, token_dtype(vocab_size)) as writer:
        for record in records:
            writer.append(np.array(record, np.int32), np.array([len(record)]))
    theirs = indexed.IndexedDataset(str(prefix))
    assert len(theirs) == len(records)
    assert theirs.index.dtype == indexed.DType.optimal_dtype(vocab_size)
    assert [theirs[record].tolist() for record in range(len(theirs))] == records
    assert theirs.document_indices.tolist() == list(range(len(records) + 1))
    assert (
        idx_path(
            build(
                prefix.with_name("same"),
                [[record] for record in records],
                indexed.DType.optimal_dtype(vocab_size),
            )
        ).read_bytes()
        == idx_path(prefix).read_bytes()
    )


def test_theirs_opens_every_column(tmp_path: Path) -> None:
    """Tokens, masks and tables of rows alike."""
    documents, masks = [[1, 2, 3], [4, 5], [6, 7, 8, 9]], [[0, 1, 1], [0, 1], [0, 0, 0, 1]]
    folder = write(tmp_path, [[documents[:2], documents[2:]]], masks=[[masks[:2], masks[2:]]])
    pack(
        folder,
        read_prepared(folder),
        8,
        "best_fit",
        LocalEngine(1),
        Progress("pack", None, "MB", quiet=True),
    )
    for column in ("tokens", "mask", "rows-best_fit-8"):
        for number in (0, 1):
            prefix = column_prefix(folder, "train", column, number)
            ours, theirs = Column(prefix), indexed.IndexedDataset(str(prefix))
            assert (len(ours), ours.dtype) == (len(theirs), np.dtype(theirs.index.dtype))
            assert all(np.array_equal(ours[record], theirs[record]) for record in range(len(ours)))
    assert Column(column_prefix(folder, "train", "mask", 0)).dtype == np.uint8


@settings(max_examples=examples(15, 40))
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 60_000), max_size=9), max_size=4), min_size=1, max_size=9
    ).filter(lambda value: any(map(any, value))),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
def test_ours_opens_theirs(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[list[int]]],
    dtype: type[np.number],
) -> None:
    """Several sequences a document too: a record is a sequence, as it is for megatron-core's own
    data sets.
    """
    column = Column(build(tmp_path_factory.mktemp("theirs") / "x", documents, dtype))
    column.prove()
    sequences = [sequence for document in documents for sequence in document]
    assert column.dtype == dtype
    assert [column[record].tolist() for record in range(len(column))] == sequences
    assert column.document_lengths().tolist() == [len(document) for document in documents]
    assert column.slice(0, column.elements).tolist() == [
        token for sequence in sequences for token in sequence
    ]


def test_rows_are_those_of_theirs(tmp_path: Path) -> None:
    """Documents in the order that its data set shuffled them into: token by token the same rows,
    labels, losses and positions.
    """
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    split = pytest.importorskip("megatron.core.datasets.utils").Split.train
    random, end, length = np.random.default_rng(0), 0, 32
    documents = [
        [*random.integers(1, 99, size).tolist(), end] for size in random.integers(1, 90, 60)
    ]
    prefix = build(tmp_path / "theirs", [[document] for document in documents], np.uint16)
    tokenizer = SimpleNamespace(
        eod=end, pad=-1, vocab_size=100, unique_identifiers={}, special_tokens_dict={}
    )
    config = gpt.GPTDatasetConfig(
        random_seed=1,
        sequence_length=length,
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=True,
        path_to_cache=str(tmp_path / "cache"),
    )
    column = gpt.GPTDataset.build_low_level_dataset(str(prefix), config)
    theirs = gpt.GPTDataset(
        column, str(prefix), np.arange(len(column), dtype=np.int32), None, split, config
    )
    order = theirs.document_index.tolist()
    assert order != sorted(order)
    rows = open_rows(
        write(tmp_path / "ours", [[[documents[number] for number in order]]]),
        "train",
        length,
        pad_last=False,
    )
    assert len(theirs) == len(rows)
    for place in range(len(theirs)):
        sample, row = theirs[place], rows.row(int(theirs.shuffle_index[place]))
        assert sample["tokens"].tolist() == row.tokens.tolist()
        assert (
            torch.where(sample["loss_mask"] > 0, sample["labels"], IGNORE).tolist()
            == row.labels.tolist()
        )
        assert sample["position_ids"].tolist() == row.positions.tolist()
        assert torch.equal(
            ~sample["attention_mask"][0], document_mask(torch.from_numpy(row.segments)[None])[0, 0]
        )


def test_images_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"x\.idx has a mode for each sequence \(Megatron's multimodal layout\), which cannot be"
            r" read; use text columns"
        ),
    ):
        Column(build(tmp_path / "x", [[[1, 2], [3]]], np.int32, multimodal=True))


def test_documents_that_were_not_ended_are_refused(tmp_path: Path) -> None:
    """megatron-core asserts the same."""
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    builder.add_item(torch.tensor([1, 2]))
    builder.finalize(str(tmp_path / "x.idx"))
    with pytest.raises(WrongInput, match=r"x\.idx contradicts itself"):
        Column(tmp_path / "x")
    with pytest.raises(AssertionError):
        indexed.IndexedDataset(str(tmp_path / "x"))


def test_groups_of_existing_columns_are_bounded_in_bytes_and_documents(tmp_path: Path) -> None:
    """A document may consist of several sequences: it is never cut."""
    sizes = [3, 3, 3, 50, 1, 1, 1, 1, 1, 9]
    sequences = [[[7] * (size // 2), [7] * (size - size // 2)] for size in sizes]
    prefix = build(tmp_path / "x", sequences, np.uint16)
    file = SourceFile(str(prefix), "x", "megatron", {})
    _, groups = token_groups(file, group_bytes=2 * 9, group_documents=4)
    assert sum(count for count, _ in groups) == len(sizes)
    place = 0
    for count, size in groups:
        assert size == 2 * sum(sizes[place : place + count])
        assert count == 1 or (size <= 18 and count <= 4)
        place += count
    assert len(groups) < len(sizes)


def test_a_range_begins_where_the_documents_before_it_end(tmp_path: Path) -> None:
    """Of several sequences each."""
    documents = [[[1], [2, 3]], [[4]], [[5, 6], [7], [8]]]
    prefix, tokenizer = build(tmp_path / "x", documents, np.uint16), Tokenizer(bpe_files())

    def of(within: int, count: int) -> list[list[int]]:
        task = RawRange("train", 0, 0, "tokens", str(prefix), "", 0, 1, within, within, count, 0)
        found = existing_records(task, Shares(None, 1.0), tokenizer, Counter())
        return [
            records.record(number)["tokens"].tolist()
            for _, records in found
            for number in range(len(records.counts))
        ]

    whole = [list(itertools.chain(*document)) for document in documents]
    assert of(0, 3) == whole
    assert [of(number, 1) for number in range(3)] == [[one] for one in whole]


def test_what_is_prepared_has_the_names_that_their_tools_expect(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", sentences(60))
    named = recipe(tmp_path, source, data__megatron_prefix="web")
    ingest(named)
    outcome = prepare(named)
    columns, folder = named.folder.columns, named.folder.megatron
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"web.{split}-00000_text_document.{ending}"
        for split in ("train", "validation")
        for ending in ("bin", "idx")
    )
    for split in ("train", "validation"):
        ours = Column(column_prefix(columns, split, "tokens", 0))
        theirs = indexed.IndexedDataset(str(folder / f"web.{split}-00000_text_document"))
        assert [theirs[number].tolist() for number in range(len(theirs))] == [
            ours[number].tolist() for number in range(len(ours))
        ]
    assert "data/megatron/web.train-00000_text_document.bin" in outcome.files
    assert all(path.stat().st_nlink == 2 for path in folder.iterdir()), "nothing is copied"
    plain = recipe(tmp_path, source)
    assert prepare(plain).outputs == outcome.outputs
    assert not folder.exists()


def test_other_ids_of_the_same_lengths_are_another_column(tmp_path: Path) -> None:
    """As of a corpus that was tokenised again with another id at the end of each document."""

    def digest(end: int) -> str:
        prefix = build(tmp_path / "x", [[[5, 6, end]], [[7, end]]], np.uint16)
        os.utime(prefix.with_suffix(".bin"), ns=(end, end))
        return token_groups(SourceFile(str(prefix), "x", "megatron", {}), 100, 100)[0]

    assert digest(3) == digest(3) != digest(2)
