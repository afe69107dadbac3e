"""Tries all faults of an action, and counts: what was planned, what strace says that it did, what
was survived, what ended equal.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.actions import Action, leftovers
from tests.chaos.disk import Disk, Tree, put_on_disk, read_tree
from tests.chaos.strace import (
    Call,
    Fault,
    Moment,
    faults,
    faults_anywhere,
    here,
    kill,
    record,
    renamed,
)
from tests.chaos.zygote import Zygote

MAPPED = re.compile(r"-shm$|/heartbeats/")
"""Files that are written through a mapping, which no trace shows, and that mean nothing after a
crash.
"""


@dataclass
class Count:
    """Faults: planned; injected, as strace itself tells; survived: only whole things stood after
    it; equal: so did the end, with nothing left over.
    """

    planned: int = 0
    injected: int = 0
    survived: int = 0
    equal: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"planned {self.planned}, injected {self.injected}, survived {self.survived}, equal"
            f" {self.equal}"
        )

    def check(self) -> None:
        """Raises AssertionError naming the faults that were not survived."""
        assert self.planned, "no fault was planned"
        assert self.planned == self.injected == self.survived == self.equal, (
            f"{self}:\n" + "\n".join(self.wrong[:20])
        )


@dataclass(frozen=True)
class Recording:
    """An undisturbed run in `folder`, from `start` to what `expected` tells."""

    action: Action
    start: Path
    folder: Path
    process: int
    calls: Sequence[Call]
    expected: Any
    ended: Tree

    def again(self) -> None:
        """Let the folder be as it was in the beginning, times of files too."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.start, self.folder)


def rehearse(zygote: Zygote, action: Action, root: Path) -> Recording:
    """Let the action begin and end undisturbed below `root`, and write down every call."""
    start, folder = root / "start", root / "run"
    folder.mkdir(parents=True)
    action.begin(folder)
    folder.rename(start)
    shutil.copytree(start, folder)
    child = zygote.fork(action.ready, folder)
    calls = record(child, root / "strace.log")
    assert action.state(folder) == "new", "the undisturbed action did nothing"
    return Recording(
        action, start, folder, child.pid, calls, action.result(folder), read_tree(folder)
    )


def kill_at_every_call(
    zygote: Zygote,
    heard: Recording,
    moments: Sequence[Moment],
    most: int | None = None,
    seed: int | None = None,
) -> Count:
    """Kill the action at each of its changing calls, look at what stands, and run it again.

    With `most` at so many of them: evenly, or with a `seed` one drawn from each of as many equal
    stretches.
    """
    found = faults(heard.calls, heard.folder)
    planned = evenly(found, most) if seed is None or most is None else drawn(found, most, seed)
    count = Count()
    for moment in moments:
        for fault in planned:
            _kill(zygote, heard, fault, moment, count)
    print(f"{heard.action.name}: killed at {len(planned)} calls, {' and '.join(moments)}: {count}")
    return count


def kill_anywhere(zygote: Zygote, heard: Recording, most: int) -> Count:
    """Kill one of the action's several processes at `most` calls, evenly over all, whichever
    process comes to it first.
    """
    count = Count()
    for fault in evenly(faults_anywhere(heard.calls, heard.folder), most):
        _kill(zygote, heard, fault, "before", count)
    print(
        f"{heard.action.name}: one of {len({call.process for call in heard.calls})} processes and"
        f" threads killed at {count.planned} calls: {count}"
    )
    return count


def _kill(zygote: Zygote, heard: Recording, fault: Fault, moment: Moment, count: Count) -> None:
    heard.again()
    child = zygote.fork(heard.action.ready, heard.folder)
    mine = replace(
        fault,
        path=renamed(fault.path, heard.process, child.pid),
        about=renamed(fault.about, heard.process, child.pid),
    )
    hit = kill(child, mine, heard.folder, heard.start.with_name("kill.log"), moment)
    count.planned += 1
    if hit is not None and mine.about == (here(hit, heard.folder) if mine.path else hit.name):
        count.injected += 1
    else:
        count.wrong.append(
            f"{moment} {fault.about}: strace says that it was at {hit and here(hit, heard.folder)}"
        )
    _judge(zygote, heard, f"killed {moment} {fault.index} {fault.about}", count)


def crash_after_every_call(zygote: Zygote, heard: Recording, most: int | None = None) -> Count:
    """Let the machine crash after each changing call, with all parts lost that a crash may lose,
    and run the action again.

    What `injected` counts here are crashes; states of the disk that are alike are tried once and
    count for all.
    """
    changing = [
        index
        for index, call in enumerate(heard.calls)
        if call.changes and not call.failed and call.is_below(heard.folder)
    ]
    chosen, count, known = set(evenly(changing, most)), Count(), dict[bytes, tuple[int, int]]()
    for index, what, tree in _crashes(heard, chosen):
        count.planned += 1
        last = index == changing[-1]
        key = hashlib.sha256(repr((last, sorted(tree.items()))).encode()).digest()
        if key not in known:
            put_on_disk(tree, heard.folder, heard.start)
            before, about = (
                (count.survived, count.equal),
                (heard.calls[index] if index >= 0 else "nothing"),
            )
            _judge(zygote, heard, f"crashed after {index} {about}, {what}", count, last=last)
            known[key] = (count.survived - before[0], count.equal - before[1])
        else:
            count.survived += known[key][0]
            count.equal += known[key][1]
        count.injected += 1
    print(
        f"{heard.action.name}: crashed after {len(chosen)} calls, {len(known)} states of the disk:"
        f" {count}"
    )
    return count


def _crashes(heard: Recording, chosen: set[int]) -> Iterator[tuple[int, str, Tree]]:
    disk = Disk(heard.start, heard.folder)
    yield from ((-1, what, tree) for what, tree in disk.crashes())
    for index, call in enumerate(heard.calls):
        disk.do(call)
        if index in chosen:
            yield from ((index, what, tree) for what, tree in disk.crashes())
    modelled, found = disk.all_done(), heard.ended
    differing = {
        path: (modelled.get(path, b"missing"), found.get(path, b"missing"))
        for path in sorted(modelled.keys() | found.keys())
    }
    differing = {
        path: both
        for path, both in differing.items()
        if both[0] != both[1] and not MAPPED.search(path)
    }
    assert not differing, f"the model of the disk does not end as the disk did: {differing}"[:5_000]


def _judge(
    zygote: Zygote, heard: Recording, fault: str, count: Count, *, last: bool = False
) -> None:
    action, folder = heard.action, heard.folder
    try:
        state = action.state(folder)
        assert not (last and action.lasts and state != "new"), (
            "what was done is lost though all had ended"
        )
        count.survived += 1
    except Exception as error:
        count.wrong.append(f"{fault}: {type(error).__name__}: {error}"[:500])
    try:
        zygote.run(action.ready, folder)
        result, left = action.result(folder), leftovers(folder)
        if result == heard.expected and not left:
            count.equal += 1
        else:
            count.wrong.append(
                f"{fault}: run again it ended"
                f" {'with ' + ', '.join(left) if left else 'otherwise: ' + _differs(result, heard.expected)}"
            )
    except Exception as error:
        count.wrong.append(f"{fault}: run again it failed: {error}"[-700:])


def _differs(found: Any, wanted: Any) -> str:
    if isinstance(found, dict) and isinstance(wanted, dict):
        differing = [
            key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)
        ]
        return "; ".join(f"{key}: {_differs(found.get(key), wanted.get(key))}" for key in differing)
    return f"{str(found)[:200]} instead of {str(wanted)[:200]}"


def drawn(items: Sequence[Any], most: int, seed: int) -> list[Any]:
    """One of each of `most` equal stretches, by `seed`."""
    if len(items) <= most:
        return list(items)
    draw, bounds = random.Random(seed), [len(items) * number // most for number in range(most + 1)]
    return [items[draw.randrange(first, after)] for first, after in itertools.pairwise(bounds)]


def evenly(items: Sequence[Any], most: int | None) -> list[Any]:
    """At most that many, the first and the last among them."""
    if most is None or len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
