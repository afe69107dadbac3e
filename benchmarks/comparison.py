"""What all comparisons share: a table of contenders, the ratios read off it, and the machine that
they ran on.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ingot
from benchmarks.turns import Contender, Result, ratio
from ingot.base.environment import usable_cores
from ingot.models.device import device_name


@dataclass(frozen=True)
class Comparison:
    """A table of contenders and the ratios that are read off it; `unit` is what their rates
    count.
    """

    title: str
    unit: str
    contenders: list[Contender]
    ratios: list[tuple[str, str]]
    """Pairs of names: how many times the second one's rate is the first one's."""
    notes: list[str] = field(default_factory=list)


def show(
    comparison: Comparison, results: Sequence[Result], console: Console
) -> list[dict[str, Any]]:
    """Print one comparison; answer its ratios."""
    table = Table(
        "",
        f"{comparison.unit}/s",
        "CPU-seconds a turn",
        "memory, MB",
        title=comparison.title,
        title_justify="left",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        cpu = sorted(result.cpu_seconds)[len(result.cpu_seconds) // 2]
        table.add_row(
            result.name, f"{result.rate:,.1f}", f"{cpu:.2f}", f"{result.memory_bytes / 1e6:,.0f}"
        )
    console.print(table)
    by_name = {result.name: result for result in results}
    found = []
    for one, other in comparison.ratios:
        middle, least, most = ratio(by_name[one], by_name[other])
        found.append({"of": one, "over": other, "median": middle, "least": least, "most": most})
        console.print(f"{one} / {other}: {middle:.2f} ({least:.2f} to {most:.2f})")
    for note in comparison.notes:
        console.print(note, style="dim")
    return found


def machine(threads: int) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "ingot": ingot.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "cores": usable_cores(),
        "threads": threads,
        "date": time.strftime("%Y-%m-%d"),
    }
