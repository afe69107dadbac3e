"""What `ingot run` shows at its end, on stdout: the served model's answer, one table of the steps,
where the page lies.
"""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ingot.config.recipe import Recipe
from ingot.pipeline.run import Done
from ingot.pipeline.steps import STEPS

PLAIN_WIDTH = 140
MOST_LINES = 20


def show_summary(recipe: Recipe, done: Done) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    if any(record.step == "serve" for record in done.records):
        console.print(_answer(recipe.folder.reports / "predict.json"))
    console.print(_table(recipe, done))
    if len(done.skipped) == len(done.records):
        console.print(f"Nothing changed: all {len(done.records)} steps were skipped.")
    console.print(
        f"The whole run on one page: {recipe.folder.reports / 'index.html'}",
        soft_wrap=True,
        highlight=False,
    )


def _answer(path: Path) -> Panel:
    """What was asked and what came back, its first lines."""
    said = json.loads(path.read_bytes())
    lines = said["completion"].rstrip().split("\n")
    shown = "\n".join(lines[:MOST_LINES])
    answer = Text.assemble(
        (said["prompt"], "bold"),
        shown,
        (
            (
                f"\n... {len(lines) - MOST_LINES} lines more in {path}"
                if len(lines) > MOST_LINES
                else ""
            ),
            "dim",
        ),
    )
    return Panel(answer, title="the served model's answer", title_align="left", expand=False)


def _table(recipe: Recipe, done: Done) -> Table:
    table = Table(title=recipe.name, title_justify="left")
    table.add_column("step")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("result")
    table.add_column("look at", overflow="fold")
    for record in done.records:
        seconds = "unchanged" if record.step in done.skipped else f"{record.seconds:.1f}"
        table.add_row(record.step, seconds, Text(record.result), Text(record.where))
    for step in STEPS[len(done.records) :]:
        table.add_row(step.verb, "", "not done: the gate keeps the live model", "")
    return table
