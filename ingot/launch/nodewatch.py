"""What a node looks at while its ranks run: whether another node has failed, what the ranks are
asked, whether the launcher is still there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ingot.base.errors import Failed, IngotError, Stopped
from ingot.base.heartbeat import heartbeat_file
from ingot.launch.attempt import WELL
from ingot.launch.job import Job
from ingot.launch.meeting import EXIT, Meeting
from ingot.launch.ranks import LocalRanks
from ingot.launch.stops import Stops
from ingot.launch.tie import Tie

GRACE_S = 5.0
"""How long our ranks may go on when those of another node have failed: they may still have
something to say.
"""
LOOK_FOLDER_S, LOOK_BUCKET_S = 0.5, 5.0
FLUSH_S = 5.0
"""Between two times that signs of life are written through to a network disk, which would keep them
back for half a minute.
"""
LAUNCHER = "launcher"


class NodeWatch:
    """`because` names what ended our ranks, where that was no fault of theirs: the number of
    another node, or the launcher.
    """

    def __init__(self, job: Job, number: int, stops: Stops, tie: Tie | None) -> None:
        # Another one than the notes of this node are left by: not being answered by a bucket must
        # not keep us from handing on a signal.
        self._meeting = Meeting(job.meet, patience_s=5.0) if job.meet else None
        self._job, self._number, self._stops, self._tie = job, number, stops, tie
        self._look_s = (
            LOOK_FOLDER_S if self._meeting is None or self._meeting.is_folder else LOOK_BUCKET_S
        )
        self._next = time.monotonic()
        self._until: float | None = None
        self._seen: set[str] = set()
        self.ranks: LocalRanks | None = None
        self.because: str | None = None
        self.told = ""

    def look(self) -> bool:
        """Whether the ranks are to be ended."""
        now = time.monotonic()
        if (
            self._tie is not None
            and self.because is None
            and (broken := self._tie.broken()) is not None
        ):
            self.because, self.told, self._until = LAUNCHER, broken, now
            _speak_to_nobody()
        if self._until is not None:
            return now >= self._until
        if self._meeting is None or now < self._next:
            return False
        self._next = now + self._look_s
        with contextlib.suppress(IngotError, OSError):  # asked again soon
            for asked in self._meeting.signals(self._seen):
                self.hand_on(int(asked["number"]), asked.get("rank"))
            if (other := self._failed_other()) is not None:
                self.because, self.told, self._until = (
                    str(other),
                    f"node {other} failed",
                    now + GRACE_S,
                )
        return False

    def look_while_meeting(self) -> None:
        """The same before there are ranks. Raises Stopped when we are asked to, and Failed when not
        all will come.
        """
        if self._tie is not None and (broken := self._tie.broken()) is not None:
            self.because = LAUNCHER
            _speak_to_nobody()
            raise Failed(broken)
        numbers = (
            [int(asked["number"]) for asked in self._meeting.signals(self._seen)]
            if self._meeting is not None
            else []
        )
        number = self._stops.asked or next(
            (
                number
                for number in numbers
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
            ),
            0,
        )
        if number:
            raise Stopped(
                f"stopped by {signal.Signals(number).name} before all nodes had come",
                signum=number,
                committed=False,
            )
        if (other := self._failed_other(ended=True)) is not None:
            self.because = str(other)
            raise Failed(f"node {other} ended before all nodes had come; see what it says")

    def hand_on(self, number: int, rank: int | None) -> None:
        """A signal to a rank of the job, or to all, as far as they are ours."""
        if self.ranks is None:
            return
        first = self._number * self._job.processes
        for each in self.ranks.running():
            if rank is not None and first + each != rank:
                continue
            if number == signal.SIGUSR2:
                self.ranks.send_if_caught(number, each)
            else:
                self.ranks.send(number, each)

    def _failed_other(self, *, ended: bool = False) -> int | None:
        """Another node whose ranks have failed, or that has `ended` at all."""
        if self._meeting is None or self._job.nodes == 1:
            return None
        notes = self._meeting.notes(EXIT)
        return next(
            (
                number
                for number, note in sorted(notes.items())
                if number != self._number and (ended or int(note["code"]) not in WELL)
            ),
            None,
        )


def _speak_to_nobody() -> None:
    """Nobody hears us any more, and a word into a closed connection would end us before our ranks
    are ended.
    """
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)


@contextlib.contextmanager
def flushing(root: Path) -> Iterator[None]:
    """While entered, this node's signs of life reach a network disk within seconds: what is written
    through memory is kept back there.
    """
    over = threading.Event()

    def go_on() -> None:
        path = heartbeat_file(root / "heartbeats")
        while not over.wait(FLUSH_S):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    # Never waited for: a disk that does not answer would keep us here.
    threading.Thread(target=go_on, daemon=True).start()
    try:
        yield
    finally:
        over.set()
