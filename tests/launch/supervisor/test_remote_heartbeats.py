"""Signs of life by way of a bucket: late, missing or many of them keep nobody waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.heartbeat import HeartbeatWriter, heartbeat_file
from ingot.base.remote.bucket import open_bucket
from ingot.launch.supervisor import remote_attempt
from ingot.launch.supervisor.remote_attempt import RemoteHeartbeats
from tests import gcs
from tests.launch.blocking import wait_until

MIRROR = "gs://bucket/ingot/runs/small"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    monkeypatch.setattr(remote_attempt, "HEARTBEAT_POLL_S", 0.05)
    with gcs.serving(monkeypatch) as server:
        yield server


def beat_of(folder: Path, rank: int, step: int) -> bytes:
    HeartbeatWriter(folder / str(rank), rank=rank, local_rank=0, attempt=1).beat("step", step=step)
    return heartbeat_file(folder / str(rank)).read_bytes()


def test_only_what_is_new_is_fetched_and_what_lay_there_does_not_count(
    server: gcs.Server, tmp_path: Path
) -> None:
    bucket = open_bucket(f"{MIRROR}/heartbeats")
    bucket.put("old", beat_of(tmp_path, 5, 9))
    beats = RemoteHeartbeats(tmp_path, MIRROR)
    assert beats.latest() == {}
    bucket.put("a", beat_of(tmp_path, 0, 3))
    bucket.put("b", beat_of(tmp_path, 1, 4))
    wait_until(lambda: {rank: beat.step for rank, beat in beats.latest().items()} == {0: 3, 1: 4})
    fetched = server.counts["media"]
    time.sleep(0.5)
    again = server.counts["media"]
    assert again == fetched == 3
    bucket.put("old", beat_of(tmp_path, 5, 10))
    wait_until(lambda: 5 in beats.latest())
    beats.close()


def test_a_bucket_that_does_not_answer_makes_nobody_wait(
    server: gcs.Server, tmp_path: Path
) -> None:
    bucket = open_bucket(f"{MIRROR}/heartbeats")
    beats = RemoteHeartbeats(tmp_path, MIRROR)
    bucket.put("a", beat_of(tmp_path, 0, 3))
    wait_until(lambda: 0 in beats.latest())
    server.fault("list", code=503, times=10_000)
    wait_until(lambda: beats.trouble is not None)
    assert list(beats.latest()) == [0]
    server.faults.clear()
    wait_until(lambda: beats.trouble is None)
    asked = server.counts["list"]
    server.fault("list", delay_s=30.0)
    wait_until(lambda: server.counts["list"] > asked)
    began = time.monotonic()
    assert list(beats.latest()) == [0]
    assert time.monotonic() - began < 20
    beats.close()


def test_stacks_come_when_they_were_asked_for(server: gcs.Server, tmp_path: Path) -> None:
    stacks = open_bucket(f"{MIRROR}/stacks")
    stacks.put("stacks-rank3.txt", b"Thread 1\n")
    stacks.put("..", b"no file of ours")
    beats = RemoteHeartbeats(tmp_path, MIRROR)
    time.sleep(0.3)
    assert not (tmp_path / "logs").exists()
    beats.fetch_stacks = True
    wait_until((tmp_path / "logs" / "stacks-rank3.txt").exists)
    stacks.put("stacks-rank3.txt", b"2\n")
    wait_until(lambda: (tmp_path / "logs" / "stacks-rank3.txt").read_bytes() == b"2\n")
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["stacks-rank3.txt"]
    beats.close()
