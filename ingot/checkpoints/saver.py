"""Saves the training state in the background: the state is copied to host memory, and a thread
writes, commits and uploads the copy and deletes older checkpoints while training continues.

One save runs at a time. A failure on any rank becomes an error on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch.optim import Optimizer

from ingot.base.errors import Failed, WrongInput
from ingot.base.lazy import importing
from ingot.base.progress import duration, say
from ingot.checkpoints.collective import describe_error, run_on_all
from ingot.checkpoints.state import Staged, Staging, staged_in_place, training_tensors
from ingot.checkpoints.store import (
    BEFORE,
    CommittedCheckpoint,
    recommit,
    retain,
    step_folder,
    sweep,
)
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh

if TYPE_CHECKING:
    from ingot.checkpoints.writer import Written

WAIT_INTERVAL_S = 0.5
LONG_WAIT_S, TIMES_LONGER = 60.0, 2
"""Training reports that it waits for a save after LONG_WAIT_S, and not before TIMES_LONGER times
the longest wait before: large states on a slow disk take minutes each time. Whoever waits beats, so
this is no hang, and a disk that does not answer ends neither the save nor training.
"""
NICE = 10
"""Niceness of the writer thread: training wins where both want the same core."""


class Mirror(Protocol):
    """A second place, such as a bucket, that receives every committed checkpoint. An error of its
    methods fails the run.
    """

    def put(self, folder: Path, names: Sequence[str]) -> None:
        """Upload the files that this rank wrote; files already there with the same size and
        checksum are skipped. Called on every rank.
        """

    def commit(self, folder: Path) -> None:
        """Upload the commit marker. Called on rank 0 only, after `put` on all ranks."""

    def recommit(self, folder: Path) -> None:
        """Upload a commit marker once more that says something else of the same files. Called on
        rank 0 only.
        """

    def retain(self, kept: Collection[str]) -> None:
        """Delete step folders not in `kept`, their markers first. Called on rank 0 only."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed."""

    step: int
    folder: Path
    blocked_s: float
    """Seconds that training was blocked: waiting for the previous save and for the copy (on an
    accelerator, the time of the copy on its stream).
    """
    total_s: float
    bytes: int
    """Total size of the files of all ranks, without the marker."""


@dataclass(frozen=True)
class _Job:
    step: int
    staged: Staged
    payload: Mapping[str, Any]
    keep: int
    best: int | None
    due: int
    began: float
    blocked_s: float
    waited_for: bool
    """Training waits until it is committed, and nothing was copied."""


class Saver:
    """Writes checkpoints into a folder, one at a time. Collective: every rank constructs one and
    calls `save` and `wait` in the same order.

    Args:
        asynchronous: `save` returns once the state is copied to host memory (see `Staging` for the
            size). Otherwise nothing is copied, and `save` returns once the checkpoint is committed.
        on_wait: called every `WAIT_INTERVAL_S` while the calling thread waits for the writer.
    """

    def __init__(
        self,
        checkpoints: Path,
        mesh: Mesh,
        *,
        asynchronous: bool,
        mirror: Mirror | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._mirror, self._on_wait = checkpoints, mirror, on_wait
        self._staging = Staging() if asynchronous else None
        self._side_channel = mesh.side_channel()
        self._thread: threading.Thread | None = None
        self._done: deque[Saved] = deque()
        self._error: Exception | None = None
        self._longest_s = 0.0

    def prepare(self, masters: Masters, optimizer: Optimizer) -> None:
        """Allocate the staging buffer in a thread, so that the first save does not wait for it.
        Optional; call it once the optimizer has its state.
        """
        if self._staging is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._staging.allocate,
                args=(training_tensors(masters, optimizer),),
                name="allocate-staging",
            )
            self._thread.start()

    def save(
        self,
        step: int,
        masters: Masters,
        optimizer: Optimizer,
        payload: Mapping[str, Any],
        *,
        keep: int,
        best: int | None,
        due: int = 0,
        last: bool = False,
    ) -> None:
        """Save the state after `step` optimizer steps; `payload` is stored in the commit marker.
        Afterwards all checkpoints but those that `retain` keeps are deleted.

        Waits for the previous save. `last`: training has ended, so that nothing is copied, and this
        returns once the checkpoint is committed.

        Raises:
            Failed: the previous save failed (then nothing is saved), or, if not asynchronous, this
                one did, for example because the disk is full.
        """
        began = time.monotonic()
        self._join(self._on_wait)
        self._raise()
        tensors = training_tensors(masters, optimizer)
        staging = None if last else self._staging
        staged = staged_in_place(tensors) if staging is None else staging.copy(tensors)
        held, blocked_s = copy.deepcopy(dict(payload)), time.monotonic() - began
        job = _Job(step, staged, held, keep, best, due, began, blocked_s, staging is None)
        # Not a daemon thread: the interpreter waits for it at exit instead of cutting it off.
        self._thread = threading.Thread(target=self._work, args=(job,), name=f"save-{step}")
        self._thread.start()
        if job.waited_for:
            self._join(self._on_wait)
            self._raise()

    def done(self) -> list[Saved]:
        """The checkpoints committed since the last call; does not wait."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def failed(self) -> bool:
        """Whether the writer of this rank failed with an error that `wait` will raise."""
        return self._error is not None

    def wait(self) -> list[Saved]:
        """Wait for the save in progress, and return what was committed since the last call.

        Raises:
            Failed: a checkpoint could not be written, on any rank. Raised once; saving may continue
                afterwards.
            WrongInput: the folder is not writable.
        """
        self._join(self._on_wait)
        self._raise()
        return self.done()

    def recommit(self, found: CommittedCheckpoint, fields: Mapping[str, Any]) -> None:
        """Have the marker of a committed checkpoint say `fields` in place of what it said, here and
        then in the mirror. Called while no save is in progress. A crash between the two leaves the
        mirror's as it was, which is as true: whoever goes on from it decides the same once more.
        """

        def on_main(_: object) -> None:
            recommit(found, fields)
            if self._mirror is not None and not found.folder.name.endswith(BEFORE):
                self._mirror.recommit(found.folder)

        run_on_all(self._side_channel, lambda: None, on_main)

    def close(self) -> None:
        """Wait for the save in progress, however training ended, and free the staging buffer."""
        with contextlib.suppress(Exception):
            self._join(lambda: None)
        self._staging = Staging() if self._staging is not None else None
        if self._error is not None:
            say(f"warning: {self._error}")

    def _join(self, on_wait: Callable[[], None]) -> None:
        began, is_told = time.monotonic(), not self._side_channel.is_main
        long_s, waited_s = max(LONG_WAIT_S, TIMES_LONGER * self._longest_s), 0.0
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAIT_INTERVAL_S)
            on_wait()
            waited_s = time.monotonic() - began
            if not is_told and waited_s > long_s:
                is_told = True
                say(
                    f"warning: training has waited {duration(waited_s)} for a checkpoint in"
                    f" {self._checkpoints}; see whether the disks of all nodes answer"
                    f"{', and the bucket' if self._mirror is not None else ''}"
                )
        self._thread, self._longest_s = None, max(self._longest_s, waited_s)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, job: _Job) -> None:
        """The writer thread. Each operation is collective, so a failure on any rank reaches all."""
        if not job.waited_for:
            _lower_priority()
        try:
            blocked_s = job.blocked_s + job.staged.wait()
            with importing():  # torch's own writer: most of a second
                from ingot.checkpoints.writer import write_checkpoint

            written = write_checkpoint(
                self._checkpoints,
                job.step,
                job.staged.tensors,
                job.payload,
                self._side_channel,
                scattered=self._mirror is not None,
            )
            try:
                self._retain_and_mirror(job, written)
            finally:
                total_s = time.monotonic() - job.began
                self._done.append(
                    Saved(
                        job.step,
                        written.folder,
                        total_s if job.waited_for else blocked_s,
                        total_s,
                        written.bytes,
                    )
                )
        except (Failed, WrongInput) as error:
            self._error = error
        except BaseException as error:
            self._error = Failed(
                f"checkpoint {step_folder(self._checkpoints, job.step)} could not be saved"
                f" ({describe_error(error)}); run the same command again"
            )
            self._error.__cause__ = error

    def _retain_and_mirror(self, job: _Job, written: Written) -> None:
        """After a commit: delete older checkpoints on disk, upload the new one to the mirror,
        delete older ones there.
        """
        kept = run_on_all(
            self._side_channel,
            lambda: None,
            lambda _: retain(self._checkpoints, job.keep, job.best, job.due),
        )
        if self._side_channel.ranks.local_rank == 0 and not self._side_channel.is_main:
            sweep(self._checkpoints, kept)  # this node may have a disk of its own
        mirror = self._mirror
        if mirror is not None:
            names = {name.removesuffix(BEFORE) for name in kept} | (
                {step_folder(self._checkpoints, job.best).name} if job.best is not None else set()
            )
            run_on_all(
                self._side_channel,
                lambda: mirror.put(written.folder, written.own_files),
                lambda _: mirror.commit(written.folder),
            )
            run_on_all(self._side_channel, lambda: None, lambda _: mirror.retain(names))


def _lower_priority() -> None:
    """Lower the priority of this thread only, which Linux allows."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
