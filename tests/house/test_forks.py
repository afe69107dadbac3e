"""What the fork server starts is as a new interpreter would be: everything else is proved on it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.commands import ingot, ingot_afresh, start_ingot
from tests.forks import can_fork, start_call
from tests.ranks import run_ranks


@pytest.mark.parametrize(
    "arguments", [("--version",), ("explain", "train.steps"), ("train", "missing.yaml"), ("bogus",)]
)
def test_a_command_ends_as_in_a_new_interpreter(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ours, real = (run(*arguments, cwd=tmp_path) for run in (ingot, ingot_afresh))
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        real.returncode,
        real.stdout,
        real.stderr,
    )


def test_it_has_its_own_environment_and_folder(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: here\ndata:\n  train: [{source: text}]\n")
    plain = ingot("show", "config", "r.yaml", cwd=tmp_path)
    seeded = ingot("show", "config", "r.yaml", cwd=tmp_path, INGOT_SEED="12345")
    assert "12345" in seeded.stdout
    assert plain.stdout
    assert "12345" not in plain.stdout


def test_pipes_signals_and_exit_codes(tmp_path: Path) -> None:
    process = start_ingot("show", "knobs", stdout=subprocess.PIPE, cwd=tmp_path)
    out, _ = process.communicate(60)
    assert process.returncode == 0
    assert "train.steps" in out
    asleep = start_call(_sleep)
    time.sleep(0.1)
    asleep.send_signal(signal.SIGKILL)
    assert asleep.wait(30) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(asleep.pid, 0)


def test_an_environment_that_libraries_have_read_needs_a_new_interpreter() -> None:
    assert can_fork({**os.environ, "WHATEVER": "1"})
    assert not can_fork({**os.environ, "PYTHONHASHSEED": "7"})


def test_a_rank_that_fails_is_told_at_once() -> None:
    before = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:\n[^$]*ValueError: mine"):
        run_ranks(2, _fail_on_one)
    assert time.monotonic() - before < 30


def _sleep() -> None:
    time.sleep(60)


def _fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("mine")
    time.sleep(60)
