"""Some training documents of a recipe, to look at before everything is read: as ingested, or
directly from sources on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.base.storage import open_read
from ingot.config.recipe import Recipe
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import ParsedDocument
from ingot.data.raw.ranges import ranges, read_range
from ingot.data.raw.store import MANIFEST, open_raw
from ingot.data.sources.find import find_source, is_local, records_of
from ingot.data.sources.local_files import STDLIB
from ingot.data.sources.readers import parse_file
from ingot.data.sources.source_file import COMPRESSED_ENDINGS, SourceFile
from ingot.data.splits import Shares


def training_texts(recipe: Recipe) -> Iterator[str]:
    """Training documents in order: as ingested, or directly from the sources if nothing is ingested
    yet.

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
            yield from _documents(file, extractor)


@dataclass
class TextSample:
    """Documents of files that are spread evenly over the sources.

    `whole`: these are all documents. `file_bytes`: size of all files of the sources, as they lie on
    the disk; None if a source does not tell.
    """

    texts: list[str] = field(default_factory=list)
    files: int = 0
    whole: bool = True
    file_bytes: int | None = 0
    compressed: bool = False
    only_text: bool = True
    """Whether the files hold nothing but the texts."""


def sample_sources(recipe: Recipe, most: int, most_bytes: int) -> TextSample:
    """At most `most` documents of at most about `most_bytes` of text, directly from the sources:
    the first ones of evenly spread files.

    Raises:
        WrongInput: a source is not on this machine, or has no documents that can be read.
    """
    sample, sources = TextSample(), _local_sources(recipe)
    share, room = max(1, most // len(sources)), most_bytes // len(sources)
    for files, extractor in sources:
        known = sample.file_bytes is not None and all("bytes" in file.stamp for file in files)
        size = sum(file.bytes for file in files)
        sample.file_bytes = (sample.file_bytes or 0) + size if known else None
        sample.compressed |= any(_is_compressed(file) for file in files)
        sample.only_text &= all(file.format == "text" for file in files)
        # Of texts a file is one document, so that its size counts against the room.
        fits = room * len(files) // max(1, size) if files[0].format == "text" else len(files)
        chosen = files[:: -(-len(files) // max(1, min(share, fits, len(files))))]
        each = -(-share // len(chosen))
        sample.whole &= len(chosen) == len(files)
        for file in chosen:
            left = room // len(chosen)
            for number, text in enumerate(_documents(file, extractor)):
                if number == each or left <= 0:
                    sample.whole = False
                    break
                sample.texts.append(text)
                left -= len(text)
            sample.files += 1
    return sample


def _is_compressed(file: SourceFile) -> bool:
    return file.format in ("parquet", "arrow") or file.path.endswith(COMPRESSED_ENDINGS)


def _local_sources(recipe: Recipe) -> list[tuple[list[SourceFile], DocumentExtractor]]:
    """The files of each training source, with what reads their records."""
    found = []
    for number, source in enumerate(recipe.data.train):
        here = is_local(source) or source.source == STDLIB
        if not here or source.source.startswith("megatron:"):
            raise WrongInput(
                f"data.train[{number}] {source.source} is not a file here; run `ingot ingest` first"
            )
        extractor = DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
        found.append((find_source(source, f"data.train[{number}]"), extractor))
    return found


def _documents(file: SourceFile, extractor: DocumentExtractor) -> Iterator[str]:
    kind = records_of(file)
    if kind is not None:
        read = kind.read(file, extractor)
        yield from (item.text for item in read if isinstance(item, ParsedDocument))
        return
    with open_read(file.path) as stream:
        for item in parse_file(stream, file.path, file.format, extractor):
            if isinstance(item, ParsedDocument):
                yield item.text
