"""A model's lineage, `ingot.json`: what it was made of; and whether it is that of the training that
was begun last in its run folder.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.base.environment import ranks
from ingot.base.progress import say
from ingot.base.reports import did_not_end
from ingot.base.runfolder import RunFolder

LINEAGE = "ingot.json"


def read_lineage(folder: Path) -> dict[str, Any] | None:
    """`ingot.json`: a model's lineage; None in a folder not written by ingot."""
    try:
        lineage = json.loads((folder / LINEAGE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return lineage if isinstance(lineage, dict) else None


def earlier_model(run: RunFolder) -> str | None:
    """That the model of a run may be an earlier training's, in words: its training was begun since
    and has not ended. None where it is that of the last one, or there is none.
    """
    if not did_not_end(run.steps, "train") or (made := read_lineage(run.model)) is None:
        return None
    return (
        f"`train` was begun in {run.root} and has not ended, so {run.model} (step"
        f" {made.get('step')}) may be an earlier training's"
    )


def tell_earlier_model(run: RunFolder) -> None:
    """Say so, once in a process and on the main rank, to those who use that model by its run."""
    if ranks().is_main and (told := earlier_model(run)) is not None:
        _tell_once(told)


@functools.cache
def _tell_once(told: str) -> None:
    say(f"note: {told}")


def started_from(lineage: Mapping[str, Any] | None) -> str | None:
    """The run and step whose weights a training went on from (`train.start_from`), in words; None
    where it began otherwise.
    """
    origin = (lineage or {}).get("start_from")
    if not isinstance(origin, dict) or not isinstance(origin.get("step"), int):
        return None
    checkpoint = Path(str(origin.get("checkpoint")))
    run = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    return f"{run.name} at step {origin['step']:,}"
