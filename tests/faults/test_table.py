"""The table of planted faults does not rot: each text stands once in its file, and what it becomes
is another program.
"""

from __future__ import annotations

import ast
import contextlib
import tokenize
from collections import Counter

import pytest

from tests.faults.mutants import drawn
from tests.faults.runner import likely
from tests.faults.table import FAULTS
from tests.graph import PROJECT


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len(FAULTS) >= 120
    assert [id for id, count in Counter(fault.id for fault in FAULTS).items() if count > 1] == []


def test_each_stands_once_in_its_file_and_changes_the_program() -> None:
    wrong = []
    for fault in FAULTS:
        text = (PROJECT / fault.file).read_text(encoding="utf-8")
        if text.count(fault.old) != 1:
            wrong.append(f"{fault.id}: its text stands {text.count(fault.old)} times")
        elif tokens(fault.old) == tokens(fault.new):
            wrong.append(f"{fault.id} changes nothing")
        elif fault.file.endswith(".py"):
            compile(text.replace(fault.old, fault.new), fault.id, "exec")
        if fault.by and not (PROJECT / fault.by).exists():
            wrong.append(f"{fault.id}: {fault.by} is gone")
    assert not wrong, "\n".join(wrong)


def tokens(text: str) -> list[str]:
    """Those that make a difference to the program; a part of a file may end anywhere."""
    found, lines = [], iter([*text.lstrip().splitlines(keepends=True), ""])
    with contextlib.suppress(tokenize.TokenError, IndentationError):
        for token in tokenize.generate_tokens(lambda: next(lines, "")):
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
                found.append(token.string)
    return found


def test_comments_and_breaks_of_lines_are_no_change() -> None:
    assert tokens("a = f(\n    1,  # one\n") == tokens("a = f(1,")
    assert tokens("a = f(1)") != tokens("a = f(2)")


@pytest.mark.drawn("the graph of imports")
def test_a_fault_is_tried_first_where_it_is_likely_to_be_caught() -> None:
    fault = next(fault for fault in FAULTS if fault.by)
    assert likely(fault)[0] == fault.by
    one_of_each = {fault.file: fault for fault in FAULTS}.values()
    assert all(likely(fault) for fault in one_of_each), "some file is seen by no test"


@pytest.mark.parametrize("seed", [1, 2])
def test_mutants_are_drawn_alike_and_parse(seed: int) -> None:
    mutants = drawn(40, seed)
    assert mutants == drawn(40, seed)
    for mutant in mutants:
        text = (PROJECT / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant
        ast.parse(text.replace(mutant.old, mutant.new))
        assert mutant.old != mutant.new
