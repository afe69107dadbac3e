"""Tables that the command line shows itself: a report that stands already. Without torch."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ingot.base.evaluation import read_report
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
