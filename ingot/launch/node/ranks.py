"""The ranks of a job on this node: processes in one process group, with torchrun's variables, which
the kernel kills when this process dies.

Not started by torchrun's agent, which hides exit codes and imports torch.
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

from ingot.base.environment import (
    HOST_VARIABLE,
    RESULTS_VARIABLE,
    host_name,
    threads_asked_for,
    usable_cores,
)
from ingot.base.errors import Failed
from ingot.base.heartbeat import Heartbeat, heartbeat_file, read_beats
from ingot.base.processes import handles_signal, own_python, preexec_die_with_parent
from ingot.launch.attempt import NON_FAILURE_CODES, AttemptExit
from ingot.launch.job import Job

GRACE_S = 2.0
"""How long the other ranks may go on after one has failed, to report their own errors."""
KILL_TIMEOUT_S = 30.0
"""How long a killed process may take to disappear; beyond that it is stuck in the kernel."""
STACKS_S = 1.0
"""How long a rank may take to write its stacks; one that is stopped or stuck in the kernel never
does.
"""
PORTS = range(20_000, 30_000)
"""Below the ephemeral ports, so that no other process takes the port between our probe and rank 0's
bind.
"""


@dataclass(frozen=True)
class NodePosition:
    """Which node of a job this machine is, and where the ranks of all nodes form their process
    group; without an address, on a free port of this machine.
    """

    node: int = 0
    address: str = ""
    port: int = 0


def rank_command(job: Job) -> list[str]:
    """The command line of one rank."""
    return [*own_python(), "-m", "ingot", *job.argv]


def environment(job: Job) -> dict[str, str]:
    """Variables added to this process's environment; each rank gets an equal share of the cores."""
    added = dict(job.environment)
    if job.processes > 1 and threads_asked_for() is None:
        added.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // job.processes)))
    return added


class LocalRanks:
    """An attempt (`ingot.launch.attempt.Attempt`) on this machine, whose ranks are numbered from 0
    on every node.

    Messages go to our stderr, and so do results unless `results` is given. `heartbeats` is the
    run's folder of heartbeats, if its ranks send any. Start it from a thread that lives as long as
    the process: the kernel kills the ranks when that thread ends.
    """

    stacks_s = STACKS_S

    def __init__(
        self,
        job: Job,
        *,
        results: TextIO | None = None,
        heartbeats: Path | None = None,
        position: NodePosition = NodePosition(),
    ) -> None:
        self._heartbeats = heartbeats
        self._processes: list[subprocess.Popen[bytes]] = []
        self._codes: dict[int, int] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._first: AttemptExit | None = None
        self._end_at, self._group_ended = 0.0, False
        self._forwarded: set[int] = set()
        shared = {**os.environ, **environment(job), HOST_VARIABLE: host_name()}
        if results is None:
            shared[RESULTS_VARIABLE] = "1"
        if job.world > 1:
            port = position.port or free_port()
            shared |= {
                "WORLD_SIZE": str(job.world),
                "LOCAL_WORLD_SIZE": str(job.processes),
                "GROUP_RANK": str(position.node),
                "GROUP_WORLD_SIZE": str(job.nodes),
                "MASTER_ADDR": position.address or "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        try:
            for rank in range(job.processes):
                own = (
                    {"RANK": str(position.node * job.processes + rank), "LOCAL_RANK": str(rank)}
                    if job.world > 1
                    else {}
                )
                # A process group of their own: Ctrl-C reaches them once (from us) and not twice.
                self._processes.append(
                    subprocess.Popen(
                        rank_command(job),
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
        """The first rank's process id is the group's id; 0 creates the group."""
        return self._processes[0].pid if self._processes else 0

    def poll(self) -> AttemptExit | None:
        ended = {
            rank: code
            for rank in self.running()
            if (code := self._processes[rank].poll()) is not None
        }
        self._codes |= ended
        if self._first is None and (
            failed := {rank: code for rank, code in ended.items() if code not in NON_FAILURE_CODES}
        ):
            # Of failures found together, a signal counts first: the other ranks failed because of
            # that rank's end.
            rank = min(failed, key=lambda rank: (failed[rank] > 0, rank))
            self._first = AttemptExit(rank, failed[rank])
            # Ranks that wait for a killed rank have nothing to report; ranks asked to stop may
            # still be saving.
            self._end_at = time.monotonic() + (
                0.0
                if failed[rank] < 0
                else 5 * GRACE_S
                if self._was_asked(failed[rank])
                else GRACE_S
            )
        if self._first is not None and self.running() and time.monotonic() >= self._end_at:
            self.stop()
        if self.running():
            return None
        self._end_group()
        return self._first or AttemptExit(
            *max(self._codes.items(), key=lambda end: (end[1], -end[0]))
        )

    def _was_asked(self, code: int) -> bool:
        return code - 128 in self._forwarded

    def running(self) -> Collection[int]:
        return [rank for rank in range(len(self._processes)) if rank not in self._codes]

    def suspended(self) -> bool:
        return False

    def beats(self) -> dict[int, Heartbeat]:
        if self._heartbeats is None:
            return {}
        ours = {process.pid for process in self._processes}
        # A slot that is being written is skipped: its earlier heartbeat stays.
        self._beats |= {
            beat.rank: beat
            for beat in read_beats(heartbeat_file(self._heartbeats))
            if beat.pid in ours
        }
        return self._beats

    def preempted(self) -> bool:
        return False  # on this machine ranks are only ended by a request

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        self._forwarded.add(number)
        for rank in self.running() if ranks is None else ranks:
            self._processes[rank].send_signal(number)

    def send_if_caught(self, number: int, rank: int) -> None:
        """Send a signal to a rank only if it has installed a handler, since the signal would kill
        it otherwise. Without Linux's /proc it is not sent.
        """
        if handles_signal(self._processes[rank].pid, number):
            self.send(number, [rank])

    def stop(self) -> None:
        """Raises Failed if a process cannot be killed."""
        stopped = list(self.running())
        self._end_group()
        for rank in self.running():
            self._processes[rank].kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
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
            self._first = AttemptExit(stopped[0], self._codes[stopped[0]])
        self._end_group()

    def _end_group(self) -> None:
        """Kill child processes of the ranks."""
        if self._processes and not self._group_ended:
            self._group_ended = not self.running()  # later its id may be reused
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)


def free_port() -> int:
    """A port of this machine that is not in use."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise Failed(
        f"none of 100 ports tried between {PORTS.start} and {PORTS.stop} is free; end what listens"
        " there"
    )
