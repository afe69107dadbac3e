"""Cuts the raw documents into ranges and makes one part of columns of each.

A range is a run of row groups of one raw part and follows from the data alone. So any number of processes writes the same
files, and a part that is finished stays finished when the rest is run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.fingerprint import fingerprint
from ingot.base.markers import entry_of, problems, read_marker, write_marker
from ingot.data.columns import ColumnWriter, bin_path, idx_path, token_dtype
from ingot.data.documents import Shares
from ingot.data.manifest import DIGESTS, Part
from ingot.data.raw import Raw, Text, read_group
from ingot.data.records import encode_documents, identity
from ingot.data.sources import Split
from ingot.tokenizers.tokenizer import Tokenizer

SMALLEST_BYTES = 4_000_000
LARGEST_BYTES = 512_000_000
RANGES = 64
BATCH_BYTES = 1_000_000
DONE = "done"


@dataclass(frozen=True)
class Range:
    """Row groups `first` to `last` of one raw part, which become part `number` of the columns."""

    split: Split
    source: int
    number: int
    path: str
    sha256: str
    first: int
    last: int
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


@dataclass(frozen=True)
class Made:
    """What a range became: a part for each split that some of its documents belong to, and the files that hold them."""

    range: Range
    parts: dict[Split, Part]
    files: list[dict[str, Any]]


def ranges(raw: Raw) -> list[Range]:
    """The ranges, in order. Their size grows with the data, so that there are neither too few nor millions of them."""
    target = min(max(raw.bytes // RANGES, SMALLEST_BYTES), LARGEST_BYTES)
    found: list[Range] = []
    for split, sources in raw.splits.items():
        number = 0
        for source, read in enumerate(sources):
            for part in read.parts:
                for first, last, size in _runs([size for _, size in part.groups], target):
                    found.append(Range(split, source, number, part.path, part.sha256, first, last, size))
                    number += 1
    return found


def _runs(sizes: Sequence[int], target: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive runs of at least `target` bytes, the last one of what is left: (first, last + 1, bytes)."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total >= target or index == len(sizes) - 1:
            yield first, index + 1, total
            first, total = index + 1, 0


def range_inputs(task: Range, tokenizer_identity: str, shares: Shares) -> str:
    """Fingerprint of everything that decides about the part that a range becomes."""
    return fingerprint({**asdict(task), **asdict(shares), **identity(tokenizer_identity)})


def finished(columns: Path, task: Range, inputs: str) -> Made | None:
    """What an earlier run made of this range from the same inputs; None when it has to be made."""
    marker = read_marker(columns, f"{DONE}/{task.name}.json")
    if marker is None or marker.get("inputs") != inputs or problems(columns, marker, checksums=False):
        return None
    return Made(task, {split: Part(**part) for split, part in marker["parts"].items()}, marker["files"])


def make_part(
    raw: Path, columns: Path, task: Range, tokenizer: Tokenizer, shares: Shares, advance: Callable[[int], None] = lambda _: None
) -> Made:
    """Tokenise one range and write its columns. `advance` is called with the bytes of text that each batch had.

    Raises:
        WrongInput: the raw part is damaged.
        Failed: the disk is full.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    outputs: dict[Split, _Output] = {}
    with contextlib.ExitStack() as stack:
        for split, texts in _batches(raw / task.path, task, shares):
            if split not in outputs:
                writer = stack.enter_context(ColumnWriter(columns / f"{split}.tokens-{task.number:05d}", dtype))
                outputs[split] = _Output(writer)
            advance(outputs[split].append(tokenizer, texts))
    parts = {split: output.part() for split, output in outputs.items()}
    names = [path.name for part in parts.values() for path in (bin_path(columns / part.path), idx_path(columns / part.path))]
    payload = {"inputs": range_inputs(task, tokenizer.identity(), shares), "parts": {split: asdict(part) for split, part in parts.items()}}
    marker = write_marker(columns, f"{DONE}/{task.name}.json", payload, [entry_of(columns, name) for name in names])
    return Made(task, parts, marker["files"])


class _Output:
    """The column of one split that is being written, and what is counted beside it."""

    def __init__(self, writer: ColumnWriter) -> None:
        self._writer = writer
        self._bytes = self._digest = 0

    def append(self, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
        flat, lengths = encode_documents(tokenizer, texts)
        self._writer.append(flat, lengths)
        size = 0
        for data in (text.encode() for text in texts):
            # Summed, so that the set of texts counts and not where its parts are cut.
            self._digest += int.from_bytes(hashlib.sha256(data).digest())
            size += len(data)
        self._bytes += size
        return size

    def part(self) -> Part:
        return Part(self._writer.prefix.name, self._writer.records, self._writer.elements, self._bytes, f"{self._digest % DIGESTS:064x}")


def _batches(path: Path, task: Range, shares: Shares) -> Iterator[tuple[Split, list[str]]]:
    """The texts of a range by split, in their order within each, about a megabyte at a time."""
    waiting: dict[Split, list[str]] = {}
    sizes: dict[Split, int] = {}
    for doc_id, text in _texts(path, task):
        split = shares.split(task.split, doc_id)
        if split is None:
            continue
        waiting.setdefault(split, []).append(text)
        sizes[split] = sizes.get(split, 0) + len(text)
        if sizes[split] >= BATCH_BYTES:
            yield split, waiting.pop(split)
            sizes[split] = 0
    yield from waiting.items()


def _texts(path: Path, task: Range) -> Iterator[Text]:
    return itertools.chain.from_iterable(read_group(path, group) for group in range(task.first, task.last))
