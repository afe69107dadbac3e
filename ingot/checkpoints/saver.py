"""Saves a training's state while training goes on: a copy is made at once, and a thread writes,
commits, uploads and clears up behind it.

One save is under way at a time. What it is that fails, on whichever rank, is an error of all ranks.
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
from ingot.base.progress import say
from ingot.checkpoints.state import Staged, Staging, training_tensors, unstaged
from ingot.checkpoints.store import BEFORE, retain, step_folder, sweep
from ingot.checkpoints.together import in_words, together
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh

if TYPE_CHECKING:
    from ingot.checkpoints.writer import Written

SAID_EVERY_S = 0.5
NICE = 10
"""The writer steps back where it and training want the same core."""


class Mirror(Protocol):
    """A second place that every committed checkpoint goes to. What it raises is an error of the
    run.
    """

    def put(self, folder: Path, names: Sequence[str]) -> None:
        """Each rank, the files that it wrote; what is there already with the same size and checksum
        is not sent again.
        """

    def commit(self, folder: Path) -> None:
        """Rank 0 alone, after all ranks' `put`: the marker."""

    def retain(self, kept: Collection[str]) -> None:
        """Rank 0 alone: step folders that are not among these names go, their markers first."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed."""

    step: int
    folder: Path
    blocked_s: float
    """Seconds that training itself waited, for the copy and for the save before; on a device, those
    that it copied.
    """
    total_s: float
    bytes: int
    """Of all files of all ranks."""


@dataclass(frozen=True)
class _Job:
    step: int
    staged: Staged
    payload: Mapping[str, Any]
    keep: int
    best: int | None
    began: float
    blocked_s: float


class Saver:
    """Writes checkpoints into a folder, one after the other. All ranks make one and call `save` and
    `wait` alike.

    Args:
        asynchronous: `save` comes back when the state is copied, which costs the host's memory that
            `Staging` tells. Without, nothing is copied, and it comes back when the checkpoint is
            committed.
        said: called now and then while the caller's thread waits for the writer.
    """

    def __init__(
        self,
        checkpoints: Path,
        mesh: Mesh,
        *,
        asynchronous: bool,
        mirror: Mirror | None = None,
        said: Callable[[], None] = lambda: None,
    ) -> None:
        self._checkpoints, self._mirror, self._said = checkpoints, mirror, said
        self._staging = Staging() if asynchronous else None
        self._line = mesh.side_channel()
        self._thread: threading.Thread | None = None
        self._done: deque[Saved] = deque()
        self._error: Exception | None = None

    def prepare(self, masters: Masters, optimizer: Optimizer) -> None:
        """Take the memory for copies now, beside training, so that the first save need not wait for
        it. Once the optimizer has its state; may be left out.
        """
        if self._staging is not None and self._thread is None:
            self._thread = threading.Thread(
                target=self._staging.make_room,
                args=(training_tensors(masters, optimizer),),
                name="make-room",
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
    ) -> None:
        """Save the state after `step` optimizer steps, with what `payload` says beside it in the
        marker; then all but `keep` and `best` go.

        Waits for the save before.

        Raises:
            Failed: the save before could not be written (nothing is saved then), or, when not
                asynchronous, this one: the disk is full, say.
        """
        began = time.monotonic()
        self._join(self._said)
        self._raise()
        tensors = training_tensors(masters, optimizer)
        staged = unstaged(tensors) if self._staging is None else self._staging.copy(tensors)
        job = _Job(
            step, staged, copy.deepcopy(dict(payload)), keep, best, began, time.monotonic() - began
        )
        # Not a daemon: a process that ends in good order does not tear it.
        self._thread = threading.Thread(target=self._work, args=(job,), name=f"save-{step}")
        self._thread.start()
        if self._staging is None:
            self._join(self._said)
            self._raise()

    def done(self) -> list[Saved]:
        """What was committed since last asked; waits for nothing."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @property
    def failed(self) -> bool:
        """The writer of this rank has failed, which `wait` will raise."""
        return self._error is not None

    def wait(self) -> list[Saved]:
        """Until nothing is under way; what was committed since last asked.

        Raises:
            Failed: a checkpoint could not be written, on any rank. It is told once; then saving may
                go on.
            WrongInput: the folder may not be written.
        """
        self._join(self._said)
        self._raise()
        return self.done()

    def close(self) -> None:
        """Wait for what is under way, however training ended, and let the memory go."""
        with contextlib.suppress(Exception):
            self._join(lambda: None)
        self._staging = Staging() if self._staging is not None else None
        if self._error is not None:
            say(f"warning: {self._error}")

    def _join(self, said: Callable[[], None]) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(SAID_EVERY_S)
            said()
        self._thread = None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self, job: _Job) -> None:
        """In the thread. Each act ends alike on all ranks, so that all know of a failure on any."""
        if self._staging is not None:
            _step_back()
        try:
            blocked_s = job.blocked_s + job.staged.settle()
            from ingot.checkpoints.writer import write_checkpoint  # and torch's distributed package

            written = write_checkpoint(
                self._checkpoints,
                job.step,
                job.staged.tensors,
                job.payload,
                self._line,
                scattered=self._mirror is not None,
            )
            try:
                self._after(job, written)
            finally:
                total_s = time.monotonic() - job.began
                self._done.append(
                    Saved(
                        job.step,
                        written.folder,
                        total_s if self._staging is None else blocked_s,
                        total_s,
                        written.bytes,
                    )
                )
        except (Failed, WrongInput) as error:
            self._error = error
        except BaseException as error:
            self._error = Failed(
                f"checkpoint {step_folder(self._checkpoints, job.step)} could not be saved"
                f" ({in_words(error)}); run the same command again"
            )
            self._error.__cause__ = error

    def _after(self, job: _Job, written: Written) -> None:
        """What follows a commit: older ones go here, the new one goes to the mirror, older ones go
        there.
        """
        kept = together(
            self._line, lambda: None, lambda _: retain(self._checkpoints, job.keep, job.best)
        )
        if self._line.ranks.local_rank == 0 and not self._line.is_main:
            sweep(self._checkpoints, kept)  # where this node has a disk of its own
        mirror = self._mirror
        if mirror is not None:
            names = {name.removesuffix(BEFORE) for name in kept} | (
                {step_folder(self._checkpoints, job.best).name} if job.best is not None else set()
            )
            together(
                self._line,
                lambda: mirror.put(written.folder, written.mine),
                lambda _: mirror.commit(written.folder),
            )
            together(self._line, lambda: None, lambda _: mirror.retain(names))


def _step_back() -> None:
    """Let this thread alone be less urgent, where the system knows such a thing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
