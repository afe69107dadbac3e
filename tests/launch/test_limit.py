"""A command under a time limit: what it says itself, and what ends it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

OVER_TIME = 124
ENDLESS = "while :; do sleep 0.01; done"


def limited(limit_s: float, script: str, session: bool = False) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ingot.launch.limit", str(limit_s), "sh", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=session,
    )


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 128 + signal.SIGKILL)])
def test_in_time_it_is_the_command(script: str, code: int) -> None:
    assert limited(60, f"echo done; {script}").communicate(timeout=PATIENCE_S)[0] == "done\n"
    assert limited(60, script).wait(60) == code


def test_a_limit_that_is_never_reached_is_one() -> None:
    """Longer than a timer can be."""
    assert limited(1e20, "exit 3").wait(60) == 3


def test_a_request_to_stop_reaches_it() -> None:
    process = limited(60, f"trap 'exit 7' TERM; echo ready; {ENDLESS}")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7


@pytest.mark.parametrize("session", [False, True])
def test_over_its_time_it_is_asked_to_end_and_has_failed(session: bool) -> None:
    """In a session of its own its children are, too: the pipe ends with the last of them."""
    child = f"({ENDLESS})&" if session else ""
    process = limited(60, f"trap 'echo asked; exit 0' TERM; {child} echo ready; {ENDLESS}", session)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGALRM)  # as the timer sends it
    assert process.communicate(timeout=PATIENCE_S)[0] == "asked\n"
    assert process.returncode == OVER_TIME


OVER_AT_ONCE = """
import os, signal, subprocess
from ingot.launch.limit import LimitedCommand
start = subprocess.Popen
def slow(command):
    process = start(command)
    os.kill(os.getpid(), signal.SIGALRM)
    return process
subprocess.Popen = slow
raise SystemExit(LimitedCommand(["sleep", "1"], 60).wait())
"""


def test_a_time_that_is_over_while_it_starts_is_not_forgotten() -> None:
    assert subprocess.run([sys.executable, "-c", OVER_AT_ONCE], check=False).returncode == OVER_TIME


def test_its_time_is_what_is_said() -> None:
    assert limited(0.01, ENDLESS).wait(60) == OVER_TIME
