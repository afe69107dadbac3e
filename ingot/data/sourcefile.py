"""One file, or one share of a remote source, as the unit that sources are found, named and stamped
by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
]
"""How a source is written down. The last three are no files: rows of a data set on the hub, of a
query, and existing columns.
"""


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. `name` stands in document identities: relative to the source, so that
    data may move.

    `stamp` tells cheaply whether the file changed; `bytes` in it is 0 where the size is not known
    beforehand. `project` is whose a query is.
    """

    path: str
    name: str
    format: Format
    stamp: dict[str, Any]
    project: str | None = None

    @property
    def bytes(self) -> int:
        return int(self.stamp.get("bytes", 0))


def writable(text: str) -> str:
    """A text that UTF-8 can hold: names on a disk, and keys in JSON, may be no text at all."""
    return text.encode("utf-8", "replace").decode()
