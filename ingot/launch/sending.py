"""Between a run folder and its replica: a node without a shared disk fetches it before the ranks
start, and sends what they make while they run and at the end; the launcher brings that back.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from ingot.base.environment import REPLICA_VARIABLE
from ingot.base.errors import IngotError
from ingot.base.heartbeat import heartbeat_file
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.deferred import defer_files, deferred_files_of, forget_deferred
from ingot.base.remote.replica import pull, push
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, read_lines
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.launch.job import Job

BEAT_S, LIVE_S = 15.0, 60.0
"""Seconds between two copies of the signs of life, and of what people look at while a job runs."""
COLUMNS = "data/columns"
RAW, PARTS = (r"data/raw/.*\.parquet",), (rf"{COLUMNS}/[^/]*\.(bin|idx)",)
LIVE = ("metrics.jsonl", "events.jsonl", "left_out.json", "tensorboard", "logs", "reports")


def is_launchers(path: str) -> bool:
    """Whether a file of the run folder is written by the launcher alone: notes and handles of its
    jobs, and what their ranks said.
    """
    return re.match(r"jobs/|logs/[^/]*\.log$", path) is not None


def bring(url: str, root: Path, verb: str, recipe: Recipe | None = None) -> None:
    """Make the run folder what its replica says, as a node must that does `verb`. It may be the
    launcher's own, which goes on writing there: only the recipe is taken from what is the
    launcher's, unless it is given. Data that the verb does not read, or a part at a time, stay
    there (`spared`).
    """

    def keep(path: str) -> bool:
        return is_launchers(path) and not path.startswith("jobs/nodes.")

    forget_deferred(root, COLUMNS)
    if recipe is None:
        pull(url, root, parts=["jobs"], keep=keep)
        given = root / "jobs" / f"nodes.{verb}.yaml"
        recipe = load_recipe([given], environ={}, dotenv=None) if given.exists() else None
    is_spared, left = spared(verb, recipe), list[str]()

    def leave(path: str) -> bool:
        left.extend([path] * is_spared(path))
        return is_spared(path)

    pull(url, root, keep=keep, leave=leave)
    if any(path.startswith(COLUMNS) for path in left):
        defer_files(root, COLUMNS, url)


def spared(verb: str, recipe: Recipe | None = None) -> Callable[[str], bool]:
    """Says of a file whether `verb` does without it until it asks: raw documents and parts of
    columns are most of what a run folder holds.

    `recipe`: of a training, which needs all of them where it is not known. `submit` is what starts
    a training or an evaluation elsewhere.
    """
    left = {
        "evaluate": PARTS,
        "submit": RAW + PARTS,
        "gate": RAW + PARTS,
        "register": RAW + PARTS,
        "deploy": RAW + PARTS,
    }.get(verb, ())
    if verb == "train" and recipe is not None:
        reads_documents = any(
            task.kind == "rouge" for task in recipe.tasks
        )  # what is to be written, measured while training
        left = (() if reads_documents else RAW) + (() if recipe.data.window is None else PARTS)
    return lambda path: any(re.fullmatch(pattern, path) for pattern in left)


def bring_back(mirror: str, root: Path, *, parts: Collection[str] | None = None) -> None:
    """Make the run folder, or these `parts` of it, what its replica says, as the launcher must:
    what is its own stays as it is here, its events among those of the job. A launcher that has left
    data there (`bring`) goes on without them.
    """
    events = RunFolder(root).events
    noted = list(read_lines(events))
    pull(
        mirror,
        root,
        parts=parts,
        keep=is_launchers,
        leave=spared("submit" if deferred_files_of(root / COLUMNS) else ""),
    )
    there = {json.dumps(event) for event in read_lines(events)}
    for event in noted:
        if json.dumps(event) not in there:
            append_line(events, event)


class Sending:
    """While entered, this node's signs of life go to the bucket, and from node 0 what it has to
    show; its ranks are told of the replica. At the end
    node 0 sends the run folder, which may fail the job: what was made and is nowhere to be found
    was made in vain.
    """

    def __init__(self, job: Job, root: Path, number: int) -> None:
        self._url, self._root, self._number = job.mirror or "", root, number
        self._bucket = open_bucket(self._url, patience_s=BEAT_S / 3)
        self._stacks = self._stacks_here()  # of earlier starts
        self._before = os.environ.get(REPLICA_VARIABLE)
        self._over = threading.Event()
        # A sign of life waits for nothing else: who gives none is taken for hanging.
        self._threads = [
            threading.Thread(target=self._go_on, args=(self._beat, BEAT_S), daemon=True)
        ]
        if number == 0:
            self._threads.append(
                threading.Thread(target=self._go_on, args=(self._show, LIVE_S), daemon=True)
            )

    def __enter__(self) -> Sending:
        os.environ[REPLICA_VARIABLE] = self._url
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        del os.environ[REPLICA_VARIABLE]
        if self._before is not None:
            os.environ[REPLICA_VARIABLE] = self._before
        if self._number == 0:
            push(self._root, self._url)

    def _go_on(self, send: Callable[[], None], every_s: float) -> None:
        pause = BEAT_S  # the first time soon: who is taken away has begun
        while not self._over.wait(pause):
            pause = every_s
            try:
                send()
            except (IngotError, OSError) as error:
                say(
                    f"warning: what this node has to show was not sent ({error}); trying again in a"
                    " while"
                )

    def _beat(self) -> None:
        """Also stacks that ranks were asked for: whoever asked wants to see them now."""
        beats = heartbeat_file(RunFolder(self._root).heartbeats)
        if beats.exists():
            self._bucket.put(f"heartbeats/{beats.name}", beats.read_bytes())
        for path, about in self._stacks_here().items():
            if about != self._stacks.get(path):
                self._bucket.put(f"stacks/{path.name}", path.read_bytes())
                self._stacks[path] = about

    def _stacks_here(self) -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in RunFolder(self._root).logs.glob("stacks-rank*.txt")}
        return {
            path: (about.st_size, about.st_mtime_ns)
            for path, about in found.items()
            if about.st_size
        }

    def _show(self) -> None:
        push(self._root, self._url, parts=LIVE)
