"""What a run folder says of a step before it is done again, to be put back where it is refused and
nothing was changed: a mistyped knob ends a training before its first step, and takes nothing from
the training before it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ingot.base.reports import read_record
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic

Stamps = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class FormerRecord:
    """The record of a step and the recipe beside it, as they were; `made` are the stamps of
    everything that steps make in the folder.
    """

    run: RunFolder
    texts: dict[Path, bytes]
    made: Stamps

    @classmethod
    def of(cls, run: RunFolder, verb: str) -> FormerRecord | None:
        """None where the step was not done before, or did not end."""
        if read_record(run.steps, verb) is None or not run.recipe.exists():
            return None
        files = (run.recipe, run.steps / f"{verb}.json")
        return cls(run, {file: file.read_bytes() for file in files}, _made(run))


def put_back(former: FormerRecord | None) -> None:
    """Say again what was said before, unless something was made since; the record last."""
    if former is not None and _made(former.run) == former.made:
        for file, text in former.texts.items():
            write_atomic(file, text)


def _made(run: RunFolder) -> Stamps:
    """Size, time and number of each file but those that tell of attempts, whatever these made."""
    tell = {
        *(run.recipe, run.events, run.heartbeats, run.logs, run.root / "jobs", run.tensorboard),
        *(run.steps, run.reports / "index.html", run.layout, run.micro_batch),
    }
    found: Stamps = {}
    for folder, inner, names in os.walk(run.root):
        inner[:] = [name for name in inner if Path(folder, name) not in tell]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if file not in tell:
                now = file.lstat()
                found[str(file)] = now.st_size, now.st_mtime_ns, now.st_ino
    return found
