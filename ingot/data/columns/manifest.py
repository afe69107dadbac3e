"""`data/columns/manifest.json`: describes the prepared columns; written last, it is their commit
marker. Also what a column holds, by its name: ids, a mask, or labels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ingot import __version__
from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry, fingerprint, problems, read_marker, write_marker
from ingot.base.masking import keys_hidden
from ingot.base.remote.deferred import deferred_files_of
from ingot.config.recipe import Recipe
from ingot.config.sections.data import COLUMNS
from ingot.config.sections.objective import Documents
from ingot.data.columns.column import split_of, token_dtype
from ingot.data.splits import Split

MANIFEST = "manifest.json"
DIGESTS = 2**256


@dataclass(frozen=True)
class ColumnPart:
    """A finished part of one split: file number `number` of each of its columns.

    `tokens` counts ids, for preferences and pairs those of both sides. `sizes` gives the number of
    elements of each column where columns differ (empty: all have `tokens`). `bytes` counts the
    texts that the model learns to write. `digest` is the sum of the SHA-256 of the part's texts,
    modulo 2**256, in hexadecimal: digests of parts add up to that of the split, however it was
    divided and whatever the tokenizer.
    """

    number: int
    documents: int
    tokens: int
    bytes: int
    digest: str
    sizes: dict[str, int] = field(default_factory=dict)
    added: int = 0
    """Records beyond one for each document: a chat is several where the template writes an answer
    otherwise once others follow.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def records(self) -> int:
        return self.documents + self.added

    def elements(self, column: str) -> int:
        """The number of elements of a column."""
        return self.sizes.get(column, self.tokens)


@dataclass(frozen=True)
class PreparedSource:
    """One source's share of a split. `weight` is relative to the other sources of the split."""

    source: str
    weight: float
    documents: int
    tokens: int
    bytes: int
    parts: list[ColumnPart]

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def records(self) -> int:
        return sum(part.records for part in self.parts)


@dataclass(frozen=True)
class PreparedData:
    """All prepared columns of a run.

    `data` are the identities of what is trained on and of what is measured on: the tokens and how
    they are divided into documents. They exclude weights, which belong to the order of training.
    `sets` are identities of the texts of each split, independent of the tokenizer and of how the
    work was divided.
    """

    objective: str
    columns: list[dict[str, str]]
    splits: dict[Split, list[PreparedSource]]
    tokenizer: str
    template: str | None
    vocab_size: int
    data: dict[str, str]
    sets: dict[Split, str]
    closing: int = 0
    """How many ids the tokenizer appends to a framed text; they are kept when it is truncated."""
    opening: int = 0
    """How many ids it puts before one."""
    prefix: str = ""
    """The prefix of every pair's source."""
    labels: list[str] = field(default_factory=list)
    """Names of the classes, by number."""

    @property
    def identity(self) -> str:
        """The identity of the data of all splits."""
        return fingerprint(self.data)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, which depend on the kind of document
        (`ingot.config.sections.data.COLUMNS`).
        """
        return tuple(column["name"] for column in self.columns)

    @property
    def documents(self) -> Documents:
        """The kind of document; texts if the columns match no kind."""
        return next((kind for kind, names in COLUMNS.items() if names == self.names), "text")

    @property
    def framing(self) -> int:
        """How many ids the tokenizer puts around a text."""
        return self.opening + self.closing

    def total(self, split: Split, what: str) -> int:
        """Sum of `documents`, `records`, `tokens` or `bytes` over the sources of a split."""
        return sum(int(getattr(source, what)) for source in self.splits[split])


def data_identities(
    files: Sequence[FileEntry], splits: Iterable[str], tokenizer: str
) -> dict[str, str]:
    """The identity of each split's data: of its own files alone, so that a training is the same
    whatever it is measured on.
    """
    return {
        split: fingerprint(
            {
                "files": [
                    [entry.path, entry.sha256] for entry in files if split_of(entry.path) == split
                ],
                "tokenizer": tokenizer,
            }
        )
        for split in splits
    }


def set_identity(sources: Sequence[PreparedSource]) -> str:
    digest = sum(int(part.digest, 16) for source in sources for part in source.parts) % DIGESTS
    return fingerprint(
        {"documents": sum(source.documents for source in sources), "digest": f"{digest:064x}"}
    )


def write_prepared(
    folder: Path, prepared: PreparedData, about: dict[str, Any], files: Sequence[FileEntry]
) -> None:
    """Write the manifest; `about` records the inputs of the columns."""
    totals = {
        split: {what: prepared.total(split, what) for what in ("documents", "tokens", "bytes")}
        for split in prepared.splits
    }
    payload = {
        "kind": "columns",
        "ingot": __version__,
        "totals": totals,
        **keys_hidden(about),
        **keys_hidden(asdict(prepared)),
    }
    write_marker(folder, MANIFEST, payload, files)


def read_prepared(folder: Path) -> PreparedData:
    """Read the manifest and check the sizes of all files.

    Raises:
        WrongInput: the columns are incomplete, a file is missing or has another size, or another
            version of ingot wrote the manifest.
    """
    marker = read_marker(folder, MANIFEST)
    if marker is None:
        if (folder / MANIFEST).exists():
            raise WrongInput(f"{folder / MANIFEST} is damaged; run `ingot prepare --again`")
        raise WrongInput(
            f"{folder} holds no prepared data; run `ingot prepare` with this recipe first"
        )
    if found := missing_files(folder, marker):
        raise WrongInput(f"{found[0]}; run `ingot prepare --again`")
    names = [one.name for one in fields(PreparedData)]
    if lacking := [name for name in names if name not in marker]:
        raise WrongInput(
            f"{folder / MANIFEST} lacks {', '.join(lacking)}; run `ingot prepare --again`"
        )
    try:
        return _as_read().validate_python({name: marker[name] for name in names})
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise WrongInput(
            f"{folder / MANIFEST} has {place} as another version of ingot wrote it; run `ingot"
            " prepare --again`"
        ) from error


@functools.cache
def _as_read() -> TypeAdapter[PreparedData]:
    return TypeAdapter(PreparedData)


def missing_files(folder: Path, marker: dict[str, Any]) -> list[str]:
    """Problems with the sizes of the files that `marker` lists, [] for none; files that are fetched
    on demand do not count as missing.
    """
    if deferred_files_of(folder) is not None:
        marker = {
            "files": [entry for entry in marker["files"] if (folder / entry["path"]).exists()]
        }
    return problems(folder, marker, checksums=False)


def prepared_for(recipe: Recipe) -> PreparedData:
    """The prepared columns of a recipe.

    Raises:
        WrongInput: as `read_prepared`, or they were prepared for another objective, another prefix,
            or other labels.
    """
    prepared = read_prepared(recipe.folder.columns)
    if prepared.objective != recipe.objective.kind:
        raise WrongInput(
            f"{recipe.folder.columns} was prepared for objective.kind {prepared.objective}, the"
            f" recipe says {recipe.objective.kind}; run `ingot prepare`"
        )
    prefix = prefix_of(recipe)
    for knob, made, asked in (
        ("objective.documents", prepared.documents, recipe.documents),
        ("objective.prefix", prepared.prefix, prefix),
        ("objective.labels", prepared.labels, recipe.labels),
    ):
        if made != asked:
            raise WrongInput(
                f"{recipe.folder.columns} was prepared for {knob} {made!r}, the recipe says"
                f" {asked!r}; run `ingot prepare`"
            )
    return prepared


def prefix_of(recipe: Recipe) -> str:
    """The prefix of every pair's source."""
    return recipe.objective.source_prefix


MASK, LABEL = "mask", "label"
VERDICTS = ("bad", "good")
"""The labels of rated answers."""


def is_mask(column: str) -> bool:
    return column == MASK or column.endswith(f"_{MASK}")


def token_columns(columns: Sequence[str]) -> list[str]:
    """The columns that hold ids."""
    return [name for name in columns if not is_mask(name) and name != LABEL]


def column_dtype(column: str, vocab_size: int) -> np.dtype[Any]:
    """The dtype of a column: masks are bytes, labels are numbers, everything else is ids."""
    if column == LABEL:
        return np.dtype("int32")
    return np.dtype("uint8") if is_mask(column) else token_dtype(vocab_size)
