"""Some training documents of a recipe, to look at before everything is read: as ingested, or
directly from sources on this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter, mul

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.storage import open_read
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import PLAIN
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.raw.ranges import ranges, read_range
from ingot.data.raw.store import MANIFEST, open_raw
from ingot.data.sources.find import find_source, is_local, records_of
from ingot.data.sources.local_files import STDLIB
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import SourceFile, compression
from ingot.data.splits import Shares

MOST_BAD = 8
"""A sample of a file ends after so many times as many bad records as documents were asked for: a
large file may hold nothing that can be read.
"""
MOST_OF_ONE = 4_000_000
"""Characters of one text in a sample: a file of texts is one, of whatever size."""


class NotHere(WrongInput):
    """A source cannot be looked at on this machine, and was not ingested."""


def training_texts(recipe: Recipe) -> Iterator[str]:
    """Training documents in order: as ingested, or, if nothing is ingested yet, all those of the
    training sources, of which some will be held out or left out by `data.fraction`.

    Raises:
        WrongInput: a source is not on this machine and was not ingested.
    """
    if read_marker(recipe.folder.raw, MANIFEST) is not None:
        raw, shares = open_raw(recipe), Shares.of(recipe.data)
        for task in (
            task for task in ranges(raw) if task.split == "train" and task.kind != "tokens"
        ):
            for documents in read_range(raw.folder, task):
                for doc_id, text in zip(
                    documents.column("doc_id").to_pylist(),
                    documents.column("text").to_pylist(),
                    strict=True,
                ):
                    if shares.split(task.split, doc_id) == "train":
                        yield text
        return
    for files, extractor in _local_sources(recipe):
        for file in files:
            yield from (
                item.text for item in _items(file, extractor) if isinstance(item, ParsedDocument)
            )


@dataclass
class TextSample:
    """Documents of files that are spread over the sources.

    `whole`: these are all documents. `file_bytes`: size of all files of the sources, as they lie on
    the disk; None if a source does not tell. `taken`: the share of them that the sources'
    `fraction` takes.
    """

    texts: list[str] = field(default_factory=list)
    files: int = 0
    whole: bool = True
    file_bytes: int | None = 0
    taken: float = 1.0
    compressed: bool = False
    only_text: bool = True
    """Whether the files hold nothing but the texts."""
    bad: Counter[str] = field(default_factory=Counter)
    """How many records cannot be read, by reason."""
    example: str = ""
    """Where the first of them is."""

    @property
    def why_bad(self) -> str:
        """The reasons, for people."""
        told = ", ".join(f"{reason} ({count:,})" for reason, count in self.bad.most_common(3))
        return f"{told}; the first is {self.example}"

    def _note(self, file: SourceFile, record: BadRecord) -> None:
        self.example = self.example or f"{file.path}:{record.row}"
        self.bad[record.reason] += 1

    def take(self, file: SourceFile, extractor: DocumentExtractor, most: int, room: int) -> None:
        """Up to `most` documents of a file, of `room` characters or a little more."""
        taken = bad = 0
        self.files += 1
        for item in _items(file, extractor):
            if taken == most or room <= 0 or bad > MOST_BAD * most:
                self.whole = False
                return
            if isinstance(item, BadRecord):
                self._note(file, item)
                bad += 1
                continue
            text = item.text
            if len(text) > MOST_OF_ONE and extractor.documents in PLAIN:
                text, self.whole = text[:MOST_OF_ONE], False
            self.texts.append(text)
            taken, room = taken + 1, room - len(text)


def sample_sources(recipe: Recipe, most: int, most_bytes: int) -> TextSample:
    """At most `most` documents of at most about `most_bytes` of text: the first ones of files that
    are spread over all sizes, the largest among them, directly from the sources; of those that are
    not here, as ingested. The last document of a file may go beyond the bound, by `MOST_OF_ONE`.

    Raises:
        NotHere: a source is not on this machine, and nothing is ingested.
        WrongInput: a source is missing, or lacks a column.
    """
    try:
        sources = _local_sources(recipe)
    except NotHere:
        if read_marker(recipe.folder.raw, MANIFEST) is None:
            raise
        return _ingested(recipe, most, most_bytes)
    sample = TextSample()
    share, room = max(1, most // len(sources)), most_bytes // len(sources)
    sizes = [sum(file.bytes for file in files) for files, _ in sources]
    taken = sum(map(mul, sizes, (source.fraction for source in recipe.data.train)))
    sample.taken = taken / sum(sizes) if any(sizes) else 1.0
    for (files, extractor), size in zip(sources, sizes, strict=True):
        known = sample.file_bytes is not None and all("bytes" in file.stamp for file in files)
        sample.file_bytes = (sample.file_bytes or 0) + size if known else None
        sample.compressed |= any(_is_compressed(file) for file in files)
        sample.only_text &= all(file.format == "text" for file in files)
        # Of texts a file is one document, so that its size counts against the room.
        fits = room * len(files) // max(1, size) if files[0].format == "text" else len(files)
        # From the largest on: a small file beside a large one tells little about the source.
        by_size = sorted(files, key=attrgetter("bytes"), reverse=True)
        chosen = by_size[:: -(-len(files) // max(1, min(share, fits, len(files))))]
        each = -(-share // len(chosen))
        sample.whole &= len(chosen) == len(files)
        for file in chosen:
            sample.take(file, extractor, each, room // len(chosen))
    return sample


def _ingested(recipe: Recipe, most: int, most_bytes: int) -> TextSample:
    """The first documents of evenly spread ranges of what was ingested."""
    raw = open_raw(recipe)
    tasks = [one for one in ranges(raw) if one.split == "train" and one.kind != "tokens"]
    chosen = tasks[:: -(-len(tasks) // max(1, min(most, len(tasks))))]
    sample = TextSample(file_bytes=None)
    for task in chosen:
        left, room = most // len(chosen), most_bytes // len(chosen)
        sample.files += 1
        texts = (
            text
            for batch in read_range(raw.folder, task)
            for text in batch.column("text").to_pylist()
        )
        for text in texts:
            if left <= 0 or room <= 0:
                break
            sample.texts.append(text)
            left, room = left - 1, room - len(text)
    sample.whole = len(sample.texts) == sum(task.documents for task in tasks)
    return sample


def _is_compressed(file: SourceFile) -> bool:
    return file.format in ("parquet", "arrow") or bool(compression(file.path))


def _local_sources(recipe: Recipe) -> list[tuple[list[SourceFile], DocumentExtractor]]:
    """The files of each training source, with what reads their records."""
    found = []
    for number, source in enumerate(recipe.data.train):
        here = is_local(source) or source.source == STDLIB
        if not here or source.source.startswith("megatron:"):
            raise NotHere(
                f"data.train[{number}] {source.source} is not a file here; run `ingot ingest` first"
            )
        extractor = DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
        found.append((find_source(source, f"data.train[{number}]"), extractor))
    return found


def _items(file: SourceFile, extractor: DocumentExtractor) -> Iterator[ParsedDocument | BadRecord]:
    kind = records_of(file)
    if kind is not None:
        yield from kind.read(file, extractor)
        return
    with open_read(file.path) as stream:
        yield from parse_file(stream, file.path, file.format, extractor)
