"""What evaluation reads from the prepared columns directly: pairs of adjacent tokens, and how many
bytes of each document are predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.data.batches.rows import IGNORE, Rows
from ingot.data.columns.column import Column
from ingot.data.columns.manifest import PreparedData
from ingot.data.columns.reader import PartReader, opening
from ingot.data.splits import Split
from ingot.evaluate.bigram import TokenPairs
from ingot.evaluate.sources import source_of_rows
from ingot.tokenizers.tokenizer import Tokenizer

CHUNK_TOKENS = 2**20


def open_columns(folder: Path, prepared: PreparedData, split: Split) -> list[Column]:
    """All parts of a split's tokens, in the order of its rows."""
    sources, resolver = prepared.splits[split], opening(folder, prepared, split)
    return [
        PartReader(resolver, source.parts, ()).column("tokens", index)
        for source in sources
        for index in range(len(source.parts))
    ]


def pairs(columns: Iterable[Column]) -> Iterator[TokenPairs]:
    """Tokens with the token after each, within one document: the same pairs that rows have as input
    and label.
    """
    for column in columns:
        for begin in range(0, column.elements, CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS + 1, column.elements)
            tokens = column.slice(begin, end).astype(np.int64)
            inside = np.ones(len(tokens) - 1, np.bool_)
            inside[np.array(column.starts(begin + 1, end), np.int64) - begin - 1] = False
            yield tokens[:-1][inside], tokens[1:][inside]


def document_bytes(
    columns: Iterable[Column], tokenizer: Tokenizer, total: int | None, first: int | None = None
) -> npt.NDArray[np.float64]:
    """How many bytes are predicted of each document that has tokens, [documents], or of the `first`
    so many: all but those of its first token, of which a token that begins each text has none. The
    sizes of whole documents are scaled to sum to `total` if that is given.

    Decoded from the tokens, so that the raw documents need not be searched for the few that are
    held out. Exact for a lossless tokenizer; the bytes that a normalising one loses are distributed
    over the documents.
    """
    records = itertools.islice((record for column in columns for record in _records(column)), first)
    whole, given = list[int](), list[int]()
    for record in records:
        whole.append(len(tokenizer.decode(record).encode()))
        given.append(len(tokenizer.decode(record[:1]).encode()))
    scale = 1.0 if total is None else total / max(sum(whole), 1)
    # A part of a character decodes to more bytes than it is.
    predicted: npt.NDArray[np.float64] = np.maximum(np.subtract(whole, given), 0) * scale
    return predicted


def target_bytes(
    rows: Rows, tokenizer: Tokenizer, count: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """The size in bytes of the decoded targets of each document in the first `count` rows, and the
    number of its source, both [documents]; for rows of whole documents. Special tokens count as 0.
    """
    sizes, of = list[int](), list[int]()
    for index, source in enumerate(source_of_rows(rows, count).tolist()):
        row = rows.row(index)
        for segment in range(1, int(row.segments.max()) + 1):
            labels = row.labels[(row.segments == segment) & (row.labels != IGNORE)]
            sizes.append(len(tokenizer.decode(labels).encode()))
            of.append(source)
    return np.array(sizes, np.float64), np.array(of, np.int64)


def _records(column: Column) -> Iterator[npt.NDArray[np.int64]]:
    return (column[record] for record in range(len(column)) if len(column[record]))
