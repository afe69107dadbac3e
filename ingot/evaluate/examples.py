"""What became of each item of a task, as a Parquet file beside the report: for comparing two models
item by item later.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingot.base.storage import atomic_file

GIVEN = {
    "id",
    "document",
    "context",
    "choices",
    "answer",
    "source",
    "reference",
    "label",
    "targets",
    "rejected_targets",
    "bytes",
    "filter",
    "target",
}
"""Columns that say what an item is; the rest says what a model made of it."""
ENDING = ".parquet"


def write_examples(
    path: Path, examples: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] = ()
) -> None:
    """One row for each item, in the order of the items; what the base model made of it in columns
    `base_...`.
    """
    columns = {name: [example.get(name) for example in examples] for name in _names(examples)}
    for name in _names(base):
        if name not in GIVEN:
            columns[f"base_{name}"] = [example.get(name) for example in base]
    with atomic_file(path) as stream:
        pq.write_table(pa.table(columns), stream, compression="zstd")


def _names(examples: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for example in examples for name in example))
