"""Heartbeats of a node's ranks: one small file with a fixed-size slot per rank, written through a
memory map and read by the supervisor.

A beat costs a microsecond and no system call. Times are from the node's monotonic clock, so that
setting the clock back does no harm; the wall clock is stored beside it, for display.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ingot.base.environment import host_name
from ingot.base.progress import say
from ingot.base.storage import disk_errors

Phase = Literal["loading", "first step", "step", "evaluating", "saving", "exporting", "over"]
PHASES: tuple[Phase, ...] = (
    "loading",
    "first step",
    "step",
    "evaluating",
    "saving",
    "exporting",
    "over",
)
TimeUse = Literal["productive", "waiting", "evaluating", "saving"]
"""The uses of training time: steps, waiting for data, evaluating and sampling, and waiting for a
checkpoint.
"""
TIME_USES: tuple[TimeUse, ...] = ("productive", "waiting", "evaluating", "saving")

_FORMAT = struct.Struct("<Qqqqqqqddddddd")
FRESH_S = 60.0
"""A beat of another machine, whose locks cannot be seen, is that of a process at work so long."""
SLOT_BYTES = 128
"""Size of a slot, with a few spare bytes for later fields."""


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    pid: int
    rank: int
    attempt: int
    step: int
    """Steps done."""
    place: int
    """Progress within the current step, counted from 0: micro-batches, then the phases after them.
    Comparable only between ranks of one layout.
    """
    phase: Phase
    mono: float
    """Time of the beat in monotonic seconds."""
    wall: float
    """Time of the beat in seconds since the epoch."""
    usual_s: float
    """The usual duration of a step, a median; 0 until it is known."""
    spent: dict[TimeUse, float]
    """Seconds since this attempt's last committed checkpoint (or its start), by use: the time lost
    if it dies now.
    """

    @property
    def order(self) -> tuple[int, float]:
        """Later beats of a run have a greater one. The attempt comes first: it may be on a machine
        whose clock is behind that of the one before.
        """
        return self.attempt, self.wall if math.isfinite(self.wall) else 0.0


def heartbeat_file(folder: Path) -> Path:
    """This node's file in the `heartbeats` folder of a run. The name includes the node's rank,
    since nodes of one job may share a host name: containers, or several nodes on a machine.
    """
    node = os.environ.get("GROUP_RANK") or os.environ.get("PET_NODE_RANK") or "0"
    return folder / (host_name() if node == "0" else f"{host_name()}-{node}")


class HeartbeatWriter:
    """This rank's slot. A beat never blocks and never stops a run."""

    def __init__(self, folder: Path, *, rank: int, local_rank: int, attempt: int) -> None:
        self._rank, self._offset = rank, local_rank * SLOT_BYTES
        path = heartbeat_file(folder)
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # Each rank extends the file to its own slot; none ever shortens it. A byte is
                # written rather than the size set: storing through the map to unallocated space on
                # a full disk would kill this process (SIGBUS).
                os.pwrite(descriptor, b"\0", self._offset + SLOT_BYTES - 1)
                self._memory = _mapped(descriptor, self._offset + SLOT_BYTES, path)
            finally:
                os.close(descriptor)
        self.attempt, self.step, self.place, self.usual_s = attempt, 0, 0, 0.0
        self.phase: Phase = "loading"
        self.spent: dict[TimeUse, float] = dict.fromkeys(TIME_USES, 0.0)
        self._count = 0

    def beat(
        self, phase: Phase | None = None, *, step: int | None = None, place: int | None = None
    ) -> None:
        """Record that this rank is alive, and where it is; omitted values stay as they were."""
        self.phase = phase or self.phase
        self.step = self.step if step is None else step
        self.place = self.place if place is None else place
        # Seqlock: an odd count marks a slot that is being written.
        self._count += 2
        values = (
            os.getpid(),
            self._rank,
            self.attempt,
            self.step,
            self.place,
            PHASES.index(self.phase),
            time.monotonic(),
            time.time(),
            self.usual_s,
            *(self.spent[name] for name in TIME_USES),
        )
        struct.pack_into("<Q", self._memory, self._offset, self._count - 1)
        _FORMAT.pack_into(self._memory, self._offset, self._count - 1, *values)
        struct.pack_into("<Q", self._memory, self._offset, self._count)

    def close(self) -> None:
        self._memory.close()


def _mapped(descriptor: int, size: int, path: Path) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, size)
    except OSError as error:
        # Some network and user-space file systems do not support mmap.
        say(
            f"warning: {path} cannot be mapped ({error.strerror}): nobody will see whether this"
            " rank hangs; training goes on"
        )
        return mmap.mmap(-1, size)


def read_beats(path: Path) -> list[Heartbeat]:
    """The last heartbeats of one node's ranks, by local rank. Slots that were never written, or are
    being written now, are left out.
    """
    try:
        return parse_beats(path.read_bytes())
    except OSError:
        return []


def parse_beats(content: bytes) -> list[Heartbeat]:
    """The heartbeats in the content of such a file."""
    beats = []
    for offset in range(0, len(content) - SLOT_BYTES + 1, SLOT_BYTES):
        count, pid, rank, attempt, step, place, phase, mono, wall, usual, *spent = (
            _FORMAT.unpack_from(content, offset)
        )
        if count and not count % 2 and 0 <= phase < len(PHASES):
            beats.append(
                Heartbeat(
                    pid,
                    rank,
                    attempt,
                    step,
                    place,
                    PHASES[phase],
                    mono,
                    wall,
                    usual,
                    dict(zip(TIME_USES, spent, strict=True)),
                )
            )
    return beats


def beats_of_main(folder: Path) -> list[Heartbeat]:
    """The last heartbeats of rank 0 in the `heartbeats` folder of a run, one for each node on which
    it has been.
    """
    found = (beat for path in sorted(folder.glob("*")) for beat in read_beats(path))
    return [beat for beat in found if beat.rank == 0]


def last_beat(folder: Path) -> Heartbeat | None:
    """The last heartbeat of rank 0, that of the last attempt."""
    return max(beats_of_main(folder), key=lambda beat: beat.order, default=None)


def heard_elsewhere(folder: Path) -> bool:
    """Whether a rank on another machine has beaten within FRESH_S and is not over. One from as far
    in the future is of a clock that is ahead, and may be of any time.
    """
    here, now = host_name(), time.time()
    return any(
        abs(beat.wall - now) < FRESH_S and beat.phase != "over"
        for path in folder.glob("*")
        if path.name != here and not path.name.startswith(f"{here}-")
        for beat in read_beats(path)
    )
