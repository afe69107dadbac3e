"""A node without a shared disk: the run folder is fetched before the ranks start, and what they make is sent while they run and at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from ingot.base.bucket import open_bucket
from ingot.base.errors import IngotError
from ingot.base.heartbeat import heartbeat_file
from ingot.base.progress import say
from ingot.base.replica import pull, push
from ingot.launch.job import Job

BEAT_S, LIVE_S = 15.0, 60.0
"""Seconds between two copies of the signs of life, and of what people look at while a job runs."""
LIVE = ("metrics.jsonl", "events.jsonl", "tensorboard", "logs", "reports")


def bring(url: str, root: Path) -> None:
    """Make the run folder what its replica says."""
    pull(url, root)


class Sending:
    """While entered, this node's signs of life go to the bucket, and from node 0 what it has to show. At the end node 0 sends the run folder,
    which may fail the job: what was made and is nowhere to be found was made in vain."""

    def __init__(self, job: Job, root: Path, number: int) -> None:
        self._url, self._root, self._number = job.mirror or "", root, number
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Sending:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        if self._number == 0:
            push(self._root, self._url)

    def _go_on(self) -> None:
        bucket, rounds = open_bucket(self._url), 0
        beats = heartbeat_file(self._root / "heartbeats")
        while not self._over.wait(BEAT_S):
            rounds += 1
            try:
                if beats.exists():
                    bucket.put(f"heartbeats/{beats.name}", beats.read_bytes())
                if self._number == 0 and rounds % round(LIVE_S / BEAT_S) == 1:  # the first time soon: who is taken away has begun
                    push(self._root, self._url, parts=LIVE)
            except (IngotError, OSError) as error:
                say(f"warning: what this node has to show was not sent ({error}); trying again in a while")
