"""Time of a training step as `ingot plan` predicts it, beside what it takes.

    python -m benchmarks.plan_time [CASE ...] [--runs N] [--calibrated] [--limit SECONDS]

The device is calibrated first, alone and with as many processes as the cases have, unless
`--calibrated` says that what is stored counts. Each run of a case builds the training anew and
takes the median of a few steps; cases take turns, so that what disturbs one round disturbs all of
them, and no round is begun that would not end within the limit. Each run is told as it comes, with
the median of the case so far. Beside the wall clock stands the
time that the processor worked: where they differ, other programs ran. The table is written as well
(`--into`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.plan_memory import BF16, CASES, RECIPE, THREADS, launched
from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.plan.devices.coefficients import Coefficients, cpu_coefficients
from ingot.plan.seconds import StepLayout, StepSeconds, step_seconds
from ingot.plan.tracing.records import RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all
from ingot.train.micro_batch.trial import made_up_setup, open_trial

WARM_UP, COUNTED = 2, 5
TIMED = (
    "pretrain",
    "pretrain bf16",
    "packed",
    "accumulation",
    "recompute full",
    "recompute selective",
    "sgd",
    "lora",
    "sft",
    "dpo",
    "seq2seq",
    "classify",
    "shard 2",
    "tensor 2",
    "context 2",
    "pipeline 2",
)
"""Cases of the memory benchmark that this machine can run with a core for each process."""
TEN = (
    "pretrain",
    "pretrain bf16",
    "accumulation",
    "recompute full",
    "sgd",
    "lora",
    "sft",
    "dpo",
    "seq2seq",
    "shard 2",
)
"""What is compared where no case is named."""
LIMIT_S = 600.0
ALLOWED = 0.1
MORE: dict[str, tuple[int, list[str]]] = {
    "long": (
        1,
        [
            "data.seq_len=2048",
            "train.global_batch=1",
            "train.micro_batch=1",
            "model.config.max_position_embeddings=2048",
        ],
    ),
    "wide bf16": (1, ["model.source=preset:llama-56m", BF16]),
}


def cases() -> dict[str, tuple[int, list[str]]]:
    return {**{name: CASES[name] for name in TIMED}, **MORE}


def recipe_of(case: str, folder: Path) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return load_recipe([file], cases()[case][1])


def measured(recipe: Recipe) -> dict[str, float]:
    """Seconds of a step on this rank, by the clock and of the processor's work."""
    with running_mesh(recipe.parallel) as mesh:
        setup = made_up_setup(recipe, mesh)
        wall, worked = [], []
        with open_trial(setup, mesh) as trial, trial.step_function(setup.batch) as take:
            for step in range(WARM_UP + COUNTED):
                began, before = time.perf_counter(), time.thread_time()
                take(step)
                if step >= WARM_UP:
                    wall.append(time.perf_counter() - began)
                    worked.append(time.thread_time() - before)
        return {"wall": statistics.median(wall), "worked": statistics.median(worked)}


def measured_once(case: str) -> dict[str, float]:
    """The slowest rank's time in one run."""
    with tempfile.TemporaryDirectory() as name:
        world, folder = cases()[case][0], Path(name)
        launched(world, ["benchmarks.plan_time", "--measure", case, name])
        ranks: list[dict[str, float]] = [
            json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)
        ]
    return max(ranks, key=lambda one: one["wall"])


def rounds(
    chosen: list[str], runs: int, ends: float, tell: Callable[[str, list[dict[str, float]]], None]
) -> dict[str, list[dict[str, float]]]:
    """Runs of each case, one after the other in turns, sorted by their time."""
    found: dict[str, list[dict[str, float]]] = {case: [] for case in chosen}
    took = 0.0
    for _ in range(runs):
        began = time.monotonic()
        if took and began + took > ends:
            break
        for case in chosen:
            found[case] = sorted([*found[case], measured_once(case)], key=lambda one: one["wall"])
            tell(case, found[case])
        took = time.monotonic() - began
    return found


def layout_of(recipe: Recipe, ranks_per_node: int) -> StepLayout:
    parallel = recipe.parallel
    return StepLayout(
        ranks_per_node,
        parallel.pipeline,
        parallel.virtual,
        parallel.schedule == "zero_bubble",
        bool(recipe.train.compile),
    )


def predicted(case: str, coefficients: Coefficients) -> StepSeconds:
    world = cases()[case][0]
    with tempfile.TemporaryDirectory() as name:
        recipe = recipe_of(case, Path(name))
        ranks = range(world) if recipe.parallel.pipeline > 1 else [0]
        traces = trace_all([TraceRequest(recipe, world, rank) for rank in ranks])
    held = [one for one in traces if isinstance(one, RankTrace)]
    assert len(held) == len(traces), traces
    return step_seconds(held, coefficients, layout_of(recipe, world))


def row(case: str, made: list[dict[str, float]], plan: StepSeconds) -> str:
    """The median of the runs of a case beside its plan."""
    there, said = made[len(made) // 2], plan.total.likely
    parts = " ".join(
        f"{name} {getattr(plan, name).likely:.3f}"
        for name in ("matmul", "attention", "memory", "within", "bubble")
    )
    return (
        f"{case:22}{there['wall']:10.3f}{there['worked']:9.3f}{said:9.3f}"
        f"  {said / there['wall'] - 1:+7.1%}  {said / there['worked'] - 1:+7.1%}  {parts}"
    )


def compare(chosen: list[str], runs: int, *, calibrated: bool, limit_s: float) -> list[str]:
    """The lines of the table."""
    ends = time.monotonic() + limit_s
    for world in sorted({cases()[case][0] for case in chosen}):
        if not calibrated:
            launched(world, ["ingot", "bench", "--calibrate"])
    plans = {}
    for case in chosen:
        coefficients = cpu_coefficients(THREADS, cases()[case][0])
        assert coefficients is not None, "run without --calibrated first"
        plans[case] = predicted(case, coefficients)
    lines = [f"{'case':22}{'measured':>10}{'worked':>9}{'planned':>9}  of wall  of work  seconds"]
    print(lines[0], flush=True)

    def tell(case: str, made: list[dict[str, float]]) -> None:
        print(row(case, made, plans[case]), flush=True)

    errors = []
    for case, made in rounds(chosen, runs, ends, tell).items():
        errors.append(abs(plans[case].total.likely / made[len(made) // 2]["wall"] - 1))
        lines.append(row(case, made, plans[case]))
    within = sum(error <= ALLOWED for error in errors)
    told = (
        f"{within} of {len(errors)} within {ALLOWED:.0%} of the wall clock, medians of {len(made)}"
    )
    load = os.getloadavg()[2]
    return [*lines, f"{told} runs; load of the last 15 minutes {load:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_time", description=__doc__)
    parser.add_argument("cases", nargs="*", help="names, or all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds in all, about")
    parser.add_argument("--into", type=Path, default=Path("build/plan_time.txt"))
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        case, folder = asked.measure[0], Path(asked.measure[1])
        found = measured(recipe_of(case, folder))
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    else:
        chosen = list(cases()) if asked.cases == ["all"] else asked.cases or list(TEN)
        lines = compare(chosen, asked.runs, calibrated=asked.calibrated, limit_s=asked.limit)
        print(lines[-1])
        asked.into.parent.mkdir(parents=True, exist_ok=True)
        asked.into.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
