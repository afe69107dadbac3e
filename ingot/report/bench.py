"""The results of `ingot bench` as a terminal table and as `reports/bench.html`, from
`reports/bench.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.progress import duration
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic
from ingot.report.formatting import count, short
from ingot.report.page import template
from ingot.report.plots import PlotLine, PlotPanel, bar_chart, line_chart

COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5")
GB = 1e9
SETTINGS = ("processes", "format", "micro-batch")
MEASURED = (
    "tokens/s",
    "examples/s",
    "share of peak",
    "peak TFLOP/s",
    "CPU",
    "host memory",
    "GPU",
    "GPU memory",
    "process memory",
)
Row = Mapping[str, Any]


def read_bench(run: RunFolder) -> dict[str, Any]:
    """The benchmark's results. Raises WrongInput where there are none, or a newer ingot wrote
    them.
    """
    path = run.reports / "bench.json"
    try:
        report: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise WrongInput(f"{path} is not there; run `ingot bench` first") from None
    except ValueError:
        raise WrongInput(f"{path} is no JSON; run `ingot bench` again") from None
    if report.get("schema", 0) > 1:
        raise WrongInput(
            f"{path} has schema {report['schema']}, newer than this ingot's 1; upgrade ingot"
        )
    return report


def show_bench(report: Row, out: Console) -> None:
    """Print a line for each setting; for one that was not measured, the reason."""
    table = Table(*SETTINGS, *_columns(report), title=_title(report), title_justify="left")
    for column in table.columns:
        column.justify = "right"
    reasons = []
    for number, row in enumerate(report["rows"]):
        best = "bold" if _is_best(report, number) else ""
        cells = [*_settings(row), *_measured(report, row)]
        if row["status"] != "measured":
            cells = [
                *_settings(row),
                f"{row['status']}",
                *[""] * (len(table.columns) - len(SETTINGS) - 1),
            ]
            asked = zip(SETTINGS, _settings(row), strict=True)
            settings = ", ".join(f"{name} {value}" for name, value in asked)
            reasons.append(Text(f"{settings}: {row['status']}: {row['reason']}"))
        table.add_row(*(Text(cell, best) for cell in cells))
    out.print(table)
    for reason in reasons:
        out.print(reason, soft_wrap=True)
    out.print(Text(report["formula"], "dim"), soft_wrap=True)
    best = report["best"]
    if best is None:
        out.print(Text("not one row could be measured", "red"))
    else:
        rate = (
            f", {best['tokens_per_s']:,.0f} tokens a second; in the recipe:"
            f" {' '.join(best['knobs'])}"
        )
        out.print(Text.assemble("fastest: ", (best["told"], "bold"), rate), soft_wrap=True)


def write_bench_page(run: RunFolder) -> Path:
    """Write `reports/bench.html` from `reports/bench.json`, and return its path."""
    path = run.reports / "bench.html"
    write_atomic(path, render_bench(read_bench(run), run.root))
    return path


def render_bench(report: Row, root: Path) -> str:
    """The page as HTML, without external resources."""
    lines, legend = _lines(report["rows"])
    columns = _columns(report)
    rows = [
        {
            "cells": [*_settings(row), *_measured(report, row)],
            "best": _is_best(report, number),
            "why": _why(row),
        }
        for number, row in enumerate(report["rows"])
    ]
    return template("bench.html").render(
        name=report["name"],
        root=str(root),
        sentence=_sentence(report),
        lines=lines,
        legend=legend,
        bars=_bars(report),
        columns=[*SETTINGS, *columns],
        rows=rows,
        formula=report["formula"],
        about=_title(report),
        version=report["ingot"],
        measured=time.strftime("%Y-%m-%d %H:%M", time.localtime(report["time"])),
    )


def _title(report: Row) -> str:
    """What was measured, and on which device."""
    measured = next((row for row in report["rows"] if row["status"] == "measured"), None)
    on = f", {_parameters(measured)}, on {measured['device']}" if measured else ""
    rows = "made-up rows" if report["synthetic"] else "the recipe's data"
    batch = f"{report['global_batch']:,} rows of {report['seq_len']:,} tokens a step"
    return (
        f"{report['name']}: {report['objective']} of {report['model']}{on}; {batch}, {rows}, "
        f"{report['steps']} steps a row, {duration(report['seconds'])} in all"
    )


def _parameters(row: Row) -> str:
    """Of a mixture of experts, those that one token meets too."""
    whole = row["parameters"]
    active = row["active_parameters"]
    few = "" if active == whole else f" ({count(active)} active for a token)"
    return f"{count(whole)} parameters{few}"


def _sentence(report: Row) -> str:
    best = report["best"]
    if best is None:
        return "Not one row could be measured."
    share = report["rows"][best["row"]]["share_of_peak"]
    of_peak = "" if share is None else f", {_percent(share)} of what a large matrix product reaches"
    return (
        f"Fastest with {best['told']}: {best['tokens_per_s']:,.0f} tokens a second{of_peak}. In the"
        f" recipe: {' '.join(best['knobs'])}"
    )


def _columns(report: Row) -> list[str]:
    """The measured columns; those of a GPU only if there was one."""
    gpu = any(row.get("gpu") is not None for row in report["rows"])
    return [name for name in MEASURED if gpu or not name.startswith("GPU")]


def _settings(row: Row) -> list[str]:
    return [str(row["devices"]), str(row["precision"]), str(row["micro_batch"])]


def _measured(report: Row, row: Row) -> list[str]:
    if row["status"] != "measured":
        return []
    figures = {
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "examples/s": short(row["examples_per_s"], 3),
        "share of peak": _percent(row["share_of_peak"]),
        "peak TFLOP/s": short(row["peak_flops"] / 1e12, 3),
        "CPU": _percent(row["cpu"]),
        "host memory": _percent(row["host_memory"]),
        "GPU": _percent(row["gpu"]),
        "GPU memory": _percent(row["gpu_memory"]),
        "process memory": f"{row['process_memory_bytes'] / GB:.2f} GB",
    }
    return [figures[name] for name in _columns(report)]


def _why(row: Row) -> str:
    return "" if row["status"] == "measured" else f"{row['status']}: {row['reason']}"


def _percent(share: float | None) -> str:
    return "no formula" if share is None else f"{100 * share:.1f} %"


def _is_best(report: Row, number: int) -> bool:
    return report["best"] is not None and report["best"]["row"] == number


def _bars(report: Row) -> Markup:
    drawn = []
    for number, row in enumerate(report["rows"]):
        if row["status"] == "measured":
            name = " × ".join(_settings(row))
            drawn.append(
                (
                    name,
                    float(row["tokens_per_s"]),
                    f"{row['tokens_per_s']:,.0f}",
                    "own" if _is_best(report, number) else "other",
                )
            )
    return bar_chart(drawn)


def _lines(rows: Sequence[Row]) -> tuple[Markup, list[dict[str, str]]]:
    """Speed and memory over the micro-batch, a curve for each number of processes and format; empty
    where only one size was measured.
    """
    curves_of: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row["status"] == "measured":
            curves_of.setdefault((row["devices"], row["precision"]), []).append(row)
    curves_of = {
        kind: sorted(rows_of_kind, key=lambda row: row["micro_batch"])
        for kind, rows_of_kind in curves_of.items()
        if len(rows_of_kind) > 1
    }
    speed, memory, legend = [], [], []
    for number, ((devices, precision), rows_of_kind) in enumerate(curves_of.items()):
        name, colour = f"{devices} × {precision}", COLOURS[number % len(COLOURS)]
        xs = [float(row["micro_batch"]) for row in rows_of_kind]
        speed.append(
            PlotLine(name, colour, xs, [row["tokens_per_s"] for row in rows_of_kind], "dots")
        )
        memory.append(
            PlotLine(
                f"{name}, GB",
                colour,
                xs,
                [row["process_memory_bytes"] / GB for row in rows_of_kind],
                "dots",
            )
        )
        legend.append({"name": name, "colour": colour})
    panels = [
        PlotPanel(speed, 260, floor=True),
        PlotPanel(memory, 120, tick_count=3, floor=True, title="peak memory of a process, GB"),
    ]
    return line_chart(panels, "Tokens a second and memory by micro-batch", "micro-batch"), legend
