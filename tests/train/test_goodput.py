"""What an attempt that died has lost, as the next one records it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.base.heartbeat import HeartbeatWriter, heartbeat_file
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.train.goodput import EventSink, record_lost_time


def test_what_the_last_attempt_lost_is_recorded_whatever_its_clock_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, the first one's machine was an hour ahead, and its loss is recorded twice."""
    run = RunFolder(tmp_path)
    for attempt, step, wall in ((1, 900, 8600.0), (2, 1400, 8000.0)):
        heart = HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=attempt)
        heart.spent["productive"] = step / 10
        with monkeypatch.context() as clock:
            clock.setattr("time.time", lambda wall=wall: wall)
            heart.beat("step", step=step)
        heartbeat_file(run.heartbeats).rename(run.heartbeats / f"machine-{attempt}")
        record_lost_time(run, EventSink(run.events, heart, is_main=True))
        heart.close()
    told = [(event["steps"], event["seconds"]) for event in read_lines(run.events)]
    assert told == [(900, 90.0), (1400, 140.0)]
