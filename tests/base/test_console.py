"""What is printed is what is there, whatever rich would make of it."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.segment import Segment, Segments
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
    out.print(table, sly, Text(sly, "red"), Segments([Segment(sly)]))
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


def test_what_is_made_visible_is_laid_out_as_wide_as_it_is() -> None:
    out = console(file=io.StringIO(), width=40)
    isolated = "The name " + "\u2066Ada\u2069 " * 8 + "is the answer: 42."
    table = Table("completion")
    table.add_row(Text(isolated))
    names = Table("file", "docs")
    names.add_row("\x1b[2Kdata.jsonl", "12")
    out.print(isolated, Text("\x00" * 60 + "END"))
    out.print(table, names)
    printed = out.file.getvalue()  # type: ignore[attr-defined]
    assert printed.count("\\u2066Ada\\u2069") == 16
    assert printed.count("42.") == 2
    assert printed.count("\\x00") == 60
    assert "END" in printed
    assert r"\x1b[2Kdata.jsonl" in printed, "a column is as wide as what it shows"


def test_what_is_made_visible_keeps_the_styles_of_the_text() -> None:
    out = console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    out.print(Text.assemble("a\x01", ("b\x02c", "red"), "\x03", ("d", "green")))
    assert out.file.getvalue() == (  # type: ignore[attr-defined]
        "a\\x01\x1b[31mb\\x02c\x1b[0m\\x03\x1b[32md\x1b[0m\n"
    )


def test_every_console_is_one_of_these() -> None:
    package = Path(ingot.__file__).parent
    made = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"[ =]_?Console\(", path.read_text("utf-8"))
    }
    assert made == {"base/console.py", "base/progress.py"}  # here, and of bars on stderr
