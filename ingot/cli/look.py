"""Tables that the command line shows itself: the data of a run, and a report that stands already. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.evaluation import read_report
from ingot.base.markers import read_marker
from ingot.base.runfolder import RunFolder
from ingot.cli.arguments import read_recipe

PLAIN_WIDTH = 140


def console() -> Console:
    """On a terminal as wide as that, elsewhere wide enough for paths."""
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


def run_folder(target: str) -> RunFolder:
    """Of a run folder itself, or of the recipe that makes it."""
    return RunFolder(Path(target)) if Path(target).is_dir() else read_recipe([target]).folder


def show_data(target: str) -> int:
    """Documents, tokens and bytes of every source, what was skipped, and what it was made with."""
    run = run_folder(target)
    raw, columns = read_marker(run.raw, "manifest.json"), read_marker(run.columns, "manifest.json")
    if raw is None:
        raise WrongInput(f"{run.raw} holds no ingested documents; run `ingot ingest` first")
    out = console()
    out.print(_sources("ingested documents", raw["splits"], ("documents", "bytes")))
    skipped = [(source["source"], source.get("bad", {}), source.get("examples", [])) for sources in raw["splits"].values() for source in sources]
    for name, bad, examples in skipped:
        if bad:
            out.print(f"{name}: skipped {', '.join(f'{count:,} {reason}' for reason, count in bad.items())}, such as {examples[0]}", soft_wrap=True)
    if columns is None:
        out.print("nothing is prepared yet; `ingot prepare` does it")
        return 0
    out.print(_sources("prepared columns", columns["splits"], ("documents", "tokens", "bytes")))
    out.print(f"tokenizer {columns['tokenizer']}, vocabulary {columns['vocab_size']:,}, data {columns['data']}")
    return 0


def _sources(title: str, splits: dict[str, list[dict[str, Any]]], figures: tuple[str, ...]) -> Table:
    table = Table("split", "source", *figures, title=title, title_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    for split, sources in splits.items():
        for source in sources:
            table.add_row(split, Text(source["source"]), *(f"{source[name]:,}" for name in figures))
    return table


def show_report(run: RunFolder) -> None:
    """The metrics in `reports/evaluate.json`, as `ingot evaluate` showed them when it wrote them."""
    report = read_report(run.reports / "evaluate.json")
    table = Table("metric", "value", "95 % interval", "n")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, metric in report.metrics.items():
        table.add_row(key, f"{metric.value:.4f}", f"{metric.ci_low:.4f} to {metric.ci_high:.4f}", f"{metric.n:,}")
    for name, value in report.baselines.items():
        table.add_row(f"bits per byte of {name}", f"{value:.4f}")
    console().print(table)
