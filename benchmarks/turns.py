"""Contenders that take turns: each lives in a process of its own, runs when told to, and waits
while the others run.

So all of them meet the same moods of a shared machine, their ratio is taken turn by turn, and each
one's peak memory is its own.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

SAME = 0.01


@dataclass(frozen=True)
class Turn:
    """What one turn did: how many units (tokens, megabytes), and where there is one a number that
    all contenders must find alike.
    """

    units: float
    found: float | None = None


Work = Callable[[], Turn]


@dataclass(frozen=True)
class Contender:
    """`make(*arguments)` is called in the contender's own process and answers its work; it must be
    importable.

    `imports` are loaded before memory is counted.
    """

    name: str
    make: Callable[..., Work]
    arguments: tuple[Any, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What one contender did: units per second and CPU-seconds per turn (its children's too), and
    memory beyond its imports.
    """

    name: str
    rates: list[float]
    seconds: list[float]
    cpu_seconds: list[float]
    memory_bytes: int

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def take_turns(contenders: Sequence[Contender], rounds: int, threads: int) -> list[Result]:
    """Each contender once to warm up, then `rounds` rounds, in an order that is turned by one each
    time.

    Ends the program when a contender fails, or when the first turns show that they do not do the
    same work.
    """
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # the contenders inherit it
    pipes: list[Connection] = []
    processes, found = [], list[float | None]()
    try:
        for contender in contenders:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(contender, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
            found.append(_answer(ours, contender))
        _compare(contenders, found)
        turns: list[list[tuple[float, float, float]]] = [[] for _ in contenders]
        for number in range(rounds):
            for shift in range(len(contenders)):
                who = (number + shift) % len(contenders)
                pipes[who].send("go")
                turns[who].append(_answer(pipes[who], contenders[who]))
        return [
            _result(contender, pipe, done)
            for contender, pipe, done in zip(contenders, pipes, turns, strict=True)
        ]
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def ratio(one: Result, other: Result) -> tuple[float, float, float]:
    """How many times the rate of `other` is that of `one`: median over the rounds, least, most."""
    each = [a / b for a, b in zip(one.rates, other.rates, strict=True)]
    return statistics.median(each), min(each), max(each)


def _compare(contenders: Sequence[Contender], found: Sequence[float | None]) -> None:
    numbers = [number for number in found if number is not None]
    if numbers and max(numbers) - min(numbers) > SAME * abs(numbers[0]):
        each = ", ".join(
            f"{contender.name} {number}"
            for contender, number in zip(contenders, found, strict=True)
        )
        raise SystemExit(f"the contenders do not do the same work: {each}")


def _result(
    contender: Contender, pipe: Connection, turns: Sequence[tuple[float, float, float]]
) -> Result:
    pipe.send("end")
    memory = _answer(pipe, contender)
    units, seconds, cpu = (list(column) for column in zip(*turns, strict=True))
    return Result(
        contender.name, [u / s for u, s in zip(units, seconds, strict=True)], seconds, cpu, memory
    )


def _answer(pipe: Connection, contender: Contender) -> Any:
    try:
        ok, value = pipe.recv()
    except EOFError:
        raise SystemExit(f"{contender.name} ended without an answer") from None
    if not ok:
        raise SystemExit(f"{contender.name} failed:\n{value}")
    return value


def _live(contender: Contender, pipe: Connection) -> None:
    """The contender's process."""
    try:
        for name in contender.imports:
            importlib.import_module(name)
        before = _peak_bytes()
        work = contender.make(*contender.arguments)
        pipe.send((True, work().found))
        while pipe.recv() == "go":
            began, cpu = time.perf_counter(), _cpu_seconds()
            units = work().units
            pipe.send((True, (units, time.perf_counter() - began, _cpu_seconds() - cpu)))
        pipe.send((True, _on_device_bytes() or _peak_bytes() - before))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _cpu_seconds() -> float:
    """CPU seconds of this process, of the children that it has waited for, and of those that live,
    with theirs.
    """
    own = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            times = child.cpu_times()
            own += times.user + times.system + times.children_user + times.children_system
    return own


def _on_device_bytes() -> int:
    """Most that torch allocated on a GPU; 0 where it was not used."""
    torch = sys.modules.get("torch")
    return (
        torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_available() else 0
    )


def _peak_bytes() -> int:
    """Most memory that this process has held. Where the kernel tells, since it was started:
    `ru_maxrss` would count its parent's.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) * 1024
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
