"""What is printed is what is there, whatever rich would make of it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.table import Table

import ingot
from ingot.base.console import console

TEXT = "wiki[de] [bold]:b: \\[x] [/]"


def test_texts_are_printed_as_they_are() -> None:
    out = console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    table = Table(TEXT, title=TEXT, title_justify="left")
    table.add_row(TEXT)
    out.print(table, TEXT)
    assert out.file.getvalue().count(TEXT) == 4  # type: ignore[attr-defined]


def test_every_console_is_one_of_these() -> None:
    package = Path(ingot.__file__).parent
    made = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if " Console(" in (text := path.read_text("utf-8")) or "=Console(" in text
    }
    assert made == {"base/console.py", "base/progress.py"}  # here, and of bars on stderr
