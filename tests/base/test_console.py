"""What is printed is what is there, whatever rich would make of it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.table import Table
from rich.text import Text

import ingot
from ingot.base.console import console

TEXT = "wiki[de] [bold]:b: \\[x] [/]"


def test_texts_are_printed_as_they_are() -> None:
    out = console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    table = Table(TEXT, title=TEXT, title_justify="left")
    table.add_row(TEXT)
    out.print(table, TEXT)
    assert out.file.getvalue().count(TEXT) == 4  # type: ignore[attr-defined]


def test_a_terminal_obeys_nothing_that_others_wrote() -> None:
    out = console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    sly = "a\x1b]0;title\x07b\x1b[31m\x9b2J\u202ec"
    table = Table(sly, title=sly, title_justify="left")
    table.add_row(Text(sly, "red"))
    out.print(table, sly, Text(sly, "red"))
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    # rich itself leaves the bell out of a `Text`.
    assert set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed)) == {"\x1b"}
    assert set(re.findall("\x1b.[0-9;]*.", printed)) <= {
        "\x1b[31m",
        "\x1b[0m",
        "\x1b[1m",
        "\x1b[3m",
    }
    assert "\x1b[31ma\\x1b]0;title" in printed, "in the colour that ingot gives it"
    assert "\\u202ec" in printed


def test_every_console_is_one_of_these() -> None:
    package = Path(ingot.__file__).parent
    made = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"[ =]_?Console\(", path.read_text("utf-8"))
    }
    assert made == {"base/console.py", "base/progress.py"}  # here, and of bars on stderr
