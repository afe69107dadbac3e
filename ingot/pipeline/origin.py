"""Whether the run that a training began with (`train.start_from`) holds other weights by now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.base.markers import COMMIT, checkpoint_markers, read_marker
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.config.recipe import Recipe
from ingot.pipeline.steps import PipelineStep


def newest_marker(checkpoints: Path) -> dict[str, Any] | None:
    """The marker of the newest checkpoint of a training; None without one."""
    return next(iter(checkpoint_markers(checkpoints)), None)


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
