"""A run folder: its paths, which are the interface between the verbs, and the lock that gives it
one writer, which the kernel releases however its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ingot.base.environment import NODE_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.processes import descends_from, is_alive, process_scope
from ingot.base.progress import say
from ingot.base.storage import disk_errors, lock_file, make_folder

SET_ASIDE = "earlier"
"""The folder of earlier trainings that were set aside, each in a folder of its own."""
RUN_LOCK = "run-lock"
"""The lock that `ingot run` and a supervised training hold all along. Their steps and attempts take
the other one, which is free between them. It is held for a training on other machines, too: each of
its starts sends this folder anew, so data prepared meanwhile would be another's half way.
"""
TABLE = Path("/proc/locks")
ASKED_S = 0.01
"""Much longer than asking for a lock's holder takes."""


@dataclass(frozen=True)
class RunFolder:
    """`OUTPUT/NAME/`: everything that one recipe produced."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def data(self) -> Path:
        """Everything that `ingest` and `prepare` produce."""
        return self.root / "data"

    @property
    def raw(self) -> Path:
        """Ingested documents as Parquet."""
        return self.root / "data" / "raw"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that `prepare` trained or fetched, as a Hugging Face folder."""
        return self.root / "data" / "tokenizer"

    @property
    def columns(self) -> Path:
        """Prepared token columns with their `manifest.json`."""
        return self.root / "data" / "columns"

    @property
    def megatron(self) -> Path:
        """The token columns under the names that Megatron's tools expect."""
        return self.root / "data" / "megatron"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """The exported Hugging Face folder: what evaluate, register and serve use."""
        return self.root / "model"

    @property
    def adapter(self) -> Path:
        """The adapter of a LoRA run in PEFT's layout; `model` then is the base with it merged."""
        return self.root / "adapter"

    @property
    def reference(self) -> Path:
        """Log-probabilities of preferences under the reference model, beside the columns."""
        return self.root / "data" / "reference"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    @property
    def steps(self) -> Path:
        """One JSON record per finished step, by which `run` knows what is unchanged."""
        return self.reports / "steps"

    @property
    def plan(self) -> Path:
        """What `ingot plan --keep` said before, to be held against what came."""
        return self.reports / "plan.json"

    @property
    def layout(self) -> Path:
        """What `parallel: auto` was decided to be, on which devices and why."""
        return self.reports / "layout.json"

    @property
    def micro_batch(self) -> Path:
        """What `train.micro_batch: auto` was found to be, and what was tried."""
        return self.reports / "micro_batch.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Of a training on rewards: some prompts of each logged step, their answers and rewards."""
        return self.root / "samples.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def heartbeats(self) -> Path:
        """One small file per node with its ranks' heartbeats."""
        return self.root / "heartbeats"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def model_folder(folder: Path) -> Path:
    """The folder itself or, for a run folder, the model that the run exported, so that
    `model.source=runs/pre` continues from the run `pre`.
    """
    own = RunFolder(folder).model
    is_run = not (folder / "config.json").exists() and (own / "config.json").exists()
    return own if is_run else folder


@contextlib.contextmanager
def folder_lock(folder: Path, name: str = "lock") -> Iterator[None]:
    """Hold `folder/.name` exclusively; refuse at once if another process holds it.

    Raises:
        Failed: names the process that holds the lock.
    """
    path = folder / f".{name}"
    with disk_errors(folder):
        make_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            _lock_or_try_again(descriptor, path)
        except BlockingIOError:
            holder, _ = _named(os.pread(descriptor, 64, 0).decode(errors="replace"))
            raise in_use(folder, holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {process_scope()}".encode(), 0)
        try:
            yield
        finally:
            # Without a table of locks the id counts, and may be another process's by then.
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock_or_try_again(descriptor: int, path: Path) -> None:
    """Once more after a moment, for which who asks for the holder may have had the lock."""
    try:
        lock_file(descriptor, path, wait=False)
    except BlockingIOError:
        time.sleep(ASKED_S)
        lock_file(descriptor, path, wait=False)


@contextlib.contextmanager
def lock_in_turn(folder: Path, name: str, waiting: str) -> Iterator[None]:
    """Hold `folder/.name` exclusively; while another process holds it, say `waiting` and wait. On a
    disk without locks nobody is waited for.
    """
    path = folder / f".{name}"
    with disk_errors(folder):
        make_folder(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(WrongInput):
            try:
                lock_file(descriptor, path, wait=False)
            except BlockingIOError:
                say(waiting)
                lock_file(descriptor, path, wait=True)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def shared_lock(folder: Path, name: str, when_alone: Callable[[], None]) -> Iterator[None]:
    """Hold `folder/.name` together with any number of other processes.

    If no other process holds it, `when_alone` is called first, and no other process enters until it
    returns: whatever it finds was left by dead processes. It is never called on a disk without
    locks.
    """
    with disk_errors(folder):
        descriptor = os.open(folder / f".{name}", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            when_alone()
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def in_use(folder: Path, holder: int | str) -> Failed:
    """The error that names who uses a folder."""
    return Failed(
        f"{folder} is in use by process {holder}; wait for it, stop it, or choose another `name`"
    )


def check_no_other_run(folder: Path) -> None:
    """Refuse what was typed while an `ingot run` or a supervised training is at work, which would
    end between two of its steps if another process took its folder then. What these started
    themselves goes on, on this machine or as a node of a job.

    Raises:
        Failed: names the process.
    """
    holder = lock_holder(folder, RUN_LOCK)
    if holder is None or NODE_VARIABLE in os.environ:
        return
    if not (names_process_of_here(folder, RUN_LOCK) and descends_from(holder)):
        raise in_use(folder, holder)


def names_process_of_here(folder: Path, name: str = "lock") -> bool:
    """Whether `folder/.name` tells the id of a process of this container: those of another one have
    the same ids, 1 above all, from which every process of a container descends.
    """
    try:
        _, scope = _named((folder / f".{name}").read_text(errors="replace"))
    except OSError:
        return False
    return scope in ("", process_scope())  # "": of an ingot that did not tell it yet


def _named(text: str) -> tuple[str, str]:
    """The id of the process that a lock tells, and where that is one."""
    process, _, scope = text.strip().partition(" ")
    return process, scope


def lock_holder(folder: Path, name: str = "lock") -> int | None:
    """The process that holds `folder/.name`, or None. Read-only, so it never keeps a run from
    starting.

    Reads the kernel's table of locks, and without one (not Linux) tries the lock for a moment, as
    for a process that is not seen here: of another container or machine. On a disk without locks a
    live process with the recorded id counts as the holder.
    """
    path = folder / f".{name}"
    try:
        process, inode = int(_named(path.read_text())[0]), path.stat().st_ino
    except (OSError, ValueError):
        return None
    alive = is_alive(process)
    if alive and not TABLE.exists():
        return process if _is_locked(path, otherwise=True) else None
    held = alive and any(
        f":{inode} " in line and " FLOCK " in line for line in TABLE.read_text().splitlines()
    )
    return process if held or _is_locked(path, otherwise=False) else None


def _is_locked(path: Path, *, otherwise: bool) -> bool:
    """Whether a lock is held as far as trying it tells; `otherwise`: on a disk without locks.
    Together with others that ask: they are no holders.
    """
    with path.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return otherwise
    return False
