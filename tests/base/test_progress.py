from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from ingot.base import progress as module
from ingot.base.progress import Progress, duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0s"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (187, "3m 07s"),
        (3600, "1h 00m"),
        (7530, "2h 05m"),
    ],
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_without_a_terminal_a_plain_line_comes_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY_S", 0.05)
    with Progress("train", total=1000, unit="steps", done=400) as progress:
        for step in range(401, 441):
            progress.update(step, loss="3.20")
            time.sleep(0.005)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 5
    assert lines[0].startswith("train 4")
    assert "/1,000 steps  loss 3.20" in lines[0]
    # About 590 steps of 5 ms and a little more are left. Reckoned from zero rather than from this
    # process's own first step it would be less than a second.
    assert 2 <= int(lines[0].rsplit("  ", 1)[1].removesuffix("s left")) <= 30


def test_an_unknown_end_shows_no_time_left_and_quiet_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY_S", 0.0)
    with Progress("ingest", total=None, unit="documents") as progress:
        progress.update(12345)
    assert capsys.readouterr().err == "ingest 12,345 documents\n"
    with Progress("ingest", total=None, unit="documents", quiet=True) as progress:
        progress.update(1)
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("train", total=10, unit="steps") as progress:
            progress.update(5, loss="3.20")
            time.sleep(0.3)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "train" in shown
    assert "50%" in shown
    assert "loss 3.20" in shown
