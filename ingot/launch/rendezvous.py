"""The rendezvous of one start: a folder that all nodes see, or a bucket, in which the nodes leave
notes for each other and for the supervisor.

Signals are sent this way too. That works wherever the nodes are, also from a process that did not
start them, and reaches only the ranks.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Failed
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.service import Missing
from ingot.base.storage import atomic_file, is_remote
from ingot.launch.attempt import NON_FAILURE_CODES, STOP_SIGNALS, AttemptExit
from ingot.launch.job import Handle, Job, JobState

ARRIVED, EXIT, SIGNAL, BOOT, CANCELLED = "here", "exit", "signal", "boot", "cancelled"
MADE = "made"
"""Kinds of notes: a node has arrived, with its version; how its ranks ended; a signal for the
ranks; a machine's progress before its node runs; the job was cancelled; when its machine was first
seen from here.
"""
ENDED_BY = "because"
"""In an exit note: what ended the ranks if it was no failure of theirs, the number of another node
or `launcher`.
"""
SIGNAL_CODES = tuple(code for number in STOP_SIGNALS for code in (-number, 128 + number))
"""Exit codes of ranks that a signal to stop ended."""
BUCKET_POLL_S = 2.0
Version = tuple[int, int]
Note = dict[str, Any]


class Rendezvous:
    """Notes by name, small JSON objects. Reading never raises for a missing note. `patience_s`: how
    long requests to an unresponsive bucket are retried.

    Each version of a note is read once: with a thousand nodes, each of them polls all others.
    """

    def __init__(self, place: str, *, patience_s: float | None = None) -> None:
        self.place = place
        self._bucket = open_bucket(place, patience_s=patience_s) if is_remote(place) else None
        self._cache: dict[str, tuple[Version, Note]] = {}

    @classmethod
    def of(cls, handle: Handle) -> Rendezvous:
        """That of the start that `handle` finds."""
        return cls(handle.about["meet"])

    @property
    def is_folder(self) -> bool:
        return self._bucket is None

    def leave(self, node: int, kind: str, **fields: Any) -> None:
        """Leave a note of this node; a later one of the same kind replaces it."""
        self._write(f"{kind}-{node}.json", {"node": node, "t_wall": time.time(), **fields})

    def notes(self, kind: str) -> dict[int, Note]:
        """The notes of this kind, by node."""
        found = [
            note
            for name, version in self._list(kind).items()
            if (note := self._read_once(name, version)) is not None
        ]
        return {int(note["node"]): note for note in found if "node" in note}

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Leave a signal for some ranks, or for all; nodes poll for it every few seconds."""
        note = {"number": int(number), "ranks": None if ranks is None else list(ranks)}
        self._write(f"{SIGNAL}-{time.time_ns()}.json", note)

    def signals(self, seen: set[str]) -> list[Note]:
        """The signals whose names are not in `seen`, in sending order; their names are added to it.
        `by` names the place if the place itself sent the signal.
        """
        new = {
            name: note
            for name in sorted(self._list(SIGNAL))
            if name not in seen and (note := self._read(name)) is not None
        }
        seen.update(new)
        return list(new.values())

    def wait_for(
        self,
        kind: str,
        nodes: int,
        *,
        timeout_s: float,
        poll_s: float = 0.2,
        check: Callable[[], None] = lambda: None,
    ) -> dict[int, Note]:
        """Wait for the notes of all `nodes`; `check` is called between two polls and may raise.
        Raises Failed, naming the nodes that did not arrive within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while len(found := self.notes(kind)) < nodes:
            if time.monotonic() > deadline:
                absent = ", ".join(str(node) for node in range(nodes) if node not in found)
                raise Failed(
                    f"node {absent} did not come to {self.place} within {timeout_s:g} s; see its"
                    " log, and whether all nodes see that place (a shared disk, or cloud.bucket);"
                    " nodes that come up later than that need a longer launch.start_s"
                )
            check()
            time.sleep(poll_s if self._bucket is None else max(poll_s, BUCKET_POLL_S))
        return found

    def _write(self, name: str, note: Note) -> None:
        text = json.dumps(note).encode() + b"\n"
        if self._bucket is not None:
            self._bucket.put(name, text)
            return
        # Not `write_atomic`, which removes temporary files of dead processes: where the disk passes
        # no locks on, processes of other machines look dead from here.
        with atomic_file(Path(self.place) / name) as stream:
            stream.write(text)

    def _list(self, kind: str) -> dict[str, Version]:
        """The notes of a kind by name, with a version that changes when one is replaced."""
        if self._bucket is not None:
            return {blob.name: (blob.generation, 0) for blob in self._bucket.list(f"{kind}-")}
        found = {}
        for path in Path(self.place).glob(f"{kind}-*.json"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def _read_once(self, name: str, version: Version) -> Note | None:
        cached = self._cache.get(name)
        if cached is None or cached[0] != version:
            note = self._read(name)
            if note is None:
                return None
            cached = self._cache[name] = version, note
        return cached[1]

    def _read(self, name: str) -> Note | None:
        try:
            note = json.loads(
                self._bucket.get(name)
                if self._bucket is not None
                else (Path(self.place) / name).read_bytes()
            )
        except (ValueError, OSError, Missing):
            return None
        return note if isinstance(note, dict) else None


def clear_rendezvous(url: str) -> None:
    """Remove the notes of an earlier run of this name whose local folder is gone."""
    bucket = open_bucket(url)
    for blob in bucket.list():
        bucket.delete(blob.name)


def state_by_notes(rendezvous: Rendezvous, nodes: int) -> JobState:
    """The final state of a job from its nodes' exit notes; a node without one was killed."""
    codes = [int(note["code"]) for note in rendezvous.notes(EXIT).values()]
    stopped = [code for code in codes if code in (EXIT_STOPPED, *SIGNAL_CODES)]
    if len(codes) < nodes or any(code not in (*NON_FAILURE_CODES, *stopped) for code in codes):
        return "failed"
    if not stopped:
        return "succeeded"
    requests = [note for note in rendezvous.signals(set()) if note.get("number") in STOP_SIGNALS]
    if requests and not any("by" in note for note in requests):
        return "cancelled"  # by the user, perhaps before there was anything to save
    # Asked by its place, a rank with nothing to save yet just ends.
    is_preempted = requests or all(code in NON_FAILURE_CODES for code in codes)
    return "preempted" if is_preempted else "failed"


def asked_to_stop(rendezvous: Rendezvous) -> bool:
    """Whether somebody asked the ranks to stop; a request of their place names it (`by`)."""
    return any(
        note.get("number") in STOP_SIGNALS and "by" not in note
        for note in rendezvous.signals(set())
    )


def taken_away(rendezvous: Rendezvous, exits: Mapping[int, Note]) -> bool:
    """Whether all ranks that failed by themselves followed a signal to stop that nobody of us sent:
    a machine that is being taken away sends it, and a rank with nothing to save yet just ends.
    """
    codes = {int(note["code"]) for note in exits.values() if ENDED_BY not in note}
    failed = codes.difference(NON_FAILURE_CODES)
    return bool(failed) and failed <= set(SIGNAL_CODES) and not asked_to_stop(rendezvous)


def exit_by_notes(
    job: Job, state: JobState, kind: str, notes: Mapping[int, Note], *, stop_requested: bool
) -> AttemptExit:
    """How a job in a final `state` at the place `kind` ended, from its nodes' exit notes: the first
    node whose own ranks failed; without notes, the state that the place reports.
    """
    own = [note for note in notes.values() if ENDED_BY not in note]
    failed = [note for note in own if note["code"] not in NON_FAILURE_CODES]
    if failed and state not in ("preempted", "cancelled"):
        # A node killed by a signal comes first: the other nodes only failed because it was gone.
        first = min(failed, key=lambda note: (note["code"] > 0, note["t_wall"]))
        return AttemptExit(int(first["rank"]), int(first["code"]), first.get("how", ""))
    codes = [int(note["code"]) for note in own]
    if len(codes) == job.nodes and not failed:
        code = max(codes)
        early = code == EXIT_STOPPED and not stop_requested
        return AttemptExit(0, code, f"{kind} told the job to stop" if early else "")
    if state == "preempted":
        return AttemptExit(0, EXIT_STOPPED, f"{kind} took the job's machines away")
    if state == "cancelled":
        by_signal = (code for code in codes if code - 128 in STOP_SIGNALS)
        return AttemptExit(0, next(by_signal, 128 + signal.SIGTERM))
    lost = [node for node in range(job.nodes) if node not in notes]
    if state == "succeeded" and not lost:
        return AttemptExit(0, EXIT_DONE)
    reason = (
        f"node {', '.join(map(str, lost))} was lost"
        if lost and len(lost) < job.nodes
        else f"{kind} says that the job {state}"
    )
    return AttemptExit(lost[0] * job.processes if lost else 0, EXIT_FAILED, reason)


class SignalsByNote:
    """A launcher whose signals are notes, which the nodes poll every few seconds: no place passes
    signals on to the ranks alone.
    """

    def signal(self, handle: Handle, number: int) -> None:
        """See `Launcher`."""
        Rendezvous.of(handle).send(number)
