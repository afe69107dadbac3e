"""Synchronises a run folder with its replica in a bucket: a node without a shared disk pulls it
before its ranks start, and pushes what they write; the launcher pulls the results.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path

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

HEARTBEAT_INTERVAL_S, PROGRESS_INTERVAL_S = 15.0, 60.0
"""Seconds between two pushes of heartbeats, and of the files that users look at while a job
runs.
"""
COLUMNS = "data/columns"
RAW, PARTS = (r"data/raw/.*\.parquet",), (rf"{COLUMNS}/[^/]*\.(bin|idx)",)
PROGRESS = (
    *("metrics.jsonl", "samples.jsonl", "events.jsonl", "left_out.json"),
    *("tensorboard", "logs", "reports"),
)


def is_launcher_file(path: str) -> bool:
    """Whether only the launcher writes a file of the run folder: notes and handles of its jobs, and
    the logs of their ranks.
    """
    return re.match(r"jobs/|logs/[^/]*\.log$", path) is not None


def pull_run_folder(url: str, root: Path, verb: str, recipe: Recipe | None = None) -> None:
    """Make the run folder equal to its replica, for a node that runs `verb`. The folder may be the
    launcher's own, which writes to it meanwhile: of the launcher's files only the recipe is pulled,
    unless `recipe` is given. Data that the verb does not read, or fetches a part at a time, is left
    in the bucket (`is_left_in_bucket`).
    """

    def keep(path: str) -> bool:
        return is_launcher_file(path) and not path.startswith("jobs/nodes.")

    forget_deferred(root, COLUMNS)
    if recipe is None:
        pull(url, root, parts=["jobs"], keep=keep)
        resolved = root / "jobs" / f"nodes.{verb}.yaml"
        recipe = load_recipe([resolved], environ={}, dotenv=None) if resolved.exists() else None
    is_left, left = is_left_in_bucket(verb, recipe), list[str]()

    def leave(path: str) -> bool:
        left.extend([path] * is_left(path))
        return is_left(path)

    pull(url, root, keep=keep, leave=leave)
    if any(path.startswith(COLUMNS) for path in left):
        defer_files(root, COLUMNS, url)


def is_left_in_bucket(verb: str, recipe: Recipe | None = None) -> Callable[[str], bool]:
    """Returns a predicate: whether `verb` does not need a file at its start. Raw documents and
    parts of columns are most of a run folder.

    `recipe`: that of a training; if it is unknown, a training needs all files. `submit` stands for
    starting a training or an evaluation elsewhere.
    """
    left = {
        "evaluate": PARTS,
        "submit": RAW + PARTS,
        "gate": RAW + PARTS,
        "register": RAW + PARTS,
        "deploy": RAW + PARTS,
    }.get(verb, ())
    if verb == "train" and recipe is not None:
        # Reference texts for generations are read from the documents.
        reads_documents = any(task.kind == "rouge" for task in recipe.tasks)
        left = (() if reads_documents else RAW) + (() if recipe.data.window is None else PARTS)
    return lambda path: any(re.fullmatch(pattern, path) for pattern in left)


def pull_results(
    url: str,
    root: Path,
    *,
    parts: Collection[str] | None = None,
    untouched: Collection[str] = (),
) -> None:
    """Bring what jobs made elsewhere into the run folder, or into these `parts` of it, for the
    launcher: its own files and those in `untouched` stay as they are, or absent, and its events are
    kept beside those of the job. What was made or deleted here since and not by a job, such as data
    that were prepared anew, stays as it is here. Data that a launcher has left in the bucket
    (`pull_run_folder`) stays there.
    """
    events = RunFolder(root).events
    own = list(read_lines(events))
    is_left = is_left_in_bucket("submit" if deferred_files_of(root / COLUMNS) else "")
    pull(
        url,
        root,
        parts=parts,
        keep=lambda path: is_launcher_file(path) or path in untouched,
        leave=lambda path: is_left(path) or path in untouched,
        keep_changes=True,
    )
    pulled = {json.dumps(event) for event in read_lines(events)}
    for event in own:
        if json.dumps(event) not in pulled:
            append_line(events, event)


class RunFolderPusher:
    """While entered, this node's heartbeats are pushed to the bucket, and from node 0 its progress;
    the ranks find the replica's address in their environment. At the end node 0 pushes the run
    folder; a failure of that fails the job, since results that nobody can fetch are lost.
    """

    def __init__(self, url: str, root: Path, node: int) -> None:
        self._url, self._root, self._node = url, root, node
        self._bucket = open_bucket(self._url, patience_s=HEARTBEAT_INTERVAL_S / 3)
        self._pushed_stacks = self._stacks()  # files of earlier starts
        self._previous = os.environ.get(REPLICA_VARIABLE)
        self._over = threading.Event()
        # Heartbeats are pushed on their own: a rank without one counts as hanging.
        tasks = [(self._push_heartbeats, HEARTBEAT_INTERVAL_S)]
        if node == 0:
            tasks.append((self._push_progress, PROGRESS_INTERVAL_S))
        self._threads = [
            threading.Thread(target=self._repeat, args=task, daemon=True) for task in tasks
        ]

    def __enter__(self) -> RunFolderPusher:
        os.environ[REPLICA_VARIABLE] = self._url
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        del os.environ[REPLICA_VARIABLE]
        if self._previous is not None:
            os.environ[REPLICA_VARIABLE] = self._previous
        if self._node == 0:
            push(self._root, self._url)

    def _repeat(self, task: Callable[[], None], interval_s: float) -> None:
        pause_s = HEARTBEAT_INTERVAL_S  # short at first: a machine may be reclaimed at any time
        while not self._over.wait(pause_s):
            pause_s = interval_s
            try:
                task()
            except (IngotError, OSError) as error:
                say(
                    f"warning: the progress of this node was not sent ({error}); trying again in a"
                    " while"
                )

    def _push_heartbeats(self) -> None:
        """Also pushes requested stacks, since somebody is waiting for them."""
        beats = heartbeat_file(RunFolder(self._root).heartbeats)
        if beats.exists():
            self._bucket.put(f"heartbeats/{beats.name}", beats.read_bytes())
        for path, version in self._stacks().items():
            if version != self._pushed_stacks.get(path):
                self._bucket.put(f"stacks/{path.name}", path.read_bytes())
                self._pushed_stacks[path] = version

    def _stacks(self) -> dict[Path, tuple[int, int]]:
        found = {path: path.stat() for path in RunFolder(self._root).logs.glob("stacks-rank*.txt")}
        return {
            path: (status.st_size, status.st_mtime_ns)
            for path, status in found.items()
            if status.st_size
        }

    def _push_progress(self) -> None:
        push(self._root, self._url, parts=PROGRESS)
