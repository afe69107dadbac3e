"""A model's lineage, `ingot.json`: what it was made of; whether it is that of the training that was
begun last in its run folder; and how it is made again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.base.environment import ranks
from ingot.base.exact_json import read_object
from ingot.base.markers import checkpoint_markers
from ingot.base.progress import say
from ingot.base.reports import did_not_end
from ingot.base.runfolder import SET_ASIDE, RunFolder

LINEAGE = "ingot.json"
MERGED = "merged"
"""Where an adapter's lineage has the hash of the model that was exported with it merged."""


def read_lineage(folder: Path) -> dict[str, Any] | None:
    """`ingot.json`: a model's lineage; None in a folder not written by ingot."""
    return read_object(folder / LINEAGE)


def is_of_another(adapter: Path, model: Path) -> bool:
    """Whether an adapter's lineage says that it was merged into another model than that of `model`,
    beside which it lies.
    """
    merged = (read_lineage(adapter) or {}).get(MERGED)
    return merged is not None and merged != (read_lineage(model) or {}).get("model_hash")


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


def model_again(folder: Path, otherwise: str = "fetch the model again") -> str:
    """How to come by a model or adapter whose folder is damaged or was changed, in words.

    `ingot train` calls a run's own unchanged as long as its files have their sizes, so that one has
    to go first; but only where the training that lies there is over and has its step: removed in
    the midst of another, the model of the one before would be lost for nothing.
    """
    run = RunFolder(folder.parent)
    markers = checkpoint_markers(run.checkpoints)
    if folder not in (run.model, run.adapter) or not markers:
        return otherwise
    step = (read_lineage(folder) or {}).get("step")
    is_over = markers[0]["finished"] and not did_not_end(run.steps, "train")
    if is_over and _has_step(markers, step):
        return f"remove {folder} and run `ingot train`, which exports it from the checkpoint"
    after = "" if is_over else f", once the training in {run.checkpoints} has ended"
    for place in sorted((run.root / SET_ASIDE).glob("*")):
        before = checkpoint_markers(place / "checkpoints")
        if before and before[0]["finished"] and _has_step(before, step):
            return (
                f"an earlier training made it, whose checkpoints are in {place}: `ingot train` with"
                f" its recipe exports it again{after}"
            )
    if is_over:
        return otherwise
    return f"`ingot train` goes on with the training in {run.checkpoints} and exports its model"


def _has_step(markers: list[dict[str, Any]], step: Any) -> bool:
    """Whether a checkpoint is of this step, not only the newest: the best may be exported."""
    return any(marker["step"] == step for marker in markers)


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
