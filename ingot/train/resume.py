"""Finds where training starts: at step 0, or from the newest valid checkpoint of the run folder;
refuses to start if the recipe has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.masking import knobs_hidden
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.checkpoints.store import (
    CommittedCheckpoint,
    committed,
    newest_valid,
    set_damaged_aside,
)
from ingot.config.identity import MAY_CHANGE, STOPPING, changes
from ingot.config.length import rows_come_to
from ingot.config.recipe import Recipe
from ingot.data.batches.order import sequence_position
from ingot.train.earlier import bring_back, place_of, set_aside, set_logs_aside

FIELDS = (
    *("identity", "finished", "run_id", "due", "waiting", "learning_rate"),
    *("watched", "owed", "left_out", "skipped", "skipped_in_row", "begun"),
)
"""What every training reads in the marker of the checkpoint that it goes on from."""
ENDS = ("train.steps", "train.epochs", "train.tokens", "train.early_stop")
"""Of the knobs that may change, those that say when training ends."""


@dataclass(frozen=True)
class Comparison:
    """The training of a checkpoint beside the one that the recipe asks for, as far as it has come:
    in what they differ, and whether it may go on all the same.
    """

    found: CommittedCheckpoint
    before: Mapping[str, Any]
    """The identity of the checkpoint's training."""
    now: Mapping[str, Any]
    """That of the recipe, with what a roll-back of the checkpoint's training has left out."""
    allow: Collection[str]
    """The knobs that may differ."""
    last: int | None
    """The steps that the recipe asks for."""

    @classmethod
    def of(
        cls,
        found: CommittedCheckpoint,
        identity: Mapping[str, Any],
        allow: Collection[str],
        come_to: Callable[[CommittedCheckpoint], int] | None,
        last: int | None,
    ) -> Comparison:
        """`identity` is the recipe's own; `come_to` as in `find_start`."""
        identity = _with_left_out(identity, found)
        batch = int(identity["train.global_batch"])
        rows = found.step * batch if come_to is None else come_to(found)
        known = found.commit["identity"]
        place = sequence_position(rows, [(first, end) for first, end in known.get("data.skip", [])])
        return cls(found, _so_far(known, place), _so_far(identity, place), allow, last)

    @property
    def differ(self) -> list[str]:
        """The parts in which the two identities differ."""
        before, now = self.before, self.now
        return [key for key in {**before, **now} if before.get(key) != now.get(key)]

    @property
    def changed(self) -> str:
        """The same for people."""
        return "; ".join(changes(self.before, self.now))

    def goes_on(self, place: Path | None) -> bool:
        """Whether training goes on with the checkpoint: `allow` names all that differs. Where no
        step is left of a training that is over, only what needs none may differ: with another
        learning rate it would be exported as a model that was never trained with it. What lies in
        `place` needs no permission, and is brought back instead of one that differs.
        """
        differ = self.differ
        if (place is not None and differ) or not self._may_differ(self.allow):
            return False
        asked_alike = not any(key.startswith(ENDS) for key in differ)
        ends_alike = asked_alike or self.found.step == self.last or self._stops_here()
        is_over = self.found.commit["finished"] and ends_alike
        return not is_over or all(self._needs_no_step(key) for key in differ)

    def _may_differ(self, allow: Collection[str]) -> bool:
        """Whether `allow` names what all the parts that differ are of."""
        return all(
            key.startswith(tuple(allow))
            or ("train.early_stop" in allow and key.startswith(STOPPING) and self._is_of_one(key))
            for key in self.differ
        )

    def _is_of_one(self, key: str) -> bool:
        """Whether only one of the two identities has this part."""
        return (key in self.before) != (key in self.now)

    def _stops_here(self) -> bool:
        """Whether early stopping, as the recipe has it, takes no step after this checkpoint."""
        stop = self.now.get("train.early_stop")
        watched = (self.found.commit["watched"] or {}).get("early_stop")
        if not stop or not watched or watched["metric"] != stop["metric"]:
            return False
        return bool(watched["worse_in_row"] >= stop["patience"])

    def _needs_no_step(self, key: str) -> bool:
        """Whether the steps of a training are the same with this difference: when it ends, how that
        is measured, or an average of its weights that nobody asks for any more.
        """
        comes = key not in self.before and key.startswith(STOPPING)
        return comes or key not in self.now or key.startswith(ENDS)

    def check_optimizer(self, run: RunFolder) -> None:
        """Raises WrongInput if the checkpoint's optimizer state is that of another kind."""
        old, new = (one["train.optimizer"]["kind"] for one in (self.before, self.now))
        if old != new:
            raise WrongInput(
                f"{run.checkpoints} has the state of train.optimizer.kind {old}, which {new} cannot"
                " take over; undo the change, or train on from its weights under another name with"
                f" train.start_from={run.root} train.reset_optimizer=true, or start over with"
                " --fresh"
            )

    def refusal(self, run: RunFolder) -> WrongInput:
        """The error for a changed recipe: what changed, and the ways to continue. One that would be
        refused for something else next is raised for that.
        """
        differ, may_differ = self.differ, self._may_differ(MAY_CHANGE)
        if may_differ and self.last is not None:
            check_steps(self.found.step, self.last)
        if may_differ and "train.optimizer" in differ:
            self.check_optimizer(run)
        meant = [knob for knob in MAY_CHANGE if any(key.startswith(knob) for key in differ)]
        way = (
            f"go on with the change by resume.allow=[{','.join(meant)}]"
            if may_differ
            else "undo the change to go on"
        )
        return WrongInput(
            f"{run.checkpoints} holds an unfinished training ({self.found.step} steps) of another"
            f" recipe: {self.changed}; {way}, or start over with --fresh (the old checkpoints are"
            " set aside, not deleted)"
        )


def find_start(
    run: RunFolder,
    identity: Mapping[str, Any],
    *,
    fresh: bool,
    newest: CommittedCheckpoint | None = None,
    allow: Collection[str] = (),
    reads: Collection[str] = FIELDS,
    come_to: Callable[[CommittedCheckpoint], int] | None = None,
    on_change: Callable[[CommittedCheckpoint, str], None] = lambda found, changed: None,
    before_anew: Callable[[], None] = lambda: None,
    last: int | None = None,
) -> CommittedCheckpoint | None:
    """The checkpoint to resume from, or None to start from the first step.

    A finished training with another recipe is moved to `earlier/`, and brought back when its recipe
    is used again; so is an unfinished one if this recipe's training lies there. `identity` is the
    recipe's own, without what a roll-back has left out. Knobs in `allow` may differ, as
    `Comparison.goes_on` says; `on_change` is then called with the differences. `newest` is the
    newest valid checkpoint if somebody has verified it already. Damaged ones that are newer than
    the one found are set aside. `reads`: what this training reads in its marker. `come_to`: how
    many rows of the data's order the training of a checkpoint has come to, one a sample by default.
    `before_anew` is called before anything is moved when training starts anew; if it raises,
    nothing has changed. `last`: the steps that the recipe asks for.

    Raises:
        WrongInput: an unfinished training with a different recipe lies here, and none of this one
            in `earlier/`; names what changed. Or another version of ingot wrote its checkpoint.
        Failed: there are checkpoints, and all are damaged.
    """
    while True:
        found = None if fresh else newest or newest_valid(run.checkpoints)
        place = None if fresh else place_of(run, identity)
        if found is not None:
            check_fields(found)
            compared = Comparison.of(found, identity, allow, come_to, last)
            if compared.goes_on(place):
                check_fields(found, reads)
                if compared.differ:
                    compared.check_optimizer(run)
                    say(f"going on although {compared.changed}, as resume.allow says")
                    on_change(found, compared.changed)
                set_damaged_aside(found)
                return found
            if not found.commit["finished"] and place is None:
                raise compared.refusal(run)
            say(f"the recipe changed since the last training ({compared.changed})")
        if place is None:
            before_anew()
            if found is not None or fresh:
                set_aside(run, identity)
            else:
                set_logs_aside(run, identity)
            return None
        check_fields(committed(place / "checkpoints")[0], reads)  # before anything is moved
        set_aside(run, identity)
        # Compared like any other: the newest that is valid may be an older one.
        newest = bring_back(run, place)


def resumable(
    run: RunFolder,
    identity: Mapping[str, Any],
    allow: Collection[str],
    come_to: Callable[[CommittedCheckpoint], int] | None = None,
    last: int | None = None,
) -> CommittedCheckpoint | None:
    """The newest checkpoint of the training that `find_start` will go on with; None if it will
    start anew. Nothing is verified or moved.
    """
    place = place_of(run, identity)
    found = next(iter(committed(run.checkpoints)), None)
    if found is not None:
        if any(field not in found.commit for field in FIELDS):
            return None
        if Comparison.of(found, identity, allow, come_to, last).goes_on(place):
            return found
    return None if place is None else committed(place / "checkpoints")[0]


def come_to(recipe: Recipe, found: CommittedCheckpoint) -> int:
    """How many rows of the data's order the training of a checkpoint has come to."""
    rollout = found.commit.get("rollout") or {}
    begun = [*rollout.get("ahead", {"answers": {}})["answers"]]
    begun += [rollout["number"]] if "number" in rollout else []
    return rows_come_to(recipe, found.step, 1 + max(map(int, begun), default=-1))


def _with_left_out(identity: Mapping[str, Any], found: CommittedCheckpoint) -> Mapping[str, Any]:
    """The identity with what a roll-back of the checkpoint's training has left out."""
    if not (spans := found.commit.get("left_out")):
        return identity
    every = sorted({*map(tuple, identity["data.skip"]), *map(tuple, spans)})
    return {**identity, "data.skip": [list(span) for span in every]}


def check_fields(found: CommittedCheckpoint, fields: Collection[str] = FIELDS) -> None:
    """Raises WrongInput if the marker of a checkpoint to go on from lacks one of `fields`."""
    if missing := [field for field in fields if field not in found.commit]:
        raise WrongInput(
            f"{found.folder} does not say {', '.join(missing)}, so another version of ingot wrote"
            " it; go on with that one, or start over with --fresh (the old checkpoints are set"
            " aside, not deleted)"
        )


def check_steps(done: int, last: int) -> None:
    """Raises WrongInput if more steps are done than the recipe asks for."""
    if done > last:
        raise WrongInput(
            f"{done:,} steps are done, the recipe asks for {last:,} only; raise train.steps, or"
            " start over with --fresh"
        )


def _so_far(identity: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The identity without the `data.skip` ranges from `place` on, which training has not reached
    yet: those may still be changed.
    """
    return {
        **knobs_hidden(dict(identity)),
        "data.skip": [list(span) for span in identity.get("data.skip", []) if span[0] < place],
    }
