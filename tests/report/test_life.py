from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.base.heartbeat import HeartbeatWriter, heartbeat_file
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import record_event
from ingot.report.failures import last_failure
from ingot.report.formatting import moment
from ingot.report.headline import headline
from ingot.report.living import show_page
from ingot.report.run_view import read_run
from ingot.report.tables import run_json, show_run
from ingot.ui.runs import row
from tests.report.made_up import made_up_run
from tests.report.seen import Page

TRAINS = """
import sys, time
from pathlib import Path
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.runfolder import RunFolder, folder_lock
run = RunFolder(Path(sys.argv[1]))
with folder_lock(run.root):
    HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=1).beat("step", step=100)
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in the middle of its training."""
    run = made_up_run(tmp_path / "runs", steps=100)
    for path in (*run.steps.glob("*.json"), *run.reports.glob("*.json"), run.events):
        path.unlink()
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    return run


def told_of(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> str:
    show_run(run)
    return capsys.readouterr().out


def test_the_saved_step_is_told_not_the_one_that_was_logged_last(run: RunFolder) -> None:
    """Events of an earlier training of the folder say nothing of the one that began anew."""
    record_event(run.events, "stop", step=0, cause="SIGTERM")
    assert read_run(run).state == "stopped, nothing is saved yet"
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    record_event(run.events, "save", step=80)
    record_event(run.events, "stop", step=103, cause="SIGTERM")
    assert read_run(run).state == "stopped at step 103"
    record_event(run.events, "start", step=80, cause="resumed", last=1000)
    assert read_run(run).saved_step == 80
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    assert read_run(run).saved_step is None


def test_a_training_that_was_killed_is_not_running(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody was left to say so: the locks that the kernel released and the last beat tell."""
    trains = subprocess.Popen(
        [sys.executable, "-c", TRAINS, str(run.root)], stdout=subprocess.PIPE, text=True
    )
    assert trains.stdout is not None
    assert trains.stdout.readline() == "held\n"
    assert read_run(run).state == "running"
    show_page(run, "train")
    trains.send_signal(signal.SIGKILL)
    trains.communicate()
    view = read_run(run)
    assert view.last_sign == pytest.approx(time.time(), abs=60)
    assert "machine stopped; nothing is saved yet" in told_of(run, capsys)
    # A sign of life, too, maybe of the next second.
    record_event(run.events, "save", step=80)
    view = read_run(run)
    told = f"last sign of life {moment(view.last_sign)} at step 100, and no process"
    assert f"not running: {told}" in told_of(run, capsys)
    assert "machine stopped; step 80 is saved" in (shown_now := told_of(run, capsys))
    assert "at step 100 (step 80 is saved): train/loss" in shown_now
    assert (run_json(run)["step"], run_json(run)["saved_step"]) == (100, 80)
    assert run_json(run)["last_sign"] == view.last_sign
    shown = row("run", view)
    assert (shown["state"], shown["mood"], shown["running"]) == (
        "not running",
        "bad",
        False,
    )
    failure = last_failure(view)
    assert failure is not None
    assert failure.title == "train broken off at step 100"
    assert told in failure.cause
    assert f"ingot run {run.recipe}" in failure.command
    page = Page(run.reports / "index.html")
    assert "running: train" in page.text, "it holds no script, and nobody writes it again"
    assert f"its process is gone: ingot show run {run.root} tells" in page.text


def test_a_run_on_another_machine_is_at_work_while_it_is_heard_of(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks cannot be seen from here."""
    HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=1).beat("step", step=100)
    assert not read_run(run).running, "a beat of this machine, where no process holds the run"
    file = heartbeat_file(run.heartbeats)
    file.rename(run.heartbeats / "another")
    assert read_run(run).running
    monkeypatch.setattr("ingot.base.heartbeat.FRESH_S", -1.0)
    assert read_run(run).broken_off


def test_a_machine_whose_clock_was_ahead_is_not_heard_of_until_then(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as ahead:
        ahead.setattr("time.time", lambda now=time.time: now() + 86_400)
        HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=1).beat("step", step=100)
    heartbeat_file(run.heartbeats).rename(run.heartbeats / "another")
    assert read_run(run).broken_off


def test_copied_files_are_no_sign_of_life(run: RunFolder) -> None:
    """A copy has their times anew."""
    os.utime(run.metrics)
    events = [{**json.loads(line), "t_wall": 1.75e9} for line in run.events.open()]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    view = read_run(run)
    assert view.changed > 1.76e9
    assert view.last_sign is not None
    assert view.last_sign < 1.76e9
    assert headline(view).state == "not running"


def test_what_goes_on_with_a_moved_run_goes_on_there(run: RunFolder) -> None:
    moved = RunFolder(run.root.rename(run.root.parent / "copy of it"))
    failure = last_failure(read_run(moved))
    assert failure is not None
    assert failure.command == (
        f"ingot run '{moved.recipe}' output={moved.root.parent} 'name=copy of it'"
    )
