"""Runs the work in several processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event

from ingot.base.environment import usable_cores
from ingot.base.errors import Failed
from ingot.base.forkserver import start_fork_server
from ingot.base.processes import without_main_module
from ingot.base.progress import Progress
from ingot.data.engines.engine import LOOK_EVERY_S, Result, Stage, Task, open_stage


class LocalEngine:
    """Up to `workers` processes (0: one per core), or only this process if one is enough. The
    processes are reused across stages until `close`.
    """

    def __init__(self, workers: int = 0) -> None:
        self._workers = workers or usable_cores()
        self._pool: _Pool | None = None

    def warm(self, *modules: str) -> None:
        """Import modules that the workers will need in the process that they are forked from, in
        the background.
        """
        if self._workers > 1:
            start_fork_server(*modules)

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        """See `Engine.run`."""
        if min(self._workers, len(tasks)) <= 1:
            return _run_here(work, tasks, progress)
        if self._pool is None:
            self._pool = _Pool(self._workers)
        try:
            return self._pool.run(work, tasks, progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. They notice at their next batch of documents; until then they may
        write, so they are joined.
        """
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _Pool:
    """Worker processes and the state they share with this one: bytes processed and the stop
    flag.
    """

    def __init__(self, workers: int) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        try:
            self._advanced, self._stop = context.Value("Q", 0), context.Event()
            self._pool = ProcessPoolExecutor(workers, context, _start, (self._advanced, self._stop))
        except OSError as error:
            raise Failed(
                f"worker processes get no shared memory ({error.strerror}): /dev/shm must have room"
                " and be writable (docker: --shm-size); or set data.engine.workers=1"
            ) from error

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        began, self._advanced.value = progress.done, 0
        try:
            # In a thread, where no signal interrupts it between the start of a worker and the
            # pool's note of it: to end, the pool would wait for a worker that it does not stop.
            with without_main_module(), ThreadPoolExecutor(1) as starter:
                futures: list[Future[Result]] = starter.submit(
                    lambda: [self._pool.submit(_do, work, task) for task in tasks]
                ).result()
            waiting = set(futures)
            while waiting:
                finished, waiting = wait(waiting, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                progress.update(
                    began + self._advanced.value // 10**6,
                    parts=f"{len(tasks) - len(waiting)}/{len(tasks)}",
                )
        except BrokenProcessPool as error:
            raise Failed(
                "a worker process died, perhaps for want of memory; run the same command again, or"
                " with fewer data.engine.workers"
            ) from error
        return [future.result() for future in futures]

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _run_here(work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress) -> list[Result]:
    do, results, advanced, began = work.open(), list[Result](), 0, progress.done

    def advance(size: int) -> None:
        nonlocal advanced
        advanced += size
        progress.update(began + advanced // 10**6, parts=f"{len(results)}/{len(tasks)}")

    for task in tasks:
        results.append(do(task, advance))
    return results


class _Shared:
    """What a worker process shares with its parent."""

    def __init__(self, advanced: Synchronized[int], stop: Event) -> None:
        self._advanced, self._stop = advanced, stop

    def advance(self, size: int) -> None:
        if self._stop.is_set():
            raise Failed("preparing was stopped")
        with self._advanced.get_lock():
            self._advanced.value += size


_shared: list[_Shared] = []


def _start(advanced: Synchronized[int], stop: Event) -> None:
    # One thread per process: parallelism comes from processes. Ctrl-C is handled by the parent.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _shared.append(_Shared(advanced, stop))


def _end_with_parent() -> None:
    """Die with the parent: an orphaned worker would wait for work for ever, and write beside the
    next run.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(work: Stage[Task, Result], task: Task) -> Result:
    return open_stage(work)(task, _shared[0].advance)
