"""Whether the data that a training began with are those that lie here, and whether the run that it
began with (`train.start_from`) holds other weights by now.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.base.markers import COMMIT, checkpoint_markers, read_marker
from ingot.base.progress import say
from ingot.base.reports import PipelineStepRecord, read_record
from ingot.base.runfolder import RunFolder
from ingot.config.recipe import Recipe
from ingot.pipeline.steps import PipelineStep


def newest_marker(checkpoints: Path) -> dict[str, Any] | None:
    """The marker of the newest checkpoint of a training; None without one."""
    return next(iter(checkpoint_markers(checkpoints)), None)


def is_of_unfinished(run: RunFolder, record: PipelineStepRecord) -> bool:
    """Whether the newest checkpoint is that of a training that has steps left, and the data of this
    record are those that it began with. `prepare` knows them: where that did not end, what it reads
    is taken for them.
    """
    newest, prepared = newest_marker(run.checkpoints), read_record(run.steps, "prepare")
    if newest is None or newest["finished"]:
        return False
    if prepared is None:
        return True
    was_read = record.step == "prepare" or prepared.knobs.get("from ingest") == record.outputs
    began_with = newest.get("identity", {}).get("data")
    return was_read and prepared.parts.get("train") == began_with


def tell_origin(step: PipelineStep, recipe: Recipe) -> None:
    """Say of a training that is not done again whether the run it began with was since."""
    if step.verb == "train" and (told := _trained_since(recipe)) is not None:
        say(f"note: {told}")


def _trained_since(recipe: Recipe) -> str | None:
    """That the run of `train.start_from` was trained to an end since this training began, in words.
    It began with the weights of then and stays as it is: the other run might be still at work.
    """
    source = recipe.train.start_from
    own = None if source is None else newest_marker(recipe.folder.checkpoints)
    origin = (own or {}).get("begun", {}).get("origin")
    if source is None or origin is None:
        return None
    place = Path(source)
    found = read_marker(place, COMMIT) or newest_marker(
        place if place.name == "checkpoints" else RunFolder(place).checkpoints
    )
    if found is None or not found["finished"] or found["files"] == origin["files"]:
        return None
    return (
        f"{source} was trained since this training began with its step {origin['step']:,};"
        f" `ingot train --fresh` begins anew, with step {found['step']:,}"
    )
