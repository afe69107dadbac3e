"""Makes parts in several processes on this machine. Which process makes which part changes nothing in the files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.progress import Progress
from ingot.data.documents import Shares
from ingot.data.parts import Made, Range, make_part
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class Job:
    """What every worker needs to make any part."""

    raw: Path
    columns: Path
    tokenizer: Path
    shares: Shares


def make_parts(job: Job, tasks: Sequence[Range], workers: int, progress: Progress) -> list[Made]:
    """Make all parts with up to `workers` processes (0: one per core); this process alone where one is enough.

    Raises:
        WrongInput, Failed: as `make_part`; Failed also when a process dies, for want of memory for example.
    """
    workers = min(workers or cores(), len(tasks))
    if workers <= 1:
        return _make_here(job, tasks, progress)
    # Not forked: a fork copies the threads' locks of Arrow and tokenizers, but not the threads.
    context = multiprocessing.get_context("spawn")
    advanced, stop = context.Value("Q", 0), context.Event()
    began = progress.done
    made: list[Made] = []
    with ProcessPoolExecutor(workers, context, _start, (job, advanced, stop)) as pool:
        waiting = {pool.submit(_make, task) for task in tasks}
        try:
            while waiting:
                finished, waiting = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                made += [future.result() for future in finished]
                progress.update(began + advanced.value // 10**6, parts=f"{len(made)}/{len(tasks)}")
        except BrokenProcessPool as error:
            raise Failed("a worker process died, perhaps for want of memory; run the same command again, or with fewer data.engine.workers") from error
        except BaseException:
            # They notice at their next batch of documents; until then they write, so they are waited for.
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return made


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_here(job: Job, tasks: Sequence[Range], progress: Progress) -> list[Made]:
    tokenizer = load_tokenizer(job.tokenizer)
    made, advanced, began = list[Made](), 0, progress.done

    def advance(size: int) -> None:
        nonlocal advanced
        advanced += size
        progress.update(began + advanced // 10**6, parts=f"{len(made)}/{len(tasks)}")

    for task in tasks:
        made.append(make_part(job.raw, job.columns, task, tokenizer, job.shares, advance))
    return made


class _Worker:
    """The state of one worker process."""

    def __init__(self, job: Job, advanced: Synchronized[int], stop: Event) -> None:
        self.job, self.advanced, self.stop = job, advanced, stop
        self.tokenizer: Tokenizer = load_tokenizer(job.tokenizer)

    def advance(self, size: int) -> None:
        if self.stop.is_set():
            raise Failed("preparing was stopped")
        with self.advanced.get_lock():
            self.advanced.value += size


_workers: list[_Worker] = []


def _start(job: Job, advanced: Synchronized[int], stop: Event) -> None:
    # One thread per process: the processes are the parallelism. And Ctrl-C is the parent's to answer.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _workers.append(_Worker(job, advanced, stop))


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever, and write beside the next run."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(task: Range) -> Made:
    worker = _workers[0]
    return make_part(worker.job.raw, worker.job.columns, task, worker.tokenizer, worker.job.shares, worker.advance)
