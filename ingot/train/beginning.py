"""Where a training begins: with which checkpoint of another run, at which step, and with which row
of its data; and where it ends. Checkpoints record the beginning, since the other run may go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.checkpoints.store import CommittedCheckpoint, checkpoint_in
from ingot.config.length import steps_of
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan
from ingot.data.batches.order import sequence_position
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.train.resume import come_to, resumable

OF_ONE_MODEL = "train.start_from is for the model of the recipe that wrote it"


class Beginning(NamedTuple):
    """The checkpoint to start from, the first step, and the step at which the data's order
    begins.
    """

    origin: CommittedCheckpoint | None
    step: int
    data_begin: int

    def record(self, order: str) -> dict[str, Any]:
        """What checkpoints say of it, with the fingerprint of the data's `order`: once a training
        has some, the run of `origin` may go on, and that changes nothing here.
        """
        origin = self.origin and {
            "checkpoint": str(self.origin.folder),
            "step": self.origin.step,
            "files": self.origin.commit["files"],
        }
        begun = {"step": self.step, "data_begin": self.data_begin}
        return {**begun, "order": order, "origin": origin}


def find_beginning(recipe: Recipe, identity: Mapping[str, Any], *, fresh: bool) -> Beginning:
    """Where a training with `train.start_from` begins, or began if it is to be resumed: what lies
    there by now may be a later checkpoint, or none.
    """
    allow, passed = recipe.resume.allow, partial(come_to, recipe)
    last = recipe.train.steps
    own = None if fresh else resumable(recipe.folder, identity, allow, passed, last)
    if own is None:
        return _origin(recipe, identity)
    begun = own.commit["begun"]
    before = begun["origin"]
    origin = CommittedCheckpoint(Path(before["checkpoint"]), before["step"], before)
    return Beginning(origin, begun["step"], begun["data_begin"])


def _origin(recipe: Recipe, identity: Mapping[str, Any]) -> Beginning:
    """Where a training begins that starts from another run as it stands now."""
    knobs = recipe.train
    found = checkpoint_in(Path(str(knobs.start_from)))
    if trained_with(found, "tokenizer") != identity["tokenizer"]:
        raise WrongInput(
            f"train.start_from {knobs.start_from} was trained with another tokenizer; take its"
            " tokenizer as tokenizer.source"
        )
    if knobs.start_step is not None:
        return Beginning(found, knobs.start_step, 0)
    if knobs.reset_optimizer:
        return Beginning(found, 0, 0)
    begun = found.commit.get("begun", {"order": None})
    is_same = begun["order"] == order_identity(recipe, identity["data"])
    return Beginning(found, found.step, begun["data_begin"] if is_same else found.step)


def trained_with(origin: CommittedCheckpoint, key: str) -> Any:
    """What a checkpoint to start from says of its own training. Raises WrongInput if it does not
    say it.
    """
    known = origin.commit.get("identity", {})
    if key not in known:
        raise WrongInput(
            f"train.start_from: {origin.folder} does not say with which {key} it was trained, so"
            " another version of ingot wrote it; take another checkpoint"
        )
    return known[key]


def order_identity(recipe: Recipe, data: str) -> str:
    """A fingerprint of everything that determines which rows a step takes: a step of another
    training says where this one stands in its data only if theirs are equal.
    """
    return fingerprint(
        {
            "data": data,
            "rows": [recipe.data.seq_len, recipe.row_plan, recipe.target_len],
            "weights": [source.weight for source in recipe.data.train],
            "window": recipe.data.window,
            "seed": recipe.seed,
            "step": [recipe.train.global_batch, str(recipe.objective.samples_per_row)],
        }
    )


def check_steps(recipe: Recipe, rows: int, batch: BatchPlan, begin: int, last: int) -> None:
    """Raises WrongInput if there are too few rows for a batch, or no step left to train."""
    group = recipe.objective.answers_per_row
    of_answers = f" answers in groups of {group}" if group > 1 else ""
    if rows < recipe.objective.rows_of(recipe.train.global_batch):
        raise WrongInput(
            f"{recipe.folder.columns} has {rows} training rows of"
            f" data.seq_len={recipe.data.seq_len}, less than"
            f" train.global_batch={batch.global_batch}{of_answers}; add documents, or lower one"
            " of the two"
        )
    if begin >= last:
        raise WrongInput(
            f"training would begin at step {begin:,} of {last:,}, and there is nothing to do; raise"
            " train.steps, or lower train.start_step"
        )
    updates = getattr(recipe.objective, "updates", 1)
    if begin % updates:
        raise WrongInput(
            f"training would begin at step {begin:,}, between the {updates} that objective.updates"
            " takes on the same answers, which are not there; set train.start_step to"
            f" {begin - begin % updates:,}"
        )
    profile = recipe.train.profile
    if profile is not None and profile.begin > last:
        raise WrongInput(
            f"train.profile begins with step {profile.begin:,}, and training ends with step"
            f" {last:,}; lower train.profile.begin"
        )


def last_step(recipe: Recipe, rows: Rows | Samples, data_begin: int) -> int:
    """The step at which training ends; epochs are counted from where the data's order begins.

    Raises:
        WrongInput: `data.skip` leaves not one step of them.
    """
    train = recipe.train
    of_epochs = train.steps is None and train.tokens is None
    before = math.ceil(data_begin * train.global_batch / recipe.objective.samples_per_row)
    begin = sequence_position(before - 1, recipe.data.skip) + 1
    return steps_of(recipe, len(rows), begin) + of_epochs * data_begin
