"""Checkpoints in a bucket: the same folders and files as on disk. A checkpoint is complete when its
commit marker, `COMMIT.json`, exists; the marker is uploaded last.

Every rank uploads its own files, and rank 0 the marker. Only one run may write to a given URL: the
holder of its lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed
from ingot.base.markers import COMMIT, problems, read_marker
from ingot.base.progress import say
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.lease import LIFE_S, Lease, lease
from ingot.base.remote.service import Conflict, Corrupt, Missing
from ingot.base.remote.transfer import MarkedFolder, fetch_file, in_parallel
from ingot.base.storage import atomic_folder, disk_errors, sha256_file, stays_inside
from ingot.checkpoints.store import (
    BEFORE,
    CommittedCheckpoint,
    committed,
    is_due,
    step_folder,
)


class Damaged(Failed):
    """A checkpoint in the bucket does not match its commit marker."""


class BucketMirror:
    """Checkpoints under `gs://BUCKET/FOLDER`. Methods raise the errors of bucket access:
    WrongInput without bucket or permission, Failed otherwise.

    `before_commit` is called before a marker is uploaded; it must make durable whatever else the
    marker vouches for.
    """

    def __init__(self, url: str, *, before_commit: Callable[[], None] = lambda: None) -> None:
        self.bucket, self._before_commit = open_bucket(url), before_commit
        self._lease: Lease | None = None

    @contextlib.contextmanager
    def lease(self, owner: str, *, life_s: float = LIFE_S, wait: bool = False) -> Iterator[Lease]:
        """Hold the right to write here for the duration of the block; one process of a run calls
        it. See `ingot.base.remote.lease`.

        Raises:
            Failed: another run holds the lease.
        """
        with lease(self.bucket, owner, life_s=life_s, wait=wait) as held:
            self._lease = held
            try:
                yield held
            finally:
                self._lease = None

    def put(self, folder: Path, names: Sequence[str]) -> None:
        """Upload files of a checkpoint; each rank uploads its own. Files already in the bucket with
        the same size and checksum are skipped.

        An upload of a large file that an earlier process left unfinished is resumed.
        """
        for number, name in enumerate(names):
            if self._lease is not None and (number == 0 or self._lease.lost):
                self._lease.check()
            note = folder / f".{name.replace('/', '-')}.upload"
            self._marked(folder.name).put(folder, name, note=note)

    def commit(self, folder: Path) -> None:
        """Upload the marker once all files that it lists are in the bucket; called by one rank
        after `put` on all ranks.

        Raises:
            Failed: a file is missing, the lease is lost, or the bucket already has a marker of a
                different checkpoint.
        """
        marker, key = read_marker(folder, COMMIT), f"{folder.name}/{COMMIT}"
        if marker is None:
            raise Failed(f"{folder} has no {COMMIT} to upload; run the same command again")
        marked = self._marked(folder.name)
        marked.check_sizes({entry["path"]: entry["bytes"] for entry in marker["files"]})
        self._before_commit()
        if self._lease is not None:
            self._lease.check()
        try:  # what may stand there is our own marker, from an earlier save of this step
            marked.commit(
                (folder / COMMIT).read_bytes(), may_replace=lambda data: _same_files(data, marker)
            )
        except Conflict:
            raise Failed(
                f"{self.bucket.url_of(key)} is there, of another checkpoint: two runs write to"
                " one place; give each its own `checkpoint.upload`"
            ) from None

    def recommit(self, folder: Path) -> None:
        """Upload the marker of a checkpoint again after its content changed; called by one rank. A
        marker of the same step that lists other files (from a machine that did not know of this
        checkpoint) is left alone.
        """
        marker = read_marker(folder, COMMIT)
        if marker is None or not self._is_committed(folder.name):
            return
        if _same_files(self.bucket.get(f"{folder.name}/{COMMIT}"), marker):
            self.commit(folder)

    def retain(self, kept: Collection[str]) -> None:
        """Delete the checkpoints whose folder names are not in `kept`, markers first; called by one
        rank. Nothing is deleted unless at least one kept checkpoint is committed here.
        """
        if self._lease is not None:
            self._lease.check()
        folders = self._folders()
        newest = max(
            (name for name in folders if name in kept and self._is_committed(name)),
            key=_step,
            default=None,
        )
        # A newer folder without a marker is still being uploaded by other ranks.
        doomed = [
            name
            for name in folders
            if name not in kept
            and (newest is None or _step(name) < _step(newest) or self._is_committed(name))
        ]
        if not doomed:
            return
        if newest is None:
            say(
                f"warning: nothing is deleted in {self.bucket.url}: no checkpoint that is kept"
                f" ({', '.join(sorted(kept))}) is whole there"
            )
            return
        for name in doomed:
            self._marked(name).delete()

    def newest(self) -> int | None:
        """The newest committed step in the bucket."""
        return next(self.steps(), None)

    def steps(self) -> Iterator[int]:
        """All committed steps in the bucket, newest first."""
        for name in reversed(self._folders()):
            if self._is_committed(name):
                yield _step(name)

    def was_due(self, step: int) -> bool:
        """Whether a committed step was due.

        Raises:
            Damaged: its marker says nothing any more.
        """
        with tempfile.TemporaryDirectory() as folder:
            return is_due(self._fetch_marker(step_folder(Path(), step).name, Path(folder)))

    def fetch(self, step: int, checkpoints: Path) -> Path:
        """Download a checkpoint into its folder in `checkpoints`; returns that folder. It appears
        only after every file matches its checksum in the marker.

        Files that an earlier attempt already fetched are reused.

        Raises:
            Damaged: names the file that does not match the marker.
        """
        target = step_folder(checkpoints, step)
        staging = checkpoints / f".{target.name}.fetch"
        with disk_errors(staging):
            staging.mkdir(parents=True, exist_ok=True)
            for left in checkpoints.glob(".step-*.fetch"):
                if left != staging:
                    shutil.rmtree(left, ignore_errors=True)
        files = self._fetch_marker(target.name, staging)["files"]
        in_parallel(lambda entry: self._fetch_file(target.name, entry, staging), files)
        with atomic_folder(target) as partial:
            for name in [*(entry["path"] for entry in files), COMMIT]:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(staging / name, partial / name)
        shutil.rmtree(staging, ignore_errors=True)
        return target

    def _folders(self) -> list[str]:
        return sorted(
            (name for name in self.bucket.folders() if re.fullmatch(r"step-\d{8,}", name)),
            key=_step,
        )

    def _marked(self, name: str) -> MarkedFolder:
        return MarkedFolder(self.bucket, f"{name}/", COMMIT)

    def _is_committed(self, name: str) -> bool:
        return self._marked(name).is_complete

    def _fetch_marker(self, name: str, staging: Path) -> Mapping[str, Any]:
        url = self.bucket.url_of(f"{name}/{COMMIT}")
        try:
            self.bucket.get_to_file(f"{name}/{COMMIT}", staging / COMMIT)
        except Missing as error:
            raise Damaged(
                f"{url} is missing: that checkpoint was not uploaded as a whole; take another one"
            ) from error
        except Corrupt as error:
            raise Damaged(str(error)) from error
        marker = read_marker(staging, COMMIT)
        if marker is None:
            raise Damaged(f"{url} is damaged; take another checkpoint")
        for entry in marker["files"]:
            if not stays_inside(entry["path"]):
                raise Damaged(
                    f"{url} lists {entry['path']}, which lies outside of the checkpoint; take"
                    " another one"
                )
        return marker

    def _fetch_file(self, name: str, entry: Mapping[str, Any], staging: Path) -> None:
        path, key = staging / entry["path"], f"{name}/{entry['path']}"
        if (
            path.exists()
            and path.stat().st_size == entry["bytes"]
            and sha256_file(path) == entry["sha256"]
        ):
            return
        try:
            fetch_file(self.bucket, key, path, sha256=entry["sha256"])
        except (Missing, Corrupt) as error:
            path.unlink(missing_ok=True)
            raise Damaged(f"{error}; take another checkpoint") from error


def fetch_newer(mirror: BucketMirror, checkpoints: Path) -> CommittedCheckpoint | None:
    """Fetch the newest intact checkpoint from the bucket if it is newer than every valid one on
    disk, in the place of a damaged one of its step. Returns the newest valid one that is then on
    disk, all of whose checksums were compared once; None if there is none.

    Raises:
        Failed: the bucket has newer checkpoints, all of them damaged, and there is none on disk.
    """
    here, damaged = _newest_here(checkpoints), False
    for step in mirror.steps():
        if here is not None and step <= here.step:
            break
        try:
            folder = mirror.fetch(step, checkpoints)
            return next(found for found in committed(checkpoints) if found.folder == folder)
        except Damaged as error:
            say(f"warning: {error}")
            damaged = True
    if damaged and here is None:
        raise Failed(
            f"no checkpoint in {mirror.bucket.url} is whole; restore one, or start over with"
            " --fresh and another `checkpoint.upload`"
        )
    return here


def fetch_unless_here(mirror: BucketMirror, step: int, checkpoints: Path) -> None:
    """Fetch a checkpoint of which files are missing on disk; checksums are not compared."""
    folder = step_folder(checkpoints, step)
    marker = read_marker(folder, COMMIT)
    if marker is None or problems(folder, marker, checksums=False):
        mirror.fetch(step, checkpoints)


def fetch_due(mirror: BucketMirror, checkpoints: Path, before: int, count: int) -> None:
    """Fetch those that are not here of the newest `count` checkpoints before a step that were due.
    What lies in the bucket alone is deleted there with the next save. A damaged one is passed over,
    and an older one taken for it.
    """
    steps = (step for step in mirror.steps() if step < before) if count else iter(())
    for step in steps:
        try:
            if not mirror.was_due(step):
                continue
            fetch_unless_here(mirror, step, checkpoints)
        except Damaged as error:
            say(f"warning: the mean of train.average goes without step {step:,}: {error}")
            continue
        count -= 1
        if not count:
            return


def send_newest(mirror: BucketMirror, newest: CommittedCheckpoint) -> None:
    """Upload the newest valid checkpoint on disk if the bucket has none as new: an earlier process
    ended before it was uploaded.
    """
    in_place = not newest.folder.name.endswith(BEFORE)
    if in_place and newest.step > (mirror.newest() or -1):
        mirror.put(newest.folder, [entry["path"] for entry in newest.commit["files"]])
        mirror.commit(newest.folder)


def _newest_here(checkpoints: Path) -> CommittedCheckpoint | None:
    """The newest valid checkpoint on disk. One that lacks files is passed over in silence: where
    nodes have their own disks, the files of other nodes are in the bucket only.
    """
    for found in committed(checkpoints):
        if not problems(found.folder, found.commit, checksums=False):
            wrong = problems(found.folder, found.commit, checksums=True)
            if not wrong:
                return found
            say(
                f"warning: checkpoint {found.folder} is damaged ({wrong[0]}); trying the bucket's,"
                " or an older one"
            )
    return None


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _same_files(data: bytes, marker: Mapping[str, Any]) -> bool:
    try:
        other = json.loads(data)
    except ValueError:
        return False
    return isinstance(other, dict) and (other.get("step"), other.get("files")) == (
        marker.get("step"),
        marker["files"],
    )
