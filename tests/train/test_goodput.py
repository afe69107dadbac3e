"""Where the time of a training goes, and what an attempt that died has lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.base.heartbeat import HeartbeatWriter, TimeUse, heartbeat_file
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.checkpoints.saver import Saved
from ingot.train.goodput import EventSink, TimeAccount, record_lost_time
from ingot.train.step import BatchCounts, StepInfo, StepOutcome


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


def test_who_ended_in_good_order_has_lost_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    heart = HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=1)
    heart.spent["productive"] = 9.0
    heart.beat("over", step=4)
    record_lost_time(run, EventSink(run.events, heart, is_main=True))
    assert not list(read_lines(run.events))


def test_each_second_is_of_one_use_and_safe_with_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is written while steps go on, and another may begin before it is committed."""
    now, zero = [0.0], torch.tensor(0.0)
    monkeypatch.setattr("ingot.train.goodput.time.monotonic", lambda: now[0])
    run = RunFolder(tmp_path)
    heart = HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=1)
    account = TimeAccount(heart, EventSink(run.events, heart, is_main=True))

    def done(step: int, seconds: float) -> None:
        with account.spending("waiting"):
            now[0] += 1
        now[0] += seconds
        counts, outcome = BatchCounts(1, 1, 1), StepOutcome(zero, zero, zero)
        account.after_step(StepInfo(step, 1, counts, outcome, 0.1))

    def spent(of: dict[TimeUse, float]) -> tuple[float, float]:
        return of["productive"], of["waiting"]

    heart.beat("first step")
    done(1, 60)
    done(2, 4)
    assert heart.usual_s == 4, "the first one compiles"
    account.snapshot(2)
    done(3, 4)
    account.snapshot(3)
    done(4, 4)
    assert spent(heart.spent) == (72, 4)
    for step in (2, 3):
        account.committed(Saved(step, tmp_path, 0.0, 0.0, 0))
    assert [spent(event["spent"]) for event in read_lines(run.events)] == [(64, 2), (4, 1)]
    assert spent(heart.spent) == (4, 1)
