"""What a bench measured, as a table and as a page: every row is there, reasons in the place of
figures, nothing is fetched.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.report.bench import read_bench, render_bench, show_bench, write_bench_page


def row(devices: int, micro_batch: int, precision: str = "fp32", **values: Any) -> dict[str, Any]:
    figures = {
        "status": "measured",
        "tokens_per_s": 1000.0 * micro_batch,
        "examples_per_s": 2.5 * micro_batch,
        "share_of_peak": 0.57,
        "peak_flops": 4.3e11,
        "cpu": 0.93,
        "host_memory": 0.25,
        "gpu": None,
        "gpu_memory": None,
        "process_memory_bytes": 2_100_000_000,
        "parameters": 56_000_000,
        "active_parameters": 56_000_000,
        "device": "CPU, 2 threads",
    }
    return {
        "devices": devices,
        "micro_batch": micro_batch,
        "precision": precision,
        **figures,
        **values,
    }


def lost(devices: int, micro_batch: int, status: str, reason: str) -> dict[str, Any]:
    return {
        "devices": devices,
        "micro_batch": micro_batch,
        "precision": "fp32",
        "status": status,
        "reason": reason,
    }


def report(*rows: dict[str, Any], best: int | None = 0) -> dict[str, Any]:
    told = (
        None
        if best is None
        else {
            "row": best,
            "told": "1 process, micro-batch 2",
            "knobs": ["train.micro_batch=2"],
            "tokens_per_s": 2000.0,
        }
    )
    return {
        "schema": 1,
        "name": "a<b",
        "model": "preset:llama-3m",
        "objective": "pretrain",
        "seq_len": 512,
        "global_batch": 8,
        "steps": 4,
        "synthetic": False,
        "time": 0.0,
        "seconds": 61.0,
        "ingot": "0.1.0",
        "formula": "share of peak = ...",
        "rows": list(rows),
        "best": told,
    }


ROWS = (
    row(1, 1),
    row(1, 2),
    row(2, 1, "bf16"),
    lost(1, 4, "out of memory", "killed & gone"),
    lost(3, 1, "refused", "8 does not divide over 3"),
)


def shown(what: dict[str, Any]) -> str:
    out = io.StringIO()
    show_bench(what, Console(file=out, width=200))
    return out.getvalue()


def test_the_table_has_figures_reasons_and_the_best() -> None:
    table = shown(report(*ROWS, best=1))
    line = next(line for line in table.splitlines() if "2,000" in line)
    assert re.findall(r"[\w.,%]+(?: %| GB)?", line) == [
        "1",
        "fp32",
        "2",
        "2,000",
        "5.00",
        "57.0 %",
        "0.430",
        "93.0 %",
        "25.0 %",
        "2.10 GB",
    ]
    assert "processes 1, format fp32, micro-batch 4: out of memory: killed & gone" in table
    assert "processes 3, format fp32, micro-batch 1: refused: 8 does not divide over 3" in table
    assert (
        "fastest: 1 process, micro-batch 2, 2,000 tokens a second; in the recipe:"
        " train.micro_batch=2" in table
    )
    assert "56 M parameters" in table
    assert "GPU" not in table


def test_a_mixture_has_active_parameters_too() -> None:
    table = shown(report(row(1, 1, active_parameters=13_000_000)))
    assert "56 M parameters (13 M active for a token)" in table


def test_a_gpu_has_its_columns_and_models_without_a_formula_no_share() -> None:
    table = shown(report(row(1, 1, gpu=0.5, gpu_memory=0.75, share_of_peak=None)))
    assert "GPU memory" in table
    assert "50.0 %" in table
    assert "75.0 %" in table
    assert "no formula" in table


def test_nothing_measured_is_said() -> None:
    empty = report(lost(1, 1, "failed", "disk full"), best=None)
    assert "not one row could be measured" in shown(empty)
    page = render_bench(empty, Path("runs/x"))
    assert "Not one row could be measured." in page
    assert "disk full" in page
    assert 'class="chart"' not in page


def test_the_page_has_every_row_plots_and_fetches_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.reports.mkdir()
    (run.reports / "bench.json").write_text(json.dumps(report(*ROWS, best=1)))
    page = write_bench_page(run).read_text(encoding="utf-8")
    assert "a&lt;b" in page
    assert "killed &amp; gone" in page
    assert page.count("<tr") == 1 + len(ROWS)
    assert page.count('<tr class="best">') == 1
    assert (
        "Fastest with 1 process, micro-batch 2: 2,000 tokens a second, 57.0 % of what a large"
        " matrix product reaches" in page
    )
    # One curve of two sizes, for speed and for memory; a bar for each row that was measured, the
    # best in its own colour.
    assert page.count('class="line c0"') == 2
    assert page.count('class="row own"') == 1
    assert page.count('class="row other"') == 2
    assert not re.search(r"<script|https?://(?!www\.w3\.org)|<link[^>]+stylesheet", page)


def test_one_size_has_bars_alone() -> None:
    page = render_bench(report(row(1, 1), row(2, 1)), Path("runs/x"))
    assert 'class="chart"' not in page
    assert page.count('<div class="row') == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is not there; run `ingot bench` first"),
        ("{", "is no JSON; run `ingot bench` again"),
        ('{"schema": 2}', "has schema 2, newer than this ingot's 1"),
    ],
)
def test_a_report_that_cannot_be_read_is_told(text: str | None, says: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.reports.mkdir()
    if text is not None:
        (run.reports / "bench.json").write_text(text)
    with pytest.raises(WrongInput) as caught:
        read_bench(run)
    assert says in str(caught.value)
