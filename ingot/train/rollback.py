"""What follows too many skipped steps in a row: the end of training, or a roll-back to a checkpoint
with the data of those steps left out from then on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.base.errors import Failed
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic
from ingot.checkpoints.store import committed
from ingot.config.identity import MAY_CHANGE
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import Mesh
from ingot.train.beginning import last_step
from ingot.train.checkpointing import CheckpointHook
from ingot.train.earlier import LEFT_OUT
from ingot.train.goodput import EventSink
from ingot.train.hooks import TooManySkipped
from ingot.train.resume import check_fields
from ingot.train.setup import TrainSetup

Span = tuple[int, int]
"""A range [first, after) of positions in the sample order, as in `data.skip`."""


class RolledBack(Exception):
    """Training must restart from the checkpoint of `step`, or from its first step if that is None,
    with the data of the bad steps left out.
    """

    def __init__(self, step: int | None) -> None:
        super().__init__(step)
        self.step = step


def roll_back(
    bad: TooManySkipped,
    setup: TrainSetup,
    checkpoint: CheckpointHook,
    mesh: Mesh,
    events: EventSink,
    heart: HeartbeatWriter,
) -> RolledBack | Failed:
    """The exception to raise after too many skipped steps: Failed to end training, or RolledBack
    once the data of the bad steps has been recorded as left out.

    Collective; the same on every rank.
    """
    knobs, count = setup.recipe.train.skip, bad.last - bad.first + 1
    what = (
        "loss or gradient was not finite"
        if knobs.spike is None
        else "loss or gradient was not finite, or a spike,"
    )
    cause = f"{what} in {count} steps in a row, {bad.first + 1:,} to {bad.last + 1:,}"
    if knobs.then == "stop":
        return Failed(
            f"{cause}; lower train.optimizer.lr, or set train.skip.then=roll_back to leave their"
            " data out"
        )
    checkpoint.wait()
    # Data that a checkpoint has already passed cannot be left out any more. That does no harm:
    # skipped steps did not change the weights.
    begin = max(bad.first, checkpoint.saved)
    if begin > bad.last:
        return Failed(
            f"{cause}, and a checkpoint stands behind them; lower train.optimizer.lr, or raise"
            " checkpoint.every"
        )
    order = setup.order
    span = (
        order.place(begin * setup.batch.global_batch),
        order.place((bad.last + 1) * setup.batch.global_batch - 1) + 1,
    )
    mesh.from_main(lambda: leave_out(setup, span))
    events.emit("roll_back", step=checkpoint.saved, cause=cause, samples=list(span))
    if mesh.is_main:
        say(
            f"{cause}: going back to step {checkpoint.saved:,}, samples {span[0]:,} to {span[1]:,}"
            " of the order are left out from now on"
        )
    # All that follows until the next step may take as long as at a start: closing, reading the
    # checkpoint again. The step stays: a process that dies meanwhile has lost what led to it.
    heart.beat("loading")
    return RolledBack(checkpoint.saved if checkpoint.saved > setup.begin else None)


def with_left_out(setup: TrainSetup, mesh: Mesh) -> TrainSetup:
    """The setup without the data that earlier attempts at this same training have left out, by
    which epochs are shorter, as they are by `data.skip`. Collective, since each node may have its
    own disk.
    """
    spans = mesh.from_main(lambda: _so_far(setup))
    if not spans:
        return setup
    every = sorted({*map(tuple, setup.recipe.data.skip), *spans})
    data = setup.recipe.data.model_copy(update={"skip": every})
    recipe = setup.recipe.model_copy(update={"data": data})
    return replace(
        setup,
        recipe=recipe,
        last=last_step(recipe, setup.rows, setup.data_begin),
        identity={**setup.identity, "data.skip": [list(span) for span in every]},
    )


def left_out(setup: TrainSetup, recipe: Recipe) -> list[Span]:
    """The ranges that `setup` leaves out in addition to the recipe's own `data.skip`."""
    return [span for span in setup.recipe.data.skip if span not in recipe.data.skip]


def _so_far(setup: TrainSetup) -> list[Span]:
    """The recorded ranges. If the file was lost with its machine, it is restored from the newest
    checkpoint, which also records them.
    """
    path = _file(setup.recipe.folder)
    spans, newest = _read(path, setup), next(iter(committed(setup.recipe.folder.checkpoints)), None)
    if newest is None:
        return spans
    check_fields(newest)
    if _same_training(newest.commit["identity"]) != _same_training(setup.identity):
        return spans
    known = [(int(first), int(after)) for first, after in newest.commit["left_out"]]
    if any(span not in spans for span in known):
        spans = [*known, *(span for span in spans if span not in known)]
        _write(path, setup, spans)
    return spans


def leave_out(setup: TrainSetup, span: Span) -> None:
    """Record for all later attempts that `span` is left out.

    Raises:
        Failed: training has rolled back too often.
    """
    path, most = _file(setup.recipe.folder), setup.recipe.train.skip.rollbacks
    spans = _read(path, setup)
    if len(spans) >= most:
        raise Failed(
            f"training went back {len(spans)} times (train.skip.rollbacks) and comes to bad steps"
            " again; lower train.optimizer.lr"
        )
    _write(path, setup, [*spans, span])


def _write(path: Path, setup: TrainSetup, spans: Sequence[Span]) -> None:
    write_atomic(
        path, json.dumps({"schema": 1, "of": _same_training(setup.identity), "spans": spans}) + "\n"
    )


def _read(path: Path, setup: TrainSetup) -> list[Span]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise Failed(
            f"{path} says which data is left out and cannot be read ({error}); restore it, or start"
            " over with --fresh"
        ) from None
    # A file of another training (an earlier recipe) does not apply to this one.
    return (
        [(int(first), int(after)) for first, after in content["spans"]]
        if content["of"] == _same_training(setup.identity)
        else []
    )


def _same_training(identity: Mapping[str, Any]) -> str:
    return fingerprint(
        {
            key: value
            for key, value in identity.items()
            if key != "data.skip" and not key.startswith(MAY_CHANGE)
        }
    )


def _file(run: RunFolder) -> Path:
    return run.root / LEFT_OUT
