"""Existing Megatron columns as a source: `PREFIX.bin` and `PREFIX.idx` are used in place, not
copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.listing import find_files
from ingot.base.markers import fingerprint
from ingot.base.storage import is_remote, sha256_file, stamp
from ingot.config.sections.data import SourceSettings
from ingot.data.columns.column import AGAIN, Column, bin_path, idx_path
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import SourceFile, utf8_safe

TOKEN_TYPES = ("uint16", "int32", "uint8", "int16", "int64")


def find_columns(source: SourceSettings, knob: str) -> list[SourceFile]:
    """The columns that `megatron:PREFIX` names; the prefix may be a glob.

    Raises:
        WrongInput: there are none, or half of a pair is missing.
    """
    prefix = source.source.removeprefix("megatron:")
    if is_remote(prefix):
        raise WrongInput(
            f"{knob} {source.source}: columns are mapped into memory; copy them to a local disk"
        )
    found = []
    for path in find_files(f"{prefix.removesuffix('.idx').removesuffix('.bin')}.idx"):
        whole = Path(os.path.abspath(path)).with_suffix("")
        if not bin_path(whole).exists():
            raise WrongInput(
                f"{knob} {source.source}: {bin_path(whole)} is missing; an index is of no use"
                " without it"
            )
        data, index = stamp(str(bin_path(whole))), stamp(str(idx_path(whole)))
        both = {
            "path": utf8_safe(str(whole)),
            "bytes": data["bytes"],
            "mtime_ns": data["mtime_ns"],
            "idx": [index["bytes"], index["mtime_ns"]],
        }
        found.append(SourceFile(str(whole), utf8_safe(whole.name), "megatron", both))
    if not found:
        raise WrongInput(
            f"{knob} {source.source}: no {prefix}.idx; PREFIX is the path without .bin and .idx"
            f" (relative ones start at {Path.cwd()})"
        )
    return found


def token_groups(
    file: SourceFile, group_bytes: int, group_documents: int
) -> tuple[str, list[tuple[int, int]]]:
    """The digest of one column, and runs of its documents with their bytes. A document may consist
    of several sequences. The digest has the time at which the ids were written in place of their
    hash: they may be terabytes, and other ids may have the same lengths.

    Raises:
        WrongInput: the files are damaged, do not match, or hold no token ids.
    """
    prefix = Path(file.path)
    try:
        column = Column(prefix)
        column.prove()
        counts = column.document_lengths()
    except WrongInput as error:
        raise WrongInput(str(error).replace(AGAIN, "make these columns again")) from error
    if column.dtype.name not in TOKEN_TYPES:
        raise WrongInput(
            f"{bin_path(prefix)} holds {column.dtype}, which no token id is; give the column of"
            " tokens"
        )
    if int(counts.sum()) != len(column):
        raise WrongInput(
            f"{idx_path(prefix)}: its documents have {int(counts.sum()):,} sequences of"
            f" {len(column):,}; make these columns again"
        )
    ends = np.cumsum(column.lengths(0, len(column)), dtype=np.int64) * column.dtype.itemsize
    after = np.concatenate([np.zeros(1, np.int64), ends])[
        np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    ]
    ids = bin_path(prefix).stat()
    digest = fingerprint(
        {"idx": sha256_file(idx_path(prefix)), "bytes": ids.st_size, "mtime_ns": ids.st_mtime_ns}
    )
    return digest, list(_groups(after, group_bytes, group_documents))


def _groups(
    after: npt.NDArray[Any], group_bytes: int, group_documents: int
) -> Iterator[tuple[int, int]]:
    """Runs of documents of at most `group_bytes`, or one larger document; `after[n]` is the bytes
    of the first n documents.
    """
    first, last = 0, len(after) - 1
    while first < last:
        fitting = int(np.searchsorted(after, after[first] + group_bytes, side="right")) - 1
        end = min(max(fitting, first + 1), first + group_documents, last)
        yield end - first, int(after[end] - after[first])
        first = end


class MegatronSource(SourceKind):
    """`megatron:PREFIX`: existing columns, used in place."""

    checks_changes = True

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        return find_columns(source, knob)
