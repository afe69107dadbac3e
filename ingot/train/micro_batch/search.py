"""`train.micro_batch: auto`: the largest micro-batch that fits, or on a CPU the fastest of those;
found by open_trial, once per run folder.

What is chosen decides about memory and time, never about results. Sizes rise in powers of two, each
a step of the real trainee on made-up rows. Activations grow with the rows, so from two sizes
follows what the next one would take, and none is tried that would
not fit: a rank that runs out of memory leaves the others waiting.
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
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan, batch_plan, degrees_of
from ingot.models.device import device_name
from ingot.parallel.mesh import Mesh
from ingot.train.micro_batch.memory import (
    forget_peak,
    host_memory,
    is_out_of_memory,
    peak_bytes,
    room_bytes,
)
from ingot.train.micro_batch.trial import Trial, let_go, open_trial, with_made_up_rows
from ingot.train.setup import make_setup

MOST = {"cpu": 0.7}
"""Share of the memory that may be taken, by type of device. A CPU's is shared with whatever else
runs there.
"""
MOST_ELSEWHERE = 0.9
TRIED_ROWS = 8
"""Rows of a trial step, as far as there are so many: the optimizer then weighs alike for small
sizes, and speeds compare.
"""
AS_FAST = 0.97
"""A share of the best speed that counts as no slower: clocks differ by so much from one time to the
next.
"""
OUT = 1e9
"""The share that stands for memory that ran out."""
NO_GAIN = 2
"""Sizes in a row that were no faster than a smaller one, after which larger ones are not tried on a
CPU.
"""


@dataclass(frozen=True)
class TriedMicroBatch:
    """What one size took. `share`: of the memory there is, on the rank where it is tightest; above
    1 where it ran out.
    """

    micro_batch: int
    share: float
    rows_per_s: float


@dataclass(frozen=True)
class FoundMicroBatch:
    """The size, why it is this one, and what was tried."""

    micro_batch: int
    why: str
    tried: list[TriedMicroBatch]


def fitting_micro_batch(recipe: Recipe, mesh: Mesh) -> int:
    """What `train.micro_batch: auto` means for this recipe on these devices; the number itself
    where it is one. Every rank calls it.

    Kept in `reports/micro_batch.json`: a training that goes on, or one like it, does not search
    again.

    Raises:
        WrongInput: recipe, data, model and ranks do not fit together.
        Failed: not even the smallest size fits.
    """
    asked = recipe.train.micro_batch
    if asked != "auto":
        return asked
    path, key = recipe.folder.reports / "micro_batch.json", fingerprint(_what_matters(recipe, mesh))
    kept: int | None = mesh.from_main(lambda: _read(path, key))
    if kept is not None:
        return kept
    sizes = micro_batches(recipe, mesh.world)
    if len(sizes) == 1:
        return sizes[0]
    found = _try(recipe, sizes, mesh)
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


def with_fitting_micro_batch(recipe: Recipe, mesh: Mesh) -> Recipe:
    """The recipe with a number where it says `train.micro_batch: auto`."""
    return _with_size(recipe, fitting_micro_batch(recipe, mesh))


def micro_batches(recipe: Recipe, world: int) -> list[int]:
    """The sizes to try, rising: powers of two and all rows of a rank, each made smaller where that
    takes no more micro-batches.

    Raises:
        WrongInput: the mesh or the batch does not divide, whatever the size.
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
    sizes: Sequence[int], probe: Callable[[int], TriedMicroBatch], most: float, *, largest: bool
) -> FoundMicroBatch:
    """Try `sizes`, rising, until the next would take more than the share `most` of the memory; the
    largest, or the fastest.

    Raises:
        Failed: the smallest one ran out of memory.
    """
    tried: list[TriedMicroBatch] = []
    end = f"these are all rows of a rank ({sizes[-1]})"
    for size in sizes:
        if (would := _predicted(tried, size)) > most:
            end = f"{size} would take about {would:.0%} of the memory, and {most:.0%} may be taken"
            break
        tried.append(probe(size))
        if tried[-1].share > most:
            end = (
                f"{size} ran out of memory"
                if tried[-1].share > 1
                else f"{size} took {tried[-1].share:.0%} of the memory, and {most:.0%} may be taken"
            )
            break
        if not largest and _no_gain(tried):
            end = f"larger ones were not faster, up to {size}"
            break
    if tried[0].share > 1:
        raise Failed(
            f"out of memory with {sizes[0]} rows at once; lower data.seq_len, set"
            " memory.recompute.kind=full, or share the model (parallel.shard)"
        )
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


def _predicted(tried: Sequence[TriedMicroBatch], size: int) -> float:
    """The share that `size` would take, by the line through the last two; 0 where that is not known
    yet.
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


def _try(recipe: Recipe, sizes: Sequence[int], mesh: Mesh) -> FoundMicroBatch:
    plan = with_made_up_rows(make_setup(_with_size(recipe, sizes[0]), mesh))
    on_cpu = mesh.device.type == "cpu"
    with open_trial(plan, mesh) as trial:
        room = room_bytes(mesh.device, mesh.ranks.local_world)
        return search(
            sizes,
            lambda size: _probe(trial, size, room),
            MOST.get(mesh.device.type, MOST_ELSEWHERE),
            largest=not on_cpu,
        )


def _probe(trial: Trial, size: int, room: int) -> TriedMicroBatch:
    """Two steps of `size` rows at once; the second one is timed. The same numbers on every rank."""
    mesh, staged = trial.mesh, trial.plan.recipe.parallel.pipeline > 1
    per_rank = trial.plan.batch.per_rank
    rows = per_rank if staged else min(per_rank, max(size, TRIED_ROWS))
    steps = math.ceil(rows / size)
    batch = BatchPlan(trial.plan.batch.world * steps * size, size, trial.plan.batch.world)
    if mesh.is_main:
        say(f"train.micro_batch: auto tries {size} {'row' if size == 1 else 'rows'} at once")
    let_go(compiled=trial.plan.recipe.train.compile)
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
    """How long the second of two steps took; None where memory ran out.

    Raises:
        Failed: it ran out on one rank of several, which cannot tell the others.
    """
    try:
        with trial.dealing(batch) as take:
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
    """What decides how much a micro-batch takes, and how much there is."""
    knobs = (
        "model",
        "objective",
        "parallel",
        "memory",
        "precision",
        "data.seq_len",
        "data.target_len",
        "train.global_batch",
        "train.compile",
        "train.optimizer.kind",
    )
    total = (
        host_memory().total
        if mesh.device.type == "cpu"
        else torch.accelerator.get_memory_info(mesh.device)[1]
    )
    return {
        **recipe.select(knobs),
        "pack": recipe.pack,
        "world": mesh.world,
        "local_world": mesh.ranks.local_world,
        "device": device_name(mesh.device),
        "bytes": total,
        "torch": torch.__version__,
    }


def _read(path: Path, key: str) -> int | None:
    """The size that was found under `key`; None where there is none, or it was another case."""
    try:
        kept = json.loads(path.read_bytes())
        return int(kept["micro_batch"]) if kept["key"] == key and kept["schema"] == 1 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
