"""In CI nothing is skipped for want of a program: the script installs them all, and says that it is
CI.
"""

from __future__ import annotations

import re

import pytest

from tests.data.engines.places import need
from tests.house.source import PROJECT


@pytest.mark.parametrize(
    ("there", "ci", "skips"),
    [(False, "", True), (False, "1", False), (True, "", False), (True, "1", False)],
)
def test_what_is_missing_skips_tests_but_not_in_ci(
    there: bool, ci: str, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    mark = need(there, "for a reason").mark
    assert (mark.name, mark.args, mark.kwargs) == ("skipif", (skips,), {"reason": "for a reason"})


def test_ci_says_so_and_has_every_program_that_a_test_asks_for() -> None:
    script = (PROJECT / ".ci/run").read_text(encoding="utf-8")
    assert re.search(r"^export CI=1$", script, re.MULTILINE), "it is what tests ask for"
    (listed,) = re.findall(r"^for pair in ([^;]+); do$", script, re.MULTILINE)
    texts = [path.read_text(encoding="utf-8") for path in sorted((PROJECT / "tests").rglob("*.py"))]
    asked = {
        program
        for text in texts
        for call in re.findall(r"\bneed\((\"[^)]*)\)", text)
        for program in re.findall(r"\"([\w-]+)\"", call)
    }
    assert asked >= {"sshd", "slurmctld"}
    assert {*asked, "strace", "java"} <= {pair.partition(":")[0] for pair in listed.split()}
