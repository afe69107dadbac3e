"""The tokenisation stage of `prepare`: one part of columns from each range of raw documents."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.base.errors import WrongInput
from ingot.base.markers import entry_of, fingerprint, problems, read_marker, write_marker
from ingot.base.storage import link_file
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.data.cleaning.arrays import Hashes
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path
from ingot.data.columns.manifest import DIGESTS, ColumnPart, column_dtype
from ingot.data.documents.kinds import plain_text
from ingot.data.engines.engine import Advance
from ingot.data.raw.ranges import RawRange, read_range
from ingot.data.splits import Shares, Split, chosen
from ingot.data.tokenizing.copies import LARGEST, HashSample, encoded, up_to
from ingot.data.tokenizing.encode import TokenRecords, encode_records, existing_records, identity
from ingot.tokenizers.backend import split_batch
from ingot.tokenizers.encoders import REFERENCE, BatchEncoder, open_encoder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

BATCH_CHARACTERS = 1_000_000
DONE = "done"
TOLD = ("parts", "redone", "refused", "refusal", "rendered", "outside", "sample")
"""What the marker of a range tells of it beside its files."""
COMPARED = 1e-3
"""The share of documents whose ids are compared with the reference encoder's, whatever the
encoder.
"""


@dataclass(frozen=True)
class TokenisedRange:
    """The result of a range: a part for each split that some of its documents belong to, and the
    files of the parts.

    `redone` names the first document for which the fast encoder's ids differed from the
    reference's; the whole part was then encoded by the reference. `refused` counts chats that the
    template refuses, `refusal` describes the first of them; `rendered` counts chats that were
    rendered one by one; `outside` counts documents that `data.fraction` leaves out of every split.
    """

    range: RawRange
    parts: dict[Split, ColumnPart]
    files: list[dict[str, Any]]
    redone: str | None = None
    refused: int = 0
    refusal: str | None = None
    rendered: int = 0
    outside: int = 0
    sample: HashSample = field(default_factory=HashSample)


@dataclass(frozen=True)
class TokeniseStage:
    """The stage: from ranges to parts. Encodes with `encoder`, and compares one document in a
    thousand with the reference.
    """

    raw: Path
    columns: Path
    tokenizer: Path
    encoder: str
    documents: Documents
    prefix: str
    """Prepended to the source of every pair."""
    shares: Shares
    cleaned: CleaningResult
    skip_bad: bool
    inputs: str
    """Fingerprint of what determines every part besides its range."""
    compared: int = 0
    """Characters at the beginning of every range that are also compared with the reference, whose
    encoder was chosen on other documents.
    """
    largest_hash: int = LARGEST
    """The bound of the sample of documents whose hashes are kept."""
    whole: bool = False
    """Whether each chat is one record, as `encode_records` makes it."""

    def open(self) -> Callable[[RawRange, Advance], TokenisedRange]:
        tokenizer = load_tokenizer(self.tokenizer)
        encoder = open_encoder(tokenizer, self.encoder)

        def make(task: RawRange, advance: Advance) -> TokenisedRange:
            try:
                return self._make(task, tokenizer, encoder, advance)
            except _EncoderMismatch as differs:
                return self._make(
                    task,
                    tokenizer,
                    open_encoder(tokenizer, REFERENCE),
                    lambda _: None,
                    redone=str(differs),
                )

        return make

    def _make(
        self,
        task: RawRange,
        tokenizer: Tokenizer,
        encoder: BatchEncoder,
        advance: Advance,
        redone: str | None = None,
    ) -> TokenisedRange:
        """Write the columns of one range.

        Raises:
            WrongInput: the raw part is damaged, or the chat template refuses a chat.
            Failed: the disk is full.
        """
        outputs: dict[Split, _ColumnOutput] = {}
        refused: list[str] = []
        splits: Counter[Split | None] = Counter()
        rendered = 0
        with contextlib.ExitStack() as stack:
            for split, records in self._records(task, tokenizer, encoder, advance, refused, splits):
                if split not in outputs:
                    outputs[split] = stack.enter_context(
                        _ColumnOutput(
                            self.columns, split, task.number, self.documents, tokenizer.vocab_size
                        )
                    )
                outputs[split].append(records)
                outputs[split].hashes.append(up_to(self.largest_hash, records.hashes))
                rendered += records.rendered
        parts = {split: output.part() for split, output in outputs.items()}
        hashes = {split: encoded(output.hashes) for split, output in outputs.items()}
        made = TokenisedRange(
            task,
            parts,
            [],
            redone,
            len(refused),
            refused[0] if refused else None,
            rendered,
            splits[None],
            HashSample(self.largest_hash, hashes),
        )
        told = {name: value for name, value in asdict(made).items() if name in TOLD}
        payload = {"inputs": fingerprint([asdict(task), self.inputs]), **told}
        marker = write_marker(
            self.columns,
            f"{DONE}/{task.name}.json",
            payload,
            [entry_of(self.columns, name) for output in outputs.values() for name in output.names],
        )
        return replace(made, files=marker["files"])

    def _records(
        self,
        task: RawRange,
        tokenizer: Tokenizer,
        encoder: BatchEncoder,
        advance: Advance,
        refused: list[str],
        splits: Counter[Split | None],
    ) -> Iterator[tuple[Split, TokenRecords]]:
        """The records of a range by split. Chats that the template refuses are appended to
        `refused` and left out, if the recipe allows it. `splits` counts all documents.
        """
        if task.kind == "tokens":
            for split, records in existing_records(task, self.shares, tokenizer, splits):
                yield split, records
                advance(records.tokens)
            return
        compared = 0
        for split, doc_ids, texts in self._batches(task, splits):
            if compared < self.compared and encoder.name != REFERENCE:
                compared += self._compare_plain(tokenizer, encoder, doc_ids, texts)
            try:
                records = self._encode(tokenizer, encoder, texts)
            except WrongInput:
                if not self.skip_bad:
                    raise
                doc_ids, texts = self._accepted(tokenizer, doc_ids, texts, refused)
                if not texts:
                    continue
                records = self._encode(tokenizer, encoder, texts)
            if encoder.name != REFERENCE:
                self._compare(tokenizer, doc_ids, texts, records)
            yield split, records
            advance(sum(map(len, texts)))

    def _encode(
        self, tokenizer: Tokenizer, encoder: BatchEncoder, texts: Sequence[str]
    ) -> TokenRecords:
        return encode_records(
            self.documents,
            tokenizer,
            encoder.encode_batch,
            texts,
            self.prefix,
            whole=self.whole,
        )

    def _batches(
        self, task: RawRange, splits: Counter[Split | None]
    ) -> Iterator[tuple[Split, list[str], list[str]]]:
        """(split, doc_ids, texts) of a range, in order within each split, about a megabyte at a
        time.
        """
        waiting: dict[Split, tuple[list[str], list[str]]] = {}
        sizes: dict[Split, int] = {}
        for table in self.cleaned.tables(task, read_range(self.raw, task)):
            for doc_id, text in zip(
                table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True
            ):
                split = self.shares.split(task.split, doc_id)
                splits[split] += 1
                if split is None:
                    continue
                doc_ids, texts = waiting.setdefault(split, ([], []))
                doc_ids.append(doc_id)
                texts.append(text)
                sizes[split] = sizes.get(split, 0) + len(text)
                if sizes[split] >= BATCH_CHARACTERS:
                    yield split, *waiting.pop(split)
                    sizes[split] = 0
        for split, (doc_ids, texts) in waiting.items():
            yield split, doc_ids, texts

    def _accepted(
        self, tokenizer: Tokenizer, doc_ids: Sequence[str], texts: Sequence[str], refused: list[str]
    ) -> tuple[list[str], list[str]]:
        kept_ids, kept, reference = list[str](), list[str](), open_encoder(tokenizer, REFERENCE)
        for doc_id, text in zip(doc_ids, texts, strict=True):
            try:
                self._encode(tokenizer, reference, [text])
            except WrongInput as error:
                refused.append(f"{doc_id}: {error}")
                continue
            kept_ids.append(doc_id)
            kept.append(text)
        return kept_ids, kept

    def _compare_plain(
        self,
        tokenizer: Tokenizer,
        encoder: BatchEncoder,
        doc_ids: Sequence[str],
        texts: Sequence[str],
    ) -> int:
        """Compare the first characters of the documents, as plain texts; returns how many."""
        shown, size = list[str](), 0
        for text in texts:
            shown.append(plain_text(self.documents, text)[: self.compared - size])
            size += len(shown[-1])
            if size >= self.compared:
                break
        pairs = zip(
            split_batch(encoder.encode_batch(shown)),
            split_batch(tokenizer.encode_batch(shown)),
            strict=True,
        )
        for doc_id, (found, wanted) in zip(doc_ids, pairs, strict=False):
            if found != wanted:
                raise _EncoderMismatch(doc_id)
        return size

    def _compare(
        self,
        tokenizer: Tokenizer,
        doc_ids: Sequence[str],
        texts: Sequence[str],
        records: TokenRecords,
    ) -> None:
        reference = open_encoder(tokenizer, REFERENCE)
        for index, doc_id in enumerate(doc_ids):
            if not chosen(doc_id, "reference", COMPARED):
                continue
            wanted = self._encode(tokenizer, reference, [texts[index]])
            found = records.of_document(index)
            if any(
                not np.array_equal(found[name], column) for name, column in wanted.columns.items()
            ):
                raise _EncoderMismatch(doc_id)


class _EncoderMismatch(Exception):
    """The fast encoder's ids of a document differ from the reference's."""


def inputs_of(
    documents: Documents,
    prefix: str,
    tokenizer: Tokenizer,
    shares: Shares,
    cleaned: CleaningResult,
    *,
    whole: bool,
) -> str:
    """Fingerprint of what determines every part besides its range."""
    records = identity(documents, tokenizer, prefix, whole=whole)
    return fingerprint({**records, **shares.identity(), "cleaned": cleaned.identity})


def finished(
    columns: Path, task: RawRange, inputs: str, *, checksums: bool = False
) -> TokenisedRange | None:
    """The part that an earlier run made of this range from the same inputs, if it is whole."""
    marker = read_marker(columns, f"{DONE}/{task.name}.json")
    if (
        marker is None
        or marker.get("inputs") != fingerprint([asdict(task), inputs])
        or not {one.name for one in fields(TokenisedRange)[1:]} <= marker.keys()
        or problems(columns, marker, checksums=checksums)
    ):
        return None
    return TokenisedRange(
        task,
        {split: ColumnPart(**part) for split, part in marker["parts"].items()},
        marker["files"],
        **{name: marker[name] for name in TOLD[1:-1]},
        sample=HashSample(**marker["sample"]),
    )


def keep_finished(
    old: Path, new: Path, task: RawRange, inputs: str, *, checksums: bool
) -> TokenisedRange | None:
    """The finished part in `new`, linked there if only `old` has it; `checksums`: undamaged."""
    made = finished(new, task, inputs)
    if made is None and (made := finished(old, task, inputs, checksums=checksums)) is not None:
        for entry in made.files:
            link_file(old / entry["path"], new / entry["path"])
        link_file(old / DONE / f"{task.name}.json", new / DONE / f"{task.name}.json")
    return made


class _ColumnOutput:
    """The columns of one split while they are written, and their counts."""

    def __init__(
        self, folder: Path, split: Split, number: int, documents: Documents, vocab_size: int
    ) -> None:
        self.prefixes = [
            column_prefix(folder, split, column, number) for column in COLUMNS[documents]
        ]
        self.names = [
            path.name for prefix in self.prefixes for path in (bin_path(prefix), idx_path(prefix))
        ]
        self._number = number
        self._writers = {
            column: ColumnWriter(prefix, column_dtype(column, vocab_size))
            for column, prefix in zip(COLUMNS[documents], self.prefixes, strict=True)
        }
        self._stack = contextlib.ExitStack()
        self._tokens = self._bytes = self._digest = self._added = 0
        self.hashes: list[Hashes] = []  # of the sample

    def __enter__(self) -> _ColumnOutput:
        for writer in self._writers.values():
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def append(self, records: TokenRecords) -> None:
        for column, flat in records.columns.items():
            self._writers[column].append(flat, records.lengths[column])
        self._tokens += records.tokens
        self._bytes += records.bytes
        self._digest += records.digest
        self._added += int(records.counts.sum()) - len(records.counts)

    def part(self) -> ColumnPart:
        first = next(iter(self._writers.values()))
        sizes = {name: writer.elements for name, writer in self._writers.items()}
        own = sizes if set(sizes.values()) != {self._tokens} else {}
        return ColumnPart(
            self._number,
            first.records - self._added,
            self._tokens,
            self._bytes,
            f"{self._digest % DIGESTS:064x}",
            own,
            self._added,
        )
