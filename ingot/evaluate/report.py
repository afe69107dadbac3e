"""The output of an evaluation beside its JSON: a table in the terminal, and a Parquet file with the
score of every item. Light to import, since the command line also shows existing reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.lazy import lazy_import
from ingot.base.reports import EXAMPLES_SUFFIX, EvaluationReport, Metric
from ingot.base.storage import atomic_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = lazy_import("pyarrow"), lazy_import("pyarrow.parquet")


def show_report(report: EvaluationReport, console: Console) -> None:
    """Print the metrics, then the baselines, then the completions."""
    names = ["metric", "better", "value", "95 % interval", "n", *(["base"] if report.base else [])]
    table = Table(*names)
    table.columns[0].overflow = "fold"
    for column in table.columns[2:]:
        column.justify = "right"
    for key, metric in report.metrics.items():
        row = [
            key,
            metric.direction,
            f"{metric.value:.4f}",
            metric.interval_words("{:.4f}".format),
            f"{metric.n:,}",
        ]
        table.add_row(*row, *([_base_cell(report.base.get(key))] if report.base else []))
    for place, (name, value) in enumerate(_baseline_rows(report)):
        if not place:
            table.add_section()
        table.add_row(name, "", f"{value:.4f}")
    console.print(table)
    show_completions(report.samples, console)


def show_completions(samples: Sequence[Mapping[str, str]], console: Console) -> None:
    """Print what was completed; side by side where the model before training did it, too."""
    if any("base" in sample for sample in samples):
        table = Table("prompt", "before training", "after training", show_lines=True, expand=True)
        for column, share in zip(table.columns, (1, 2, 2), strict=True):
            column.ratio = share
        for sample in samples:
            table.add_row(
                *(Text(sample.get(part, "")) for part in ("prompt", "base", "completion"))
            )
        console.print(table)
        return
    for sample in samples:
        for part in ("prompt", "reference", "completion"):
            if part in sample:
                console.print(f"{part}: {sample[part]}", soft_wrap=True)


def written_answers(examples: Path, most: int) -> list[dict[str, str]]:
    """The first `most` answers of each task that had the model write some, such as rouge, from its
    file of `examples`: completions as in the report, each with its `reference`.
    """
    parts = {
        "source": "prompt",
        "reference": "reference",
        "prediction": "completion",
        "base_prediction": "base",
    }
    found = []
    for path in sorted(examples.glob(f"*{EXAMPLES_SUFFIX}")):
        names = pq.read_schema(path).names
        if {"source", "reference", "prediction"} <= set(names):
            there = [name for name in parts if name in names]
            rows = pq.read_table(path, columns=there).slice(0, most).to_pylist()
            found += [{parts[name]: row[name] for name in there} for row in rows]
    return found


def _base_cell(metric: Metric | None) -> str:
    return "" if metric is None else f"{metric.value:.4f}"


def _baseline_rows(report: EvaluationReport) -> list[tuple[str, float]]:
    """Bits per byte of the baselines, the best first; then the baselines of other metrics."""
    bits = sorted(
        ((f"bits per byte of {name}", value) for name, value in report.bits_per_byte.items()),
        key=lambda item: item[1],
    )
    return bits + [
        (name, value)
        for name, value in report.baselines.items()
        if name not in report.bits_per_byte
    ]


INPUT_COLUMNS = {
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
"""Columns that describe an item; all others describe the model's result."""


def write_examples(
    path: Path, examples: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] = ()
) -> None:
    """Write one row per item, in order; the base model's results are in columns `base_...`."""
    columns = {
        name: [example.get(name) for example in examples] for name in _column_names(examples)
    }
    for name in _column_names(base):
        if name not in INPUT_COLUMNS:
            columns[f"base_{name}"] = [example.get(name) for example in base]
    with atomic_file(path) as stream:
        pq.write_table(pa.table(columns), stream, compression="zstd")


def _column_names(examples: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for example in examples for name in example))
