"""`data/raw/`: ingested documents as Parquet parts, with a manifest written last. Independent of
source formats.

A part holds documents of one source in row groups of a few megabytes, the unit by which `prepare`
divides its work.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ingot import __version__
from ingot.base.errors import WrongInput, differing
from ingot.base.markers import FileEntry, entry_of, fingerprint, problems, read_marker, write_marker
from ingot.base.masking import keys_hidden
from ingot.base.storage import atomic_file
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.objective import Documents
from ingot.data.sources.find import describe_change, recipe_sources
from ingot.data.splits import Split

MANIFEST = "manifest.json"
GROUP_BYTES = 4_000_000
MOST_SHOWN = 5
GROUP_DOCUMENTS = 65_536
PART_BYTES = 512_000_000
MOST_BYTES = 2**31 - 1
SCHEMA = pa.schema([("doc_id", pa.string()), ("source", pa.int32()), ("text", pa.string())])

Text = tuple[str, str]
"""(doc_id, text)"""

Kind = Documents | Literal["tokens"]
"""What the documents of a source are. `text` and `masked`: plain texts. All others are JSON in the
text column: `chat` is `{"messages": [message, ...]}`, where a message is
`{"role": ..., "content": ...}`; `preference` is
`{"prompt": [message, ...], "chosen": [...], "rejected": [...]}`; `rated` is
`{"prompt": [message, ...], "answer": [...], "label": 1 or 0}`; `pair` is
`{"source": text, "target": text}`; `labelled` is `{"text": text, "label": number}`. `tokens`:
existing Megatron columns, which are not copied; a part's path is their prefix.
"""


@dataclass(frozen=True)
class RawPart:
    """One Parquet file: documents and bytes of text of each row group."""

    path: str
    sha256: str
    groups: list[tuple[int, int]]

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class RawSource:
    """What was read from one source, and what could not be read: reason -> count, with examples and
    their place.
    """

    source: str
    knobs: dict[str, Any]
    files: int
    documents: int
    bytes: int
    parts: list[RawPart]
    bad: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    stamps: str = ""
    kind: Kind = "text"
    seen: list[dict[str, Any]] = field(default_factory=list)
    """The stamps of its files, if these are few, so that a changed file can be named."""
    labels: list[str] = field(default_factory=list)
    """The names of the labels, by number."""

    __pydantic_config__ = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class RawData:
    """All ingested documents, by split."""

    folder: Path
    splits: dict[Split, list[RawSource]]

    @property
    def identity(self) -> str:
        """Fingerprint of the documents themselves, independent of when and from where they were
        read.
        """
        return fingerprint(
            {
                split: [[part.sha256 for part in source.parts] for source in sources]
                for split, sources in self.splits.items()
            }
        )

    @property
    def tokenised(self) -> list[RawSource]:
        """The sources that hold tokens: cleaning, which compares texts, leaves them as they are."""
        return [
            source
            for sources in self.splits.values()
            for source in sources
            if source.kind == "tokens"
        ]

    @property
    def bytes(self) -> int:
        return sum(source.bytes for sources in self.splits.values() for source in sources)


def knobs_of(source: SourceSettings) -> dict[str, Any]:
    """The knobs of a source that determine its documents."""
    return source.model_dump(mode="json", exclude={"weight"})


def write_parts(
    folder: Path, split: Split, source: int, texts: Iterable[Text]
) -> Iterator[tuple[RawPart, FileEntry]]:
    """Write texts of one source as `SPLIT-NNNNN.parquet`, counting from 0; each file appears
    atomically. A row group is written in a thread while the next one is read.
    """
    groups = _groups(texts)
    for number in itertools.count():
        group = next(groups, None)
        if group is None:
            return
        path, counts = f"{split}-{number:05d}.parquet", list[tuple[int, int]]()
        # LZ4 writes and reads at half the cost of Zstandard; files are half as large again, but are
        # read only once or twice.
        with (
            atomic_file(folder / path) as stream,
            pq.ParquetWriter(
                stream,
                SCHEMA,
                compression="lz4",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            ) as writer,
            ThreadPoolExecutor(1) as thread,
        ):
            while group is not None:
                table, documents = _table(source, group), len(group.texts)
                writing = thread.submit(writer.write_table, table, row_group_size=documents)
                counts.append((documents, group.bytes))
                group = next(groups, None) if sum(size for _, size in counts) < PART_BYTES else None
                writing.result()
        entry = entry_of(folder, path)
        yield RawPart(path, entry.sha256, counts), entry


@dataclass
class _Group:
    ids: list[str]
    texts: list[bytes]
    bytes: int


def _groups(texts: Iterable[Text]) -> Iterator[_Group]:
    group = _Group([], [], 0)
    for doc_id, text in texts:
        data = text.encode()
        group.ids.append(doc_id)
        group.texts.append(data)
        group.bytes += len(data)
        if group.bytes >= GROUP_BYTES or len(group.texts) >= GROUP_DOCUMENTS:
            yield group
            group = _Group([], [], 0)
    if group.texts:
        yield group


def _table(source: int, group: _Group) -> pa.Table:
    """Made of buffers: `pa.array` of a list imports pandas where that is installed, which takes
    longer than to read 30 MB.
    """
    sources = pa.py_buffer(np.full(len(group.ids), source, np.int32))
    columns = [
        _strings([doc_id.encode() for doc_id in group.ids]),
        pa.Array.from_buffers(pa.int32(), len(group.ids), [None, sources]),
        _strings(group.texts),
    ]
    return pa.table(columns, schema=SCHEMA)


def _strings(texts: Sequence[bytes]) -> pa.StringArray:
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=offsets[1:])
    if offsets[-1] > MOST_BYTES:
        raise WrongInput(
            f"a document of {max(map(len, texts)):,} bytes is more than Arrow's strings can hold;"
            " divide it"
        )
    return pa.StringArray.from_buffers(
        len(texts), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(b"".join(texts))
    )


def read_table(path: Path, group: int) -> pa.Table:
    """The documents of one row group, columns `doc_id` and `text`.

    Raises:
        WrongInput: the file is missing or damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read_row_group(group, columns=["doc_id", "text"], use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise WrongInput(
            f"{path} is damaged ({str(error)[:120]}); run `ingot ingest --again`"
        ) from error


def write_manifest(
    folder: Path, splits: dict[Split, list[RawSource]], files: Iterable[FileEntry]
) -> None:
    payload = {
        "kind": "raw",
        "ingot": __version__,
        "splits": {
            split: [keys_hidden(asdict(source)) for source in sources]
            for split, sources in splits.items()
        },
    }
    write_marker(folder, MANIFEST, payload, files)


def open_raw(recipe: Recipe, *, unchanged: bool = False) -> RawData:
    """Open what `ingest` wrote for this recipe; `unchanged` also requires that its sources have not
    changed since.

    Raises:
        WrongInput: nothing complete is there, a file is missing or truncated, it was made from
            other sources, they changed since, or another version of ingot wrote the manifest.
    """
    folder = recipe.folder.raw
    marker = read_marker(folder, MANIFEST)
    if marker is None:
        if (folder / MANIFEST).exists():
            raise WrongInput(f"{folder / MANIFEST} is damaged; run `ingot ingest --again`")
        raise WrongInput(
            f"{folder} holds no ingested documents; run `ingot ingest` with this recipe first"
        )
    if found := problems(folder, marker, checksums=False):
        raise WrongInput(f"{found[0]}; run `ingot ingest --again`")
    splits = _splits(folder, marker)
    asked = {
        split: [keys_hidden(knobs_of(source)) for source in sources]
        for split, sources in recipe_sources(recipe).items()
    }
    made = {
        split: [keys_hidden(source.knobs) for source in sources]
        for split, sources in splits.items()
    }
    before, now = _differences(made, asked)
    if before:
        raise WrongInput(
            f"{folder} was made from {before}, the recipe says {now}; run `ingot ingest` with this"
            " recipe"
        )
    _check_kinds(recipe, splits)
    if unchanged:
        _check_unchanged(recipe, splits)
    return RawData(folder, splits)


def _check_kinds(recipe: Recipe, splits: dict[Split, list[RawSource]]) -> None:
    """Refuse documents of another kind than the recipe's: kinds are read from different columns, so
    one cannot be converted to another here.
    """
    wanted = recipe.documents
    for source in (source for sources in splits.values() for source in sources):
        if source.kind != wanted and (source.kind, wanted) != ("tokens", "text"):
            raise WrongInput(
                f"{source.source} was ingested as {source.kind},"
                f" objective.kind={recipe.objective.kind} takes {wanted}; run `ingot ingest` with"
                " this recipe"
            )
        if source.labels != recipe.labels:
            before, now = differing(source.labels, recipe.labels, ", ".join)
            raise WrongInput(
                f"{source.source} was ingested with the labels {before}, objective.labels is"
                f" {now}; run `ingot ingest` with this recipe"
            )


def _check_unchanged(recipe: Recipe, splits: dict[Split, list[RawSource]]) -> None:
    """Refuse documents of files that have changed since. A source that no longer exists is
    accepted: what was ingested is a copy.
    """
    for split, sources in recipe_sources(recipe).items():
        for number, (source, made) in enumerate(zip(sources, splits[split], strict=True)):
            knob = f"data.{split}[{number}]"
            if changed := describe_change(source, made.stamps, made.seen, knob):
                raise WrongInput(
                    f"{knob} {source.source} changed since it was ingested:"
                    f" {changed}; run `ingot ingest` again"
                )


def _splits(folder: Path, marker: Mapping[str, Any]) -> dict[Split, list[RawSource]]:
    try:
        return TypeAdapter(dict[Split, list[RawSource]]).validate_python(marker.get("splits"))
    except ValidationError as error:
        place = ".".join(map(str, ("splits", *error.errors()[0]["loc"])))
        raise WrongInput(
            f"{folder / MANIFEST} has {place} as another version of ingot wrote it; run `ingot"
            " ingest --again`"
        ) from error


def _differences(
    made: Mapping[Split, Sequence[Mapping[str, Any]]],
    asked: Mapping[Split, Sequence[Mapping[str, Any]]],
) -> tuple[str, str]:
    """The sources that differ, as they were and as the recipe has them; "" twice if none does."""
    found = []
    for split in dict.fromkeys((*made, *asked)):
        both = itertools.zip_longest(made.get(split, ()), asked.get(split, ()))
        for number, (before, now) in enumerate(both):
            if before != now:
                found.append(differing(before, now, partial(_described, f"{split}[{number}]")))
    more = [f"{len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    left, right = (
        (", ".join([*side[:MOST_SHOWN], *more]) for side in zip(*found, strict=True))
        if found
        else ("", "")
    )
    return left, right


def _described(place: str, knobs: Mapping[str, Any] | None) -> str:
    """A source in a few words, with the knobs that differ from their defaults."""
    if knobs is None:
        return f"no {place}"
    fields = SourceSettings.model_fields
    changed = {
        name: value
        for name, value in knobs.items()
        if name != "source" and (name not in fields or value != fields[name].get_default())
    }
    return f"{place} {knobs['source']}" + (f" {changed}" if changed else "")
