"""Where the nodes of one start leave notes for each other and for whoever watches them: a folder
that all see, or a bucket.

Signals go this way too: it works wherever the nodes are, also from a process that did not start
them, and reaches ranks and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.service import Missing
from ingot.base.storage import atomic_file, is_remote

HERE, EXIT, SIGNAL = "here", "exit", "signal"
"""That a node has come, with its version; how its ranks ended; what the ranks are asked."""
LOOK_BUCKET_S = 2.0
Stamp = tuple[int, int]


class Meeting:
    """Notes by name, small JSON objects. Reading never raises for what is not there yet.
    `patience_s`: how long a bucket is asked again.

    Each note is read once: of a thousand nodes each looks for all others, again and again.
    """

    def __init__(self, place: str, *, patience_s: float | None = None) -> None:
        self.place = place
        self._bucket = open_bucket(place, patience_s=patience_s) if is_remote(place) else None
        self._kept: dict[str, tuple[Stamp, dict[str, Any]]] = {}

    @property
    def is_folder(self) -> bool:
        return self._bucket is None

    def leave(self, node: int, kind: str, **about: Any) -> None:
        """Leave a note of this node; a later one replaces it."""
        self._write(f"{kind}-{node}.json", {"node": node, "t_wall": time.time(), **about})

    def notes(self, kind: str) -> dict[int, dict[str, Any]]:
        """The notes of this kind, by node."""
        found = [
            note
            for name, stamp in self._names(kind).items()
            if (note := self._once(name, stamp)) is not None
        ]
        return {int(note["node"]): note for note in found if "node" in note}

    def send(self, number: int, rank: int | None = None) -> None:
        """Ask one rank, or all, by a signal; nodes look once in a second or few."""
        self._write(f"{SIGNAL}-{time.time_ns()}.json", {"number": int(number), "rank": rank})

    def signals(self, seen: set[str]) -> list[dict[str, Any]]:
        """The signals that are not among `seen` yet, in the order in which they were sent; they are
        among them from then on. `by` names a place that asked of itself.
        """
        new = {
            name: note
            for name in sorted(self._names(SIGNAL))
            if name not in seen and (note := self._read(name)) is not None
        }
        seen.update(new)
        return list(new.values())

    def wait_for(
        self,
        kind: str,
        nodes: int,
        *,
        seconds: float,
        look_s: float = 0.2,
        look: Callable[[], None] = lambda: None,
    ) -> dict[int, dict[str, Any]]:
        """The notes of all `nodes`; `look` is called meanwhile and may raise. Raises Failed naming
        those that did not come within `seconds`.
        """
        until = time.monotonic() + seconds
        while len(found := self.notes(kind)) < nodes:
            if time.monotonic() > until:
                absent = ", ".join(str(node) for node in range(nodes) if node not in found)
                raise Failed(
                    f"node {absent} did not come to {self.place} within {seconds:g} s; see its log,"
                    " and whether all nodes see that place (a shared disk, or cloud.bucket); nodes"
                    " that come up later than that need a longer launch.start_s"
                )
            look()
            time.sleep(look_s if self._bucket is None else max(look_s, LOOK_BUCKET_S))
        return found

    def _write(self, name: str, note: dict[str, Any]) -> None:
        text = json.dumps(note).encode() + b"\n"
        if self._bucket is not None:
            self._bucket.put(name, text)
            return
        # Not `write_atomic`, which clears away what dead processes left: those of other machines
        # only look dead from here.
        with atomic_file(Path(self.place) / name) as stream:
            stream.write(text)

    def _names(self, kind: str) -> dict[str, Stamp]:
        """Of the notes that are there, with what is another when a note was replaced."""
        if self._bucket is not None:
            return {blob.name: (blob.generation, 0) for blob in self._bucket.list(f"{kind}-")}
        found = {}
        for path in Path(self.place).glob(f"{kind}-*.json"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found[path.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def _once(self, name: str, stamp: Stamp) -> dict[str, Any] | None:
        """A note that was read before is not read again."""
        kept = self._kept.get(name)
        if kept is None or kept[0] != stamp:
            note = self._read(name)
            if note is None:
                return None
            kept = self._kept[name] = stamp, note
        return kept[1]

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            note = json.loads(
                self._bucket.get(name)
                if self._bucket is not None
                else (Path(self.place) / name).read_bytes()
            )
        except (ValueError, OSError, Missing):
            return None
        return note if isinstance(note, dict) else None
