"""Records out of existing Megatron columns: their ids as they are, dealt over the splits like any
other documents.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.data.columns import Column, bin_path
from ingot.data.documents import Shares
from ingot.data.ranges import Range
from ingot.data.records import Records
from ingot.data.sources import Split
from ingot.tokenizers.tokenizer import Tokenizer

BATCH_TOKENS = 500_000

Ids = npt.NDArray[np.int32]


def taken_records(
    task: Range, shares: Shares, tokenizer: Tokenizer
) -> Iterator[tuple[Split, Records]]:
    """The documents of a range, about a megabyte at a time. Bytes are counted for held-out ones, by
    decoding them.

    Raises:
        WrongInput: an id is not in the vocabulary, so that another tokenizer made these columns.
    """
    waiting: dict[Split, list[Ids]] = {}
    tokens: Counter[Split] = Counter()
    for doc_id, ids in _documents(task):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise WrongInput(
                f"{bin_path(Path(task.path))}: document {doc_id} has the id {int(ids.max()):,}, the"
                f" tokenizer only {tokenizer.vocab_size:,} ids; another one made these columns: set"
                " tokenizer.source to it"
            )
        split = shares.split(task.split, doc_id)
        if split is None:
            continue
        waiting.setdefault(split, []).append(ids)
        tokens[split] += len(ids)
        if tokens[split] >= BATCH_TOKENS:
            yield split, _records(waiting.pop(split), split, tokenizer)
            tokens[split] = 0
    for split, batch in waiting.items():
        yield split, _records(batch, split, tokenizer)


def _documents(task: Range) -> Iterator[tuple[str, Ids]]:
    """(doc_id, ids); a document is all sequences that Megatron's document index puts together."""
    column, name = Column(Path(task.path)), Path(task.path).name
    counts = column.document_lengths()
    first = int(counts[: task.within].sum())
    for number, count in enumerate(
        counts[task.within : task.within + task.documents].tolist(), start=task.within + 1
    ):
        yield (
            f"{name}:{number}",
            column.slice(column.begin(first), column.begin(first + count)).astype(np.int32),
        )
        first += count


def _records(documents: list[Ids], split: Split, tokenizer: Tokenizer) -> Records:
    size = (
        sum(len(tokenizer.decode(ids).encode()) for ids in documents)
        if split == "validation"
        else 0
    )
    digest = sum(int.from_bytes(hashlib.sha256(ids.tobytes()).digest()) for ids in documents)
    return Records(
        {"tokens": np.concatenate(documents)},
        {"tokens": np.array([len(ids) for ids in documents], np.int64)},
        size,
        digest,
    )
