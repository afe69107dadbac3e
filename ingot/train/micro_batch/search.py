"""`train.micro_batch: auto`: the largest micro-batch that fits, or on a CPU the fastest one;
searched with trial steps once per run folder.

The choice affects memory and time, never results. Sizes grow in powers of two, each tried with
steps of the real training state on random rows. Activation memory is linear in the rows, so the use
of the next size is extrapolated from the last two, and a size that would not fit is not tried: a
rank that runs out of memory would leave the others waiting in a collective.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.base.storage import write_atomic
from ingot.config.automatic import Planner
from ingot.config.degrees import degrees_of
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan, batch_plan
from ingot.models.device import device_name
from ingot.parallel.mesh import Mesh
from ingot.train.automatic_layout import devices_of
from ingot.train.micro_batch.memory import (
    MEMORY_KNOBS,
    forget_peak,
    is_out_of_memory,
    peak_bytes,
    room_bytes,
    total_bytes,
)
from ingot.train.micro_batch.trial import Trial, let_go, open_trial, with_made_up_rows
from ingot.train.setup import make_setup

MOST = {"cpu": 0.7}
"""Largest share of memory that may be used, by device type. A CPU's memory is shared with other
programs.
"""
MOST_ELSEWHERE = 0.9
TRIED_ROWS = 8
"""Rows of a trial step if a rank has that many: small sizes then take several micro-batches, so
that the optimizer's cost weighs the same in each and speeds are comparable.
"""
AS_FAST = 0.97
"""A speed of at least this share of the best counts as equal; timings vary that much between runs.
"""
OUT = 1e9
"""Stands for the memory share of a size that ran out of memory."""
NO_GAIN = 2
"""On a CPU, larger sizes are not tried after this many in a row that were no faster than a smaller
one.
"""


@dataclass(frozen=True)
class TriedMicroBatch:
    """The measurement of one size. `share`: peak memory over available memory on the rank where it
    is highest; above 1 if memory ran out.
    """

    micro_batch: int
    share: float
    rows_per_s: float


@dataclass(frozen=True)
class FoundMicroBatch:
    """The chosen size, the reason, and the sizes tried."""

    micro_batch: int
    why: str
    tried: list[TriedMicroBatch]


def fitting_micro_batch(recipe: Recipe, mesh: Mesh, planner: Planner | None = None) -> int:
    """The number that `train.micro_batch: auto` means for this recipe on these devices; a given
    number is returned unchanged. Collective.

    Cached in `reports/micro_batch.json`, so that a resumed training, or one with the same settings,
    does not search again. Trials begin with what `planner` proposes; what they measure decides.

    Raises:
        WrongInput: recipe, data, model and ranks do not fit together.
        Failed: not even the smallest size fits.
    """
    asked = recipe.train.micro_batch
    if asked != "auto":
        return asked
    path, key = recipe.folder.micro_batch, fingerprint(_what_matters(recipe, mesh))
    kept: int | None = mesh.from_main(lambda: _read(path, key))
    if kept is not None:
        return kept
    sizes = micro_batches(recipe, mesh.world)
    if len(sizes) == 1:
        return sizes[0]
    devices = devices_of(mesh)
    begin: int | None = mesh.from_main(
        lambda: None if planner is None else planner.micro_batch(recipe, devices)
    )
    found = _try(recipe, sizes, mesh, begin)
    let_go(compiled=recipe.train.compile)
    forget_peak(mesh.device)
    if mesh.is_main:
        say(f"train.micro_batch: auto is {found.micro_batch}: {found.why}")
    mesh.from_main(
        lambda: write_atomic(
            path, json.dumps({"schema": 1, "key": key, **asdict(found)}, indent=1) + "\n"
        )
    )
    return found.micro_batch


def with_fitting_micro_batch(recipe: Recipe, mesh: Mesh, planner: Planner | None = None) -> Recipe:
    """The recipe with `train.micro_batch: auto` replaced by a number."""
    return _with_size(recipe, fitting_micro_batch(recipe, mesh, planner))


def micro_batches(recipe: Recipe, world: int) -> list[int]:
    """The sizes to try, ascending: powers of two and the whole share of a rank, each lowered as far
    as that leaves the number of micro-batches unchanged.

    Raises:
        WrongInput: mesh or batch do not divide for any size.
    """
    per_rank = max(1, recipe.train.global_batch // degrees_of(recipe.parallel, world).data)
    powers = [2**power for power in range(per_rank.bit_length())]
    sizes: list[int] = []
    refused: WrongInput | None = None
    for size in sorted(
        {math.ceil(per_rank / math.ceil(per_rank / size)) for size in [*powers, per_rank]}
    ):
        try:
            batch_plan(_with_size(recipe, size).train, recipe.parallel, world)
            sizes.append(size)
        except WrongInput as error:
            refused = error
    if not sizes and refused is not None:
        raise refused
    return sizes


def _with_size(recipe: Recipe, size: int) -> Recipe:
    return recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"micro_batch": size})}
    )


def search(
    sizes: Sequence[int],
    probe: Callable[[int], TriedMicroBatch],
    most: float,
    *,
    largest: bool,
    begin: int | None = None,
) -> FoundMicroBatch:
    """Try `sizes` in ascending order until the next would exceed the share `most` of the memory;
    choose the largest or the fastest.

    Args:
        begin: the size to begin with, which should fit; smaller ones are tried if it does not.

    Raises:
        Failed: the smallest one ran out of memory.
    """
    place = max((n for n, size in enumerate(sizes) if size <= (begin or 0)), default=0)
    tried = [probe(sizes[place])]
    while tried[0].share > most and place > 0:
        place -= 1
        tried.insert(0, probe(sizes[place]))
    if tried[0].share > 1:
        raise Failed(
            f"out of memory with {sizes[0]} rows at once; lower data.seq_len, set"
            " memory.recompute.kind=full, or share the model (parallel.shard)"
        )
    end = _try_larger(sizes, place, probe, most, tried, largest=largest)
    fitting = [one for one in tried if one.share <= most] or tried[:1]
    if largest:
        chosen = fitting[-1]
        return FoundMicroBatch(
            chosen.micro_batch,
            f"the largest that fits, with {chosen.share:.0%} of the memory; {end}",
            tried,
        )
    best = max(one.rows_per_s for one in fitting)
    chosen = next(one for one in fitting if one.rows_per_s >= AS_FAST * best)
    speeds = ", ".join(f"{one.rows_per_s:.3g} with {one.micro_batch}" for one in fitting)
    why = (
        f"the fastest, or the smallest of equals (rows a second of a process: {speeds}), with"
        f" {chosen.share:.0%} of the memory; {end}"
    )
    return FoundMicroBatch(chosen.micro_batch, why, tried)


def _try_larger(
    sizes: Sequence[int],
    place: int,
    probe: Callable[[int], TriedMicroBatch],
    most: float,
    tried: list[TriedMicroBatch],
    *,
    largest: bool,
) -> str:
    """Try what is larger than the sizes in `tried`, and add it there; returns why it ended."""
    if (smallest := next((one for one in tried if one.share > most), None)) is not None:
        return _too_large(smallest, most)
    for size in sizes[place + 1 :]:
        if len(tried) == 1 and place > 0 and tried[0].share * size / sizes[place] > most:
            # One size alone does not tell what each row takes, and a smaller one surely fits.
            tried.insert(0, probe(sizes[place - 1]))
        if (would := _predicted(tried, size)) > most:
            return f"{size} would take about {would:.0%} of the memory, and {most:.0%} may be taken"
        tried.append(probe(size))
        if tried[-1].share > most:
            return _too_large(tried[-1], most)
        if not largest and _no_gain(tried):
            return f"larger ones were not faster, up to {size}"
    return f"these are all rows of a rank ({sizes[-1]})"


def _too_large(tried: TriedMicroBatch, most: float) -> str:
    if tried.share > 1:
        return f"{tried.micro_batch} ran out of memory"
    return f"{tried.micro_batch} took {tried.share:.0%} of the memory, and {most:.0%} may be taken"


def _predicted(tried: Sequence[TriedMicroBatch], size: int) -> float:
    """The memory share of `size`, extrapolated linearly from the last two sizes; 0 while fewer than
    two are known.
    """
    if len(tried) < 2:
        return 0.0
    before, last = tried[-2:]
    slope = max(0.0, (last.share - before.share) / (last.micro_batch - before.micro_batch))
    return last.share + slope * (size - last.micro_batch)


def _no_gain(tried: Sequence[TriedMicroBatch]) -> bool:
    if len(tried) <= NO_GAIN:
        return False
    before = max(one.rows_per_s for one in tried[:-NO_GAIN])
    return all(one.rows_per_s * AS_FAST <= before for one in tried[-NO_GAIN:])


def _try(
    recipe: Recipe, sizes: Sequence[int], mesh: Mesh, begin: int | None = None
) -> FoundMicroBatch:
    setup = with_made_up_rows(make_setup(_with_size(recipe, sizes[0]), mesh))
    on_cpu = mesh.device.type == "cpu"
    with open_trial(setup, mesh, quick=True) as trial:
        room = room_bytes(mesh.device, mesh.ranks.local_world)
        return search(
            sizes,
            lambda size: _probe(trial, size, room),
            MOST.get(mesh.device.type, MOST_ELSEWHERE),
            largest=not on_cpu,
            begin=begin,
        )


def _probe(trial: Trial, size: int, room: int) -> TriedMicroBatch:
    """Two steps with micro-batches of `size` rows, the second one timed. Same result on all
    ranks.
    """
    mesh, staged = trial.mesh, trial.setup.recipe.parallel.pipeline > 1
    per_rank = trial.setup.batch.per_rank
    rows = per_rank if staged else min(per_rank, max(size, TRIED_ROWS))
    steps = math.ceil(rows / size)
    batch = BatchPlan(trial.setup.batch.world * steps * size, size, trial.setup.batch.world)
    if mesh.is_main:
        say(f"train.micro_batch: auto tries {size} {'row' if size == 1 else 'rows'} at once")
    let_go(compiled=trial.setup.recipe.train.compile)
    forget_peak(mesh.device)
    seconds = _seconds(trial, batch)
    peak = OUT if seconds is None else peak_bytes(mesh.device) / room
    ranks = mesh.gather([peak, seconds or math.inf])
    return TriedMicroBatch(
        size,
        max(share for share, _ in ranks),
        batch.per_rank / max(slowest for _, slowest in ranks),
    )


def _seconds(trial: Trial, batch: BatchPlan) -> float | None:
    """Duration of the second of two steps in seconds; None if memory ran out.

    Raises:
        Failed: memory ran out in a job of several ranks, where the other ranks cannot be told.
    """
    try:
        with trial.step_function(batch) as take:
            float(take(0).loss)
            began = time.monotonic()
            float(take(1).loss)
            return time.monotonic() - began
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0]
    if trial.mesh.world > 1:
        raise Failed(
            f"out of memory with {batch.micro_batch} rows at once, while train.micro_batch: auto"
            f" was tried ({reason}); set a smaller number"
        )
    return None


def _what_matters(recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """The settings that determine how much memory a micro-batch takes, and how much there is."""
    chosen = recipe.select(MEMORY_KNOBS)
    del chosen["parallel"]["degrees"]  # they are given by now
    return {
        **chosen,
        "pack": recipe.pack,
        "world": mesh.world,
        "local_world": mesh.ranks.local_world,
        "device": device_name(mesh.device),
        "bytes": total_bytes(mesh.device),
        "torch": torch.__version__,
    }


def _read(path: Path, key: str) -> int | None:
    """The cached size; None if there is none or it was found with other settings."""
    try:
        kept = json.loads(path.read_bytes())
        return int(kept["micro_batch"]) if kept["key"] == key and kept["schema"] == 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
