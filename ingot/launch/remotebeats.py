"""The signs of life of ranks elsewhere, as they can be had from here: from the run folder, or, by a
thread of its own, from its replica.

A bucket that answers late, or not at all, keeps nobody here from handing on a signal, and no rank
is taken for silent meanwhile.
"""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ingot.base.errors import IngotError
from ingot.base.heartbeat import Heartbeat, parse_beats, read_beats
from ingot.base.remote.bucket import Bucket, open_bucket
from ingot.base.remote.service import Missing
from ingot.base.storage import write_atomic

BEATS_S = 5.0
"""Between two looks into the bucket."""
AT_ONCE = 32
STACKS = re.compile(r"stacks-rank\d+\.txt")


class RemoteBeats:
    """The last signs of life of one start's ranks. Those that lay there when it began are of
    earlier starts, maybe of other machines, and not counted. `trouble` says why there are none to
    be had at the moment, None while there are.
    """

    def __init__(self, root: Path, mirror: str | None) -> None:
        self._root, self._mirror = root, mirror
        self._latest: dict[int, Heartbeat] = {}
        self._seen: dict[str, int] = {}
        self._over, self._stacks_wanted = threading.Event(), False
        self.trouble: str | None = None
        self._old: set[tuple[int, int, int, float]] = set()
        self._old = {_identity(beat) for beat in self._read()}
        if mirror is not None:
            threading.Thread(target=self._go_on, daemon=True).start()

    def latest(self) -> dict[int, Heartbeat]:
        if self._mirror is None:
            self._look()
        return dict(self._latest)

    def want_stacks(self) -> None:
        """From here on stacks that ranks write come to our `logs/`, from where no disk is
        shared.
        """
        self._stacks_wanted = True

    def end(self) -> None:
        self._over.set()

    def _go_on(self) -> None:
        while not self._over.wait(BEATS_S):
            self._look()

    def _look(self) -> None:
        try:
            self._latest |= {
                beat.rank: beat for beat in self._read() if _identity(beat) not in self._old
            }
            if self._stacks_wanted and self._mirror is not None:
                for name, content in self._new(f"{self._mirror}/stacks"):
                    if STACKS.fullmatch(name):
                        write_atomic(self._root / "logs" / name, content)
            self.trouble = None
        except (IngotError, OSError) as error:
            self.trouble = str(error)

    def _read(self) -> list[Heartbeat]:
        if self._mirror is None:
            return [
                beat for path in (self._root / "heartbeats").glob("*") for beat in read_beats(path)
            ]
        return [
            beat
            for _, content in self._new(f"{self._mirror}/heartbeats")
            for beat in parse_beats(content)
        ]

    def _new(self, url: str) -> list[tuple[str, bytes]]:
        """Names and contents of what was put there since the last look."""
        bucket = open_bucket(url, patience_s=BEATS_S)
        changed = {
            blob.name: blob.generation
            for blob in bucket.list()
            if self._seen.get(bucket.url_of(blob.name)) != blob.generation
        }
        if not changed:
            return []
        with ThreadPoolExecutor(min(AT_ONCE, len(changed))) as pool:
            contents = list(pool.map(lambda name: _got(bucket, name), changed))
        self._seen |= {bucket.url_of(name): generation for name, generation in changed.items()}
        return [
            (name, content)
            for name, content in zip(changed, contents, strict=True)
            if content is not None
        ]


def _got(bucket: Bucket, name: str) -> bytes | None:
    try:
        return bucket.get(name)
    except Missing:
        return None


def _identity(beat: Heartbeat) -> tuple[int, int, int, float]:
    """Attempts are counted by those that came to their first step, so that their number alone tells
    no two of them apart.
    """
    return beat.pid, beat.rank, beat.attempt, beat.mono
