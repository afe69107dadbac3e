"""The record that a finished step leaves, by which the next `run` knows that nothing changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot.base.storage import write_atomic


@dataclass(frozen=True)
class Outcome:
    """What a verb hands back to the command line.

    `result` is one short phrase for the table, `where` the path to look at, `outputs` a fingerprint
    of what was made (equal outputs leave later steps unchanged), `files` the paths (relative to the
    run folder) that must stay with their sizes for the step to count as done.
    """

    result: str
    where: str
    outputs: str
    files: dict[str, int] = field(default_factory=dict)
    exit_code: int = 0


def sizes(root: Path, paths: Iterable[Path]) -> dict[str, int]:
    """`files` of an Outcome: each path relative to `root` with its size in bytes."""
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


@dataclass(frozen=True)
class StepRecord:
    """What a step read (`inputs`, one fingerprint), what it made (`outputs`, one fingerprint) and
    what it tells.

    `knobs` keeps the values that went into the fingerprint, so that a change can be named. `files`
    are paths relative to the run folder with their sizes; a missing or resized one makes the record
    void.
    """

    step: str
    inputs: str
    outputs: str
    seconds: float
    result: str
    where: str
    knobs: dict[str, Any] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    exit_code: int = 0


def write_record(folder: Path, record: StepRecord) -> None:
    write_atomic(
        folder / f"{record.step}.json",
        json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n",
    )


def read_record(folder: Path, step: str) -> StepRecord | None:
    """The record of `step`; None where there is none, or one that this version cannot read."""
    try:
        return StepRecord(**json.loads((folder / f"{step}.json").read_bytes()))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def is_intact(root: Path, record: StepRecord) -> bool:
    """True when every file that the record names still has its size."""
    for path, size in record.files.items():
        try:
            if (root / path).stat().st_size != size:
                return False
        except OSError:
            return False
    return True
