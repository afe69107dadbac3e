"""The file of examples, and the table of a report."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq

from ingot.base.console import console
from ingot.base.reports import EvaluationReport, Metric
from ingot.evaluate.report import show_report, write_examples

LOSS, ACCURACY = (
    Metric(2.5, 2.4, 2.6, "lower", 100, "a"),
    Metric(0.75, 0.7, 0.8, "higher", 1200, "b"),
)


def shown(report: EvaluationReport) -> list[str]:
    stream = io.StringIO()
    show_report(report, console(file=stream, width=140))
    return stream.getvalue().splitlines()


def test_rows_keep_their_order_and_columns_that_some_lack_are_empty(tmp_path: Path) -> None:
    examples = [{"id": "b", "score": 0.5}, {"id": "a", "score": 0.25, "extra": "x"}]
    write_examples(
        tmp_path / "examples" / "t.parquet",
        examples,
        [{"id": "b", "score": 1.0}, {"id": "a", "score": 0.0}],
    )
    table = pq.read_table(tmp_path / "examples" / "t.parquet")
    assert table.to_pydict() == {
        "id": ["b", "a"],
        "score": [0.5, 0.25],
        "extra": [None, "x"],
        "base_score": [1.0, 0.0],
    }


def test_a_table_says_which_is_better_and_what_stands_beside() -> None:
    baselines = {"xz -9": 1.5, "gzip -9": 2.0, "h/accuracy/majority": 0.25}
    lines = shown(
        EvaluationReport(
            "m",
            "t",
            {"loss/loss": LOSS, "h/accuracy": ACCURACY},
            baselines,
            [],
            {"h/accuracy": LOSS},
        )
    )
    row = next(line for line in lines if "h/accuracy" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "h/accuracy",
        "higher",
        "0.7500",
        "0.7000 to 0.8000",
        "1,200",
        "2.5000",
    ]
    assert next(line for line in lines if "loss/loss" in line).split("│")[-2].strip() == ""
    names = [line.split("│")[1].strip() for line in lines if "│" in line]
    assert names[-3:] == [
        "bits per byte of xz -9",
        "bits per byte of gzip -9",
        "h/accuracy/majority",
    ]


def test_without_a_base_there_is_no_column_for_it() -> None:
    lines = shown(
        EvaluationReport("m", "t", {"loss/loss": LOSS}, {}, [{"prompt": "a", "completion": "[b]"}])
    )
    assert not any("base" in line for line in lines)
    assert lines[-2:] == ["prompt: a", "completion: [b]"]
