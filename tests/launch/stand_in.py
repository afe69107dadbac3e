"""A training without mathematics, to be supervised: beats, commits checkpoints, and does what a
plan says. Run as `python stand_in.py RUN_FOLDER`.

The plan is `RUN_FOLDER/plan.json`: `{"steps": 40, "every": 10, "step_s": 0.01, "attempts": [[RANK,
STEP, DEED, ARGUMENT], ...]}`. The n-th start does the n-th deed (null for none) when `RANK` has
done `STEP` steps; after the last one nothing happens any more. Ranks wait for each other after
every step.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.base.heartbeat import HeartbeatWriter, heartbeat_file, read_beats
from ingot.base.markers import read_marker, write_marker
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, read_lines, record_event


def main(run: RunFolder) -> int:
    plan: dict[str, Any] = json.loads((run.root / "plan.json").read_text())
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    attempt = begin(run.root / "starts", rank)
    who, at, deed, argument = (
        plan["attempts"][attempt - 1] if attempt <= len(plan["attempts"]) else None
    ) or (None, 0, "", None)
    if deed == "never" and rank == who:
        time.sleep(600)
    run.logs.mkdir(exist_ok=True)
    stacks = (run.logs / f"stacks-rank{rank}.txt").open("a")
    faulthandler.register(signal.SIGUSR2, all_threads=True, file=stacks)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    heart = HeartbeatWriter(run.heartbeats, rank=rank, local_rank=rank, attempt=attempt)
    done = max(
        (
            int(folder.name[5:])
            for folder in run.checkpoints.glob("step-*")
            if read_marker(folder, "COMMIT.json")
        ),
        default=0,
    )
    heart.usual_s = plan["step_s"]
    heart.beat("loading", step=done)
    if rank == 0:
        record_event(run.events, "start", attempt=attempt, step=done)
    while done < plan["steps"]:
        heart.beat("step", step=done, place=0)
        if rank == who and done >= at:
            do(deed, argument)
        time.sleep(plan["step_s"] * (argument if rank == who and deed == "slow" else 1))
        heart.beat(place=1)
        wait_for_others(run, done, attempt, world, asked)
        done += 1
        if rank == 0 and (done % plan["every"] == 0 or asked):
            write_marker(
                make(run.checkpoints / f"step-{done:08d}"), "COMMIT.json", {"step": done}, []
            )
        if asked:
            return 75
    heart.beat("over", step=done)
    return 0


def begin(starts: Path, rank: int) -> int:
    """The number of this start, from 1, which is noted. Ranks of one start have the port in common
    at which they would meet: one that was killed before it noted anything counts like the others.
    """
    before, port = list(read_lines(starts)), os.environ.get("MASTER_PORT")
    append_line(starts, {"rank": rank, "argv": sys.argv[2:], "pid": os.getpid(), "port": port})
    if port is None:
        return 1 + sum(line["rank"] == rank for line in before)
    return len(dict.fromkeys(line["port"] for line in [*before, {"port": port}]))


def do(deed: str, argument: Any) -> None:
    if deed == "kill":
        os.kill(os.getpid(), argument)
    elif deed == "exit":
        os._exit(argument)
    elif deed == "hang":
        hang_here()
    elif deed == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)


def hang_here() -> None:
    while True:
        time.sleep(60)


def wait_for_others(
    run: RunFolder, step: int, attempt: int, world: int, asked: Sequence[int]
) -> None:
    """As in a collective: until all ranks of this attempt have come as far, or we were asked to
    stop, as others may have been a step earlier.
    """
    while (
        not asked
        and sum(
            (beat.step, beat.place) >= (step, 1)
            for beat in read_beats(heartbeat_file(run.heartbeats))
            if beat.attempt == attempt
        )
        < world
    ):
        time.sleep(0.002)


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main(RunFolder(Path(sys.argv[1]))))
