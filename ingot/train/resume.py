"""Finds where training starts: at step 0, or from the newest valid checkpoint of the run folder;
refuses to start if the recipe has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.masking import keys_hidden
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
    recipe's own, without what a roll-back has left out. Knobs in `allow` may differ, as `_goes_on`
    says; `on_change` is then called with the differences. `newest` is the newest valid checkpoint
    if somebody has verified it already. Damaged ones that are newer than the one found are set
    aside. `reads`: what this training reads in its marker. `come_to`: how many rows of the data's
    order the training of a checkpoint has come to, one a sample by default. `before_anew` is called
    before anything is moved when training starts anew; if it raises, nothing has changed. `last`:
    the steps that the recipe asks for.

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
            before, now, differ = _compared(found, identity, come_to)
            own = place is not None and differ  # what lies there needs no permission
            if not own and _goes_on(found, before, now, differ, allow, last):
                check_fields(found, reads)
                if differ:
                    _check_optimizer(run, before, now)
                    changed = "; ".join(changes(before, now))
                    say(f"going on although {changed}, as resume.allow says")
                    on_change(found, changed)
                set_damaged_aside(found)
                return found
            if not found.commit["finished"] and place is None:
                raise _refused(run, found, _with_left_out(identity, found), differ, last)
            changed = "; ".join(changes(found.commit["identity"], _with_left_out(identity, found)))
            say(f"the recipe changed since the last training ({changed})")
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
    for found in committed(run.checkpoints)[:1]:
        if any(field not in found.commit for field in FIELDS):
            return None
        before, now, differ = _compared(found, identity, come_to)
        own = place is not None and differ
        if not own and _goes_on(found, before, now, differ, allow, last):
            return found
    return None if place is None else committed(place / "checkpoints")[0]


def come_to(recipe: Recipe, found: CommittedCheckpoint) -> int:
    """How many rows of the data's order the training of a checkpoint has come to."""
    rollout = found.commit.get("rollout") or {}
    begun = [*rollout.get("ahead", {"answers": {}})["answers"]]
    begun += [rollout["number"]] if "number" in rollout else []
    return rows_come_to(recipe, found.step, 1 + max(map(int, begun), default=-1))


def _compared(
    found: CommittedCheckpoint,
    identity: Mapping[str, Any],
    come_to: Callable[[CommittedCheckpoint], int] | None,
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The identity of a checkpoint's training and `identity`, as far as training has come, and the
    parts in which they differ.
    """
    identity = _with_left_out(identity, found)
    batch = int(identity["train.global_batch"])
    rows = found.step * batch if come_to is None else come_to(found)
    known = found.commit["identity"]
    place = sequence_position(rows, [(first, end) for first, end in known.get("data.skip", [])])
    before, now = _so_far(known, place), _so_far(identity, place)
    return before, now, [key for key in {**before, **now} if before.get(key) != now.get(key)]


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


def _goes_on(
    found: CommittedCheckpoint,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    differ: Collection[str],
    allow: Collection[str],
    last: int | None,
) -> bool:
    """Whether `allow` names all that differs. Where no step is left of a training that is over,
    only what needs none may differ: with another learning rate it would be exported as a model that
    was never trained with it.
    """
    if not all(_may_differ(key, before, now, allow) for key in differ):
        return False
    asked_alike = not any(key.startswith(ENDS) for key in differ)
    ends_alike = asked_alike or found.step == last or _stops_there(found, now)
    is_over = found.commit["finished"] and ends_alike
    return not is_over or all(_needs_no_step(key, before, now) for key in differ)


def _stops_there(found: CommittedCheckpoint, now: Mapping[str, Any]) -> bool:
    """Whether early stopping, as the recipe has it, takes no step after this checkpoint."""
    stop, watched = now.get("train.early_stop"), (found.commit["watched"] or {}).get("early_stop")
    if not stop or not watched or watched["metric"] != stop["metric"]:
        return False
    return bool(watched["worse_in_row"] >= stop["patience"])


def _needs_no_step(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the steps of a training are the same with this difference: when it ends, how that is
    measured, or an average of its weights that nobody asks for any more.
    """
    comes = key not in before and key.startswith(STOPPING)
    return comes or key not in now or key.startswith(ENDS)


def _may_differ(
    key: str, before: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str]
) -> bool:
    """Whether `allow` names what this part of the two identities is of."""
    if key.startswith(tuple(allow)):
        return True
    comes_or_goes = (key in before) != (key in now)
    return "train.early_stop" in allow and key.startswith(STOPPING) and comes_or_goes


def _check_optimizer(run: RunFolder, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises WrongInput if the checkpoint's optimizer state is that of another kind."""
    old, new = (identity["train.optimizer"]["kind"] for identity in (before, now))
    if old != new:
        raise WrongInput(
            f"{run.checkpoints} has the state of train.optimizer.kind {old}, which {new} cannot"
            " take over; undo the change, or train on from its weights under another name with"
            f" train.start_from={run.root} train.reset_optimizer=true, or start over with --fresh"
        )


def check_steps(done: int, last: int) -> None:
    """Raises WrongInput if more steps are done than the recipe asks for."""
    if done > last:
        raise WrongInput(
            f"{done:,} steps are done, the recipe asks for {last:,} only; raise train.steps, or"
            " start over with --fresh"
        )


def _refused(
    run: RunFolder,
    found: CommittedCheckpoint,
    identity: Mapping[str, Any],
    differ: list[str],
    last: int | None,
) -> WrongInput:
    """The error for a changed recipe: what changed, and the ways to continue. One that would be
    refused for something else next is raised for that.
    """
    before = found.commit["identity"]
    may_differ = all(_may_differ(key, before, identity, MAY_CHANGE) for key in differ)
    if may_differ and last is not None:
        check_steps(found.step, last)
    if may_differ and "train.optimizer" in differ:
        _check_optimizer(run, before, identity)
    changed = "; ".join(changes(before, identity))
    meant = [knob for knob in MAY_CHANGE if any(key.startswith(knob) for key in differ)]
    way = (
        f"go on with the change by resume.allow=[{','.join(meant)}]"
        if may_differ
        else "undo the change to go on"
    )
    return WrongInput(
        f"{run.checkpoints} holds an unfinished training ({found.step} steps) of another recipe:"
        f" {changed}; {way}, or start over with --fresh (the old checkpoints are set aside, not"
        " deleted)"
    )


def _so_far(identity: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The identity without the `data.skip` ranges from `place` on, which training has not reached
    yet: those may still be changed.
    """
    return {
        **keys_hidden(dict(identity)),
        "data.skip": [list(span) for span in identity.get("data.skip", []) if span[0] < place],
    }
