"""One file, or one shard of a remote source: the unit in which sources are found, named and
stamped; and the cache of facts about remote sources.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from ingot.base.errors import Failed, IngotError
from ingot.base.markers import fingerprint
from ingot.base.remote.streams import broke_off
from ingot.base.storage import is_remote, stamp, write_atomic
from ingot.base.userfolders import cache_folder
from ingot.data.documents.records import BadRecord, ParsedDocument

Format = Literal[
    "jsonl",
    "json",
    "parquet",
    "csv",
    "tsv",
    "text",
    "arrow",
    "wikipedia",
    "hub",
    "bigquery",
    "megatron",
    "records",
]
"""The format of a source. The last four are not files: rows of a data set on the hub or of a query,
existing columns, and records from another package's kind of source.
"""
FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".arrow": "arrow",
}
"""Of endings; what has none of them is text."""
COMPRESSED_ENDINGS = (".gz", ".zst", ".bz2")


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` is part of document identities: relative to the source, so that
    data may be moved.

    `stamp` tells cheaply whether the file changed; `bytes` in it is 0 if the size is not known in
    advance. `project` is the project that a query is billed to.
    """

    path: str
    name: str
    format: Format
    stamp: dict[str, Any]
    project: str | None = None
    kind: str = ""
    """The kind of source that found it, the scheme in `SCHEME:...`; empty for paths."""

    @property
    def bytes(self) -> int:
        return int(self.stamp.get("bytes", 0))


def of_one_version(
    file: SourceFile, items: Iterable[ParsedDocument | BadRecord]
) -> Iterator[ParsedDocument | BadRecord]:
    """What is read of `file`, as it comes. A remote one is read in many requests: it is asked for
    its stamp again at the end, and where the first record is bad, which then is nobody's mistake.

    Raises:
        Failed: it is another file than the one that was found.
    """
    doubted = False
    for item in items:
        if isinstance(item, BadRecord) and not doubted:
            _check_version(file)
            doubted = True
        yield item
    _check_version(file)


def _check_version(file: SourceFile) -> None:
    if not is_remote(file.path):
        return
    now = stamp(file.path, fresh=True)
    if any(file.stamp.get(key, now[key]) != now[key] for key in ("bytes", "tag")):
        raise Failed(
            f"{file.path} changed while it was read; run the same command again, or download it and"
            " give its path"
        )


@contextlib.contextmanager
def remote_errors(file: SourceFile) -> Iterator[None]:
    """Turn what a storage's client raises while a remote file is read into Failed: it has errors of
    its own, and another try may help. Those of a local file pass.
    """
    try:
        yield
    except IngotError:
        raise
    except Exception as error:
        if not is_remote(file.path):
            raise
        raise broke_off(file.path, error) from error


def without_query(path: str) -> str:
    """A web address up to its query, which may be a signature; any other path as it is."""
    if not path.startswith(("http://", "https://")):
        return path
    return re.split(r"[?#]", path, maxsplit=1)[0]


def name_with_ending(path: str) -> str:
    """What tells by its ending how a file is read: its path; of a web address whose path has no
    ending, what a query names that has one that is known (`/get?file=a.jsonl&token=x`).
    """
    plain = without_query(path)
    if plain == path or PurePosixPath(plain).suffix:
        return plain
    asked = [value for _, value in parse_qsl(urlsplit(path).query)]
    known = (*FORMATS, *COMPRESSED_ENDINGS)
    return next((value for value in asked if value.lower().endswith(known)), plain)


def compression(path: str) -> str:
    """The ending in `COMPRESSED_ENDINGS` that a file has; empty for others."""
    name = name_with_ending(path).lower()
    return next((end for end in COMPRESSED_ENDINGS if name.endswith(end)), "")


def utf8_safe(text: str) -> str:
    """The text with characters that UTF-8 cannot hold replaced: file names and JSON keys may
    contain them.
    """
    return text.encode("utf-8", "replace").decode()


def remember(key: str, value: Any) -> None:
    """Cache a small JSON value; failing to write is not an error."""
    try:
        write_atomic(_path(key), json.dumps({"key": key, "value": value}))
    except (IngotError, OSError):
        return


def recall(key: str) -> Any:
    """The cached value; None if there is none."""
    try:
        return json.loads(_path(key).read_bytes())["value"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(key: str) -> Path:
    return cache_folder() / "seen" / f"{fingerprint(key)}.json"
