"""The ranks of a job on this node: processes in one group, with torchrun's variables, which the
kernel ends when we die.

Not torchrun's agent: exit codes come back as they are, the processes are ours, and nothing here
loads torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ingot.base.errors import Failed
from ingot.base.heartbeat import Heartbeat, heartbeat_file, read_beats
from ingot.base.processes import handles_signal, preexec_die_with_parent
from ingot.launch.attempt import WELL, Exit
from ingot.launch.job import Job

GRACE_S = 2.0
"""How long the other ranks have to say their own last word when one has failed: they wait for it in
vain.
"""
END_S = 30.0
"""How long a killed process may take to be gone; longer, and it is stuck in the kernel."""
STACKS_S = 1.0
"""How long a rank may take to write its stacks. One that is stopped, or stuck in the kernel, never
does.
"""
PORTS = range(20_000, 30_000)
"""Below those that a system gives to whoever asks for any, so that nobody gets ours between our
look and rank 0's.
"""


@dataclass(frozen=True)
class Node:
    """Which node of a job this machine is, and where the ranks of all of them meet; without an
    address, on a free port of this machine.
    """

    number: int = 0
    address: str = ""
    port: int = 0


def python(job: Job) -> list[str]:
    """The command line of one rank."""
    return [sys.executable, "-m", "ingot", *job.argv]


def environment(job: Job) -> dict[str, str]:
    """What is added to this process's environment. The cores are shared out over the processes."""
    added = dict(job.environment)
    if job.processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        added.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // job.processes)))
    return added


class LocalRanks:
    """An attempt (`ingot.launch.attempt.Attempt`) on this machine. Its ranks are counted from 0
    whichever node it is.

    Messages go to our stderr, and so does the result unless `results` says where to. `heartbeats`
    is the run's folder of
    signs of life, where its ranks give any. Start it from a thread that lives as long as the
    process: the kernel ends the ranks when that thread is gone.
    """

    stacks_s = STACKS_S

    def __init__(
        self,
        job: Job,
        *,
        results: TextIO | None = None,
        heartbeats: Path | None = None,
        node: Node = Node(),
    ) -> None:
        self._heartbeats = heartbeats
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._first: Exit | None = None
        self._until, self._gone = 0.0, False
        self._handed: set[int] = set()
        shared = {**os.environ, **environment(job)}
        if job.world > 1:
            port = node.port or free_port()
            shared |= {
                "WORLD_SIZE": str(job.world),
                "LOCAL_WORLD_SIZE": str(job.processes),
                "GROUP_RANK": str(node.number),
                "GROUP_WORLD_SIZE": str(job.nodes),
                "MASTER_ADDR": node.address or "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        try:
            for rank in range(job.processes):
                own = (
                    {"RANK": str(node.number * job.processes + rank), "LOCAL_RANK": str(rank)}
                    if job.world > 1
                    else {}
                )
                # A group of their own, so that Ctrl-C reaches them once (from us) and not twice.
                self._processes.append(
                    subprocess.Popen(
                        python(job),
                        env={**shared, **own},
                        stdin=subprocess.DEVNULL,
                        stdout=(results or sys.stderr).fileno(),
                        process_group=self._group,
                        preexec_fn=preexec_die_with_parent(),
                    )
                )
        except BaseException:
            self.stop()
            raise

    @property
    def _group(self) -> int:
        """The first rank's process id names the group; 0 makes it."""
        return self._processes[0].pid if self._processes else 0

    def poll(self) -> Exit | None:
        ended = {
            rank: code
            for rank in self.running()
            if (code := self._processes[rank].poll()) is not None
        }
        self._codes |= ended
        if self._first is None and (
            failed := {rank: code for rank, code in ended.items() if code not in WELL}
        ):
            # Of those found at once a signal comes first: the others noticed that it was gone.
            rank = min(failed, key=lambda rank: (failed[rank] > 0, rank))
            self._first = Exit(rank, failed[rank])
            # Who waits for a killed one has nothing to tell; who was asked to stop may still be at
            # it.
            self._until = time.monotonic() + (
                0.0
                if failed[rank] < 0
                else 5 * GRACE_S
                if self._was_asked(failed[rank])
                else GRACE_S
            )
        if self._first is not None and (self.running() and time.monotonic() >= self._until):
            self.stop()
        if self.running():
            return None
        self._end_group()
        return self._first or Exit(*max(self._codes.items(), key=lambda end: (end[1], -end[0])))

    def _was_asked(self, code: int) -> bool:
        return code - 128 in self._handed

    def running(self) -> Collection[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self._codes]

    def beats(self) -> dict[int, Heartbeat]:
        if self._heartbeats is None:
            return {}
        ours = {process.pid for process in self._processes}
        # A slot that is being written is not read: what it held before stands.
        self._beats |= {
            beat.rank: beat
            for beat in read_beats(heartbeat_file(self._heartbeats))
            if beat.pid in ours
        }
        return self._beats

    def taken(self) -> bool:
        return False  # whoever stops ranks here asks them, or us

    def send(self, number: int, rank: int | None = None) -> None:
        self._handed.add(number)
        for each in self.running() if rank is None else [rank]:
            self._processes[each].send_signal(number)

    def send_if_caught(self, number: int, rank: int) -> None:
        """A signal to a rank that does something with it; one that does not is left alone (Linux;
        elsewhere nobody is told).
        """
        if handles_signal(self._processes[rank].pid, number):
            self.send(number, rank)

    def stop(self) -> None:
        """Raises Failed when a process cannot be ended."""
        stopped = list(self.running())
        self._end_group()
        for rank in self.running():
            self._processes[rank].kill()
        deadline = time.monotonic() + END_S
        for rank in self.running():
            process = self._processes[rank]
            try:
                self._codes[rank] = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(
                    f"rank {rank} (process {process.pid}) cannot be ended: the kernel waits for a"
                    " disk or a device; see to that"
                ) from None
        if self._first is None and stopped:
            self._first = Exit(stopped[0], self._codes[stopped[0]])
        self._end_group()

    def _end_group(self) -> None:
        """What the ranks themselves have started goes with them."""
        if self._processes and not self._gone:
            self._gone = not self.running()  # from then on the number may become another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise Failed(
        f"none of 100 ports tried between {PORTS.start} and {PORTS.stop} is free; end what listens"
        " there"
    )
