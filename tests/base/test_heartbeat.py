"""Signs of life: what is written is read, by any process, and a slot that is being written is left
out.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.base.heartbeat import SLOT_BYTES, HeartbeatWriter, heartbeat_file, read_beats


def test_what_was_said_last_is_read(tmp_path: Path) -> None:
    heart = HeartbeatWriter(tmp_path, rank=3, local_rank=0, attempt=2)
    heart.spent["waiting"] = 1.5
    heart.usual_s = 0.25
    before = time.monotonic()
    heart.beat("step", step=7, place=2)
    heart.beat(place=3)
    (beat,) = read_beats(heartbeat_file(tmp_path))
    assert (beat.pid, beat.rank, beat.attempt, beat.step, beat.place, beat.phase) == (
        os.getpid(),
        3,
        2,
        7,
        3,
        "step",
    )
    assert before <= beat.mono <= time.monotonic()
    assert abs(beat.wall - time.time()) < 60
    assert beat.usual_s == 0.25
    assert beat.spent == {"productive": 0.0, "waiting": 1.5, "evaluating": 0.0, "saving": 0.0}


def test_ranks_have_slots_of_their_own_whoever_comes_first(tmp_path: Path) -> None:
    second = HeartbeatWriter(tmp_path, rank=5, local_rank=1, attempt=1)
    second.beat("loading")
    assert [beat.rank for beat in read_beats(heartbeat_file(tmp_path))] == [5]
    first = HeartbeatWriter(tmp_path, rank=4, local_rank=0, attempt=1)
    first.beat("step", step=1)
    second.beat("step", step=2)
    assert [(beat.rank, beat.step) for beat in read_beats(heartbeat_file(tmp_path))] == [
        (4, 1),
        (5, 2),
    ]


def test_a_slot_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    for local_rank in (0, 1):
        HeartbeatWriter(tmp_path, rank=local_rank, local_rank=local_rank, attempt=1).beat("step")
    path = heartbeat_file(tmp_path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, SLOT_BYTES, 3)
    path.write_bytes(content)
    assert [beat.rank for beat in read_beats(path)] == [0]


def test_no_file_and_garbage_are_no_beats(tmp_path: Path) -> None:
    assert read_beats(tmp_path / "none") == []
    (tmp_path / "torn").write_bytes(b"\xff" * (SLOT_BYTES + 5))
    assert read_beats(tmp_path / "torn") == []


def test_what_a_killed_process_said_stays(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from ingot.base.heartbeat import"
        " HeartbeatWriter\nHeartbeatWriter(Path(sys.argv[1]), rank=0, local_rank=0, attempt=1).beat('saving', step=9);"
        " os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    )
    (beat,) = read_beats(heartbeat_file(tmp_path))
    assert (beat.phase, beat.step) == ("saving", 9)


def test_where_no_file_can_be_mapped_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = mmap.mmap

    def refused(descriptor: int, size: int) -> mmap.mmap:
        if descriptor >= 0:
            raise OSError(errno.ENODEV, "No such device")
        return original(descriptor, size)

    monkeypatch.setattr("mmap.mmap", refused)
    HeartbeatWriter(tmp_path, rank=0, local_rank=0, attempt=1).beat("step", step=1)
    assert (
        "cannot be mapped (No such device): nobody will see whether this rank hangs"
        in capsys.readouterr().err
    )
    assert read_beats(heartbeat_file(tmp_path)) == []
