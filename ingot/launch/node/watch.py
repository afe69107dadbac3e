"""What a node checks while its ranks run: whether another node has failed, which signals to forward
to its ranks, and whether the launcher is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from ingot.base.errors import Failed, IngotError, Stopped
from ingot.base.heartbeat import heartbeat_file
from ingot.launch.attempt import NON_FAILURE_CODES, StopRequests
from ingot.launch.job import Job
from ingot.launch.node.ranks import LocalRanks
from ingot.launch.rendezvous import EXIT, Rendezvous

HEARTBEAT_INTERVAL_S, LEASE_S = 5.0, 45.0
"""Seconds between two heartbeats of the launcher, and the silence after which it counts as gone or
disconnected.
"""
FAILED_NODE_GRACE_S = 5.0
"""How long our ranks may go on after another node's ranks have failed, to report why."""
FOLDER_POLL_S, BUCKET_POLL_S = 0.5, 5.0
FLUSH_INTERVAL_S = 5.0
"""Seconds between two flushes of the heartbeats to a network disk, which would otherwise delay them
by half a minute.
"""
LAUNCHER = "launcher"


class LauncherLease:
    """The lease of a launcher connected to this node through our standard input: its first line
    holds secrets, heartbeats follow. If the connection is closed or silent, the launcher counts as
    gone, and this node ends its ranks, since nobody else would.

    Only reading the first line blocks.
    """

    def __init__(self, descriptor: int = 0, *, lease_s: float = LEASE_S) -> None:
        self._descriptor, self._lease_s = descriptor, lease_s
        self._last_heartbeat = time.monotonic()

    def read_environment(self) -> dict[str, str]:
        """Read the first line: variables as a JSON object. Raises Failed if it does not come."""
        line = b""
        while not line.endswith(b"\n"):
            if not self._is_ready(self._lease_s) or not (byte := self._read(1)):
                raise Failed(
                    "the launcher was gone before it had said what it wanted; start the job again"
                )
            line += byte
        return {str(name): str(value) for name, value in json.loads(line).items()}

    def expired(self) -> str | None:
        """Why the launcher counts as gone; None while it is alive."""
        now = time.monotonic()
        while self._is_ready(0.0):
            if not self._read(4096):
                return "the connection to the launcher was closed"
            self._last_heartbeat = now
        if now - self._last_heartbeat > self._lease_s:
            return f"the launcher sent no heartbeat for {self._lease_s:g} s"
        return None

    def _read(self, most: int) -> bytes:
        try:
            return os.read(self._descriptor, most)
        except ConnectionError:  # reset: treated as closed
            return b""

    def _is_ready(self, seconds: float) -> bool:
        # The descriptor stays blocking, since standard output may be the same socket; and it is
        # polled, since `select` takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


class NodeWatch:
    """`ended_by` names what ended our ranks if not a failure of theirs: the number of another node,
    or the launcher; `reason` describes it.
    """

    def __init__(
        self, job: Job, node: int, stops: StopRequests, lease: LauncherLease | None
    ) -> None:
        # Not the object that leaves this node's notes: this one gives up on a bucket quickly, so
        # that an unresponsive one does not delay signals.
        self._rendezvous = Rendezvous(job.rendezvous, patience_s=5.0) if job.rendezvous else None
        self._job, self._node, self._stops, self._lease = job, node, stops, lease
        self._poll_s = (
            FOLDER_POLL_S
            if self._rendezvous is None or self._rendezvous.is_folder
            else BUCKET_POLL_S
        )
        self._next_poll = time.monotonic()
        self._end_at: float | None = None
        self._seen: set[str] = set()
        self.ranks: LocalRanks | None = None
        self.ended_by: str | None = None
        self.reason = ""

    def check(self) -> bool:
        """Whether the ranks must be terminated now."""
        now = time.monotonic()
        if (
            self._lease is not None
            and self.ended_by is None
            and (reason := self._lease.expired()) is not None
        ):
            self.ended_by, self.reason, self._end_at = LAUNCHER, reason, now
            _discard_output()
        if self._end_at is not None:
            return now >= self._end_at
        if self._rendezvous is None or now < self._next_poll:
            return False
        self._next_poll = now + self._poll_s
        with contextlib.suppress(IngotError, OSError):  # polled again soon
            for note in self._rendezvous.signals(self._seen):
                self.forward(int(note["number"]), note.get("ranks"))
            if (other := self._other_failed_node()) is not None:
                self.ended_by, self.reason = str(other), f"node {other} failed"
                self._end_at = now + FAILED_NODE_GRACE_S
        return False

    def check_while_waiting(self) -> None:
        """The same before ranks are started. Raises Stopped when we are asked to stop, and Failed
        when another node will not come or the launcher is gone.
        """
        if self._lease is not None and (reason := self._lease.expired()) is not None:
            self.ended_by = LAUNCHER
            _discard_output()
            raise Failed(reason)
        notes = self._rendezvous.signals(self._seen) if self._rendezvous is not None else []
        ending = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL)
        numbers = (number for note in notes if (number := int(note["number"])) in ending)
        if number := self._stops.signal_to_forward or next(numbers, 0):
            raise Stopped(
                f"stopped by {signal.Signals(number).name} before all nodes had come",
                signum=number,
                committed=False,
            )
        if (other := self._other_failed_node(or_done=True)) is not None:
            self.ended_by = str(other)
            raise Failed(f"node {other} ended before all nodes had come; see what it says")

    def forward(self, number: int, ranks: Collection[int] | None) -> None:
        """Send a signal to some ranks of the job, or to all of them, if they are on this node."""
        if self.ranks is None:
            return
        first = self._node * self._job.processes
        for local_rank in self.ranks.running():
            if ranks is not None and first + local_rank not in ranks:
                continue
            if number == signal.SIGUSR2:
                self.ranks.send_if_caught(number, local_rank)
            else:
                self.ranks.send(number, [local_rank])

    def _other_failed_node(self, *, or_done: bool = False) -> int | None:
        """Another node whose ranks have failed, or with `or_done`, have ended at all."""
        if self._rendezvous is None or self._job.nodes == 1:
            return None
        for node, note in sorted(self._rendezvous.notes(EXIT).items()):
            if node != self._node and (or_done or int(note["code"]) not in NON_FAILURE_CODES):
                return node
        return None


def _discard_output() -> None:
    """Redirect output to nowhere: the launcher is gone, and writing to its closed pipe would raise
    SIGPIPE before the ranks are terminated.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


@contextlib.contextmanager
def flush_heartbeats(root: Path) -> Iterator[None]:
    """While entered, this node's heartbeats are flushed to a network disk every few seconds; writes
    through a memory map would otherwise stay in the page cache.
    """
    over = threading.Event()

    def repeat() -> None:
        path = heartbeat_file(root / "heartbeats")
        while not over.wait(FLUSH_INTERVAL_S):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

    # Never joined: an unresponsive disk would block us here.
    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        over.set()
