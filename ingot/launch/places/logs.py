"""The logs of jobs, wherever they are stored: files on the shared disk, Cloud Logging, serial
ports, objects in a bucket.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from ingot.base.remote.bucket import open_bucket
from ingot.cloud import data_jobs, instances
from ingot.cloud.clients import GoogleClients
from ingot.cloud.instances import Instance
from ingot.cloud.logs import LogEntry, read_entries
from ingot.launch.job import Handle
from ingot.launch.rendezvous import BOOT, EXIT, Rendezvous

QUERY_INTERVAL_S = 10.0
"""Seconds between two queries of Cloud Logging, which allows a project sixty per minute."""
LONGEST_LINE = 1 << 16
"""Bytes of a line that is shown though it has no end yet."""
STARTUP_SCRIPT = "startup-script"
"""Marks the lines on the serial port that our script writes; the others are the system's."""


class FileLog:
    """A log of one or several files, read from where the last call ended; initially from
    `offsets`.
    """

    def __init__(
        self, paths: Callable[[], Collection[Path]], offsets: Mapping[Path, int] | None = None
    ) -> None:
        self._paths = paths
        self._offsets: dict[Path, int] = dict(offsets or {})

    def read(self) -> bytes:
        text = b""
        for path in self._paths():
            try:
                with path.open("rb") as stream:
                    stream.seek(self._offsets.get(path, 0))
                    new = stream.read()
            except OSError:
                continue
            self._offsets[path] = self._offsets.get(path, 0) + len(new)
            text += new
        return text


class HostsLog:
    """The log files of several hosts merged, with the host's name before each line. `files`: name,
    file, and how many of its bytes belong to earlier starts; a file without a name is shown
    unchanged.

    Only complete lines are shown, so that lines of two hosts do not mix, and at each call the state
    of a progress bar, which returns to the beginning of its line. `is_over` says whether an
    incomplete line will stay incomplete.
    """

    def __init__(self, files: Sequence[tuple[str, Path, int]], is_over: Callable[[], bool]) -> None:
        self._logs = [
            (name.encode(), FileLog(partial(list[Path], [path]), {path: offset}))
            for name, path, offset in files
        ]
        self._unfinished = [b""] * len(files)
        self._is_over = is_over

    def read(self) -> bytes:
        text = self._lines()
        if any(self._unfinished) and self._is_over():
            text += self._lines()  # written before it was over
            text += b"".join(
                name + b": " + line + b"\n"
                for (name, _), line in zip(self._logs, self._unfinished, strict=True)
                if line
            )
            self._unfinished = [b""] * len(self._logs)
        return text

    def _lines(self) -> bytes:
        text = b""
        for number, (name, log) in enumerate(self._logs):
            new = self._unfinished[number] + log.read()
            if not name:
                text += new
                continue
            *lines, bar = new.split(b"\n")
            shown = [_as_seen(line) for line in lines]
            *earlier, rest = bar.split(b"\r")
            shown += [state for state in earlier if state][-1:]
            if len(rest) > LONGEST_LINE:
                part, rest = _at_a_character(rest)
                shown.append(part)
            self._unfinished[number] = rest
            text += b"".join(name + b": " + line + b"\n" for line in shown)
        return text


def _as_seen(line: bytes) -> bytes:
    """What a terminal shows of a line in the end: the last state of a progress bar. Lines end with
    more than one return where several terminals lie between a program and us.
    """
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _at_a_character(text: bytes) -> tuple[bytes, bytes]:
    """The text and the beginning of a character at its end whose rest has not arrived yet."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(text)
    begun, _ = decoder.getstate()
    return text[: len(text) - len(begun)], begun


class ComputeLog:
    """The log of machines of Compute Engine: from Cloud Logging or, until something has arrived
    there, what their start-up script writes to the serial port.

    `ids` are Compute Engine's ids of the machines, by node. `machines` lists the existing ones,
    `last_words` returns the last lines of deleted ones.
    """

    def __init__(
        self,
        google: GoogleClients,
        ids: Mapping[int, str],
        machines: Callable[[], Collection[Instance]],
        last_words: Callable[[], str],
    ) -> None:
        self._google, self._machines, self._last_words = google, machines, last_words
        self._nodes = {id: node for node, id in ids.items()}
        self._next_query, self._cursor = 0.0, ""
        self._offsets: dict[str, int] = {}
        self._has_entries = self._last_words_shown = False

    def read(self) -> bytes:
        now = time.monotonic()
        if now < self._next_query and not self._last_words():
            return b""
        self._next_query = now + QUERY_INTERVAL_S
        text = self._entries() if self._nodes else ""
        if not self._has_entries:
            text += self._serial_ports()
            if not self._last_words_shown and (words := self._last_words()):
                self._last_words_shown, text = True, text + words
        return text.encode()

    def _entries(self) -> str:
        """Entries that were not shown yet."""
        ids = " OR ".join(f'"{id}"' for id in self._nodes)
        query = (
            f'resource.type="gce_instance" AND resource.labels.instance_id=({ids}) AND'
            f' logName="projects/{self._google.project}/logs/cos_containers"'
        )
        entries, self._cursor = read_entries(self._google, query, self._cursor)
        self._has_entries = self._has_entries or bool(entries)
        return "".join(f"{self._prefix(entry)}{entry.text}\n" for entry in entries)

    def _prefix(self, entry: LogEntry) -> str:
        node = self._nodes.get(entry.labels.get("instance_id", ""))
        return f"[node {node}] " if len(self._nodes) > 1 else ""

    def _serial_ports(self) -> str:
        lines = []
        for machine in self._machines():
            text, self._offsets[machine.name] = instances.serial_port(
                self._google, machine, self._offsets.get(machine.name, 0)
            )
            lines += [
                f"[{machine.name}] {line.rpartition(f'{STARTUP_SCRIPT}: ')[2]}\n"
                for line in text.splitlines()
                if STARTUP_SCRIPT in line
            ]
        return "".join(lines)


class VertexLog:
    """The log of a custom job's workers, from Cloud Logging; with several workers, each line begins
    with the worker's name.
    """

    def __init__(self, google: GoogleClients, handle: Handle) -> None:
        self._google, self._has_several = google, handle.about.get("nodes", "1") != "1"
        job_id = handle.id.rpartition("/")[2]
        self._query = f'resource.type="ml_job" AND resource.labels.job_id="{job_id}"'
        self._cursor, self._next_query = "", 0.0

    def read(self) -> bytes:
        if time.monotonic() < self._next_query:
            return b""
        self._next_query = time.monotonic() + QUERY_INTERVAL_S
        entries, self._cursor = read_entries(self._google, self._query, self._cursor)
        text = ""
        for entry in entries:
            worker = f"[{entry.labels.get('task_name', 'service')}] " if self._has_several else ""
            text += f"{worker}{entry.text}\n"
        return text.encode()


class SparkDriverLog:
    """The output of a Spark batch's driver, which the service writes to numbered objects."""

    def __init__(self, google: GoogleClients, batch_id: str) -> None:
        self._google, self._id, self._output = google, batch_id, ""
        self._read_bytes: dict[str, int] = {}

    def read(self) -> bytes:
        if not self._output:
            batch = data_jobs.get_batch(self._google, self._id)
            self._output = batch.output if batch is not None else ""
        if not self._output:
            return b""
        folder, _, prefix = self._output.rpartition("/")
        bucket, text = open_bucket(folder), b""
        for blob in bucket.list(prefix):
            offset = self._read_bytes.get(blob.name, 0)
            if blob.bytes > offset:
                text += bucket.get(blob.name)[offset:]
                self._read_bytes[blob.name] = blob.bytes
        return text


class TpuLog:
    """The progress and the end of a TPU VM, from its notes: the rest of its log stays on it, and
    ranks' logs are in `RUN/logs` of the replica.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous, self._shown = rendezvous, set[str]()

    def read(self) -> bytes:
        lines = [str(note["phase"]) for note in self._rendezvous.notes(BOOT).values()]
        lines += [
            str(note.get("how") or f"ended with exit code {note['code']}")
            for note in self._rendezvous.notes(EXIT).values()
        ]
        new = [line for line in lines if line not in self._shown]
        self._shown.update(new)
        return "".join(f"ingot: {line}\n" for line in new).encode()
