"""Memory of a training step as `ingot plan` predicts it, beside what the CPU's allocator reports.

    python -m benchmarks.plan_memory [CASE ...]

Each rank of each case runs two steps of the recipe under torch's profiler, from the build on, whose
memory events are the allocator's own. The second step's peak is compared with the plan's for the
same rank, which runs in a process of its own and touches no weight.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.plan.tracing.records import RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all
from ingot.train.micro_batch.trial import made_up_plan, open_trial

SECOND = "the second step"
THREADS = 1
RECIPE = """
name: plan-memory
model: {source: "preset:llama-6m"}
tokenizer: {source: train, vocab_size: 4096}
data: {train: [{source: "builtin:stdlib"}], seq_len: 512, pack: none}
train: {steps: 2, global_batch: 2, micro_batch: 2}
precision: {compute: fp32}
"""
BF16 = "precision.compute=bf16"

CASES: dict[str, tuple[int, list[str]]] = {
    "pretrain": (1, []),
    "pretrain bf16": (1, [BF16]),
    "packed": (1, ["data.pack=best_fit", BF16]),
    "accumulation": (1, ["train.global_batch=8"]),
    "accumulation bf16": (1, ["train.global_batch=8", BF16]),
    "recompute full": (1, ["memory.recompute.kind=full"]),
    "recompute selective": (1, ["memory.recompute.kind=selective", BF16]),
    "stochastic rounding": (1, ["precision.master=stochastic", BF16]),
    "sgd": (1, ["train.optimizer.kind=sgd"]),
    "shard 2": (2, ["parallel.shard=2", "train.global_batch=4"]),
    "shard 4 bf16": (4, ["parallel.shard=4", "train.global_batch=8", BF16]),
    "replicate 2": (2, ["parallel.replicate=2", "train.global_batch=4"]),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "tensor 2 bf16": (2, ["parallel.tensor=2", BF16]),
    "context 2": (2, ["parallel.context=2"]),
    "pipeline 2": (2, ["parallel.pipeline=2", "train.global_batch=8"]),
    "pipeline 2 x shard 2": (
        4,
        ["parallel.pipeline=2", "parallel.shard=2", "train.global_batch=16"],
    ),
    "lora": (1, ["model.lora.rank=8"]),
    "sft": (1, ["objective.kind=sft"]),
    "dpo": (1, ["objective.kind=dpo"]),
    "seq2seq": (1, ["objective.kind=seq2seq", "model.source=preset:t5-mini"]),
    "classify": (
        1,
        ["objective.kind=classify", "objective.labels=[a,b]", "model.source=preset:bert-mini"],
    ),
    "seq2seq shard 2": (
        2,
        [
            "objective.kind=seq2seq",
            "model.source=preset:t5-mini",
            "parallel.shard=2",
            "train.global_batch=4",
        ],
    ),
}
"""Processes and knobs of each case."""


def recipe_of(case: str, folder: Path) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return load_recipe([file], CASES[case][1])


def measured(recipe: Recipe) -> dict[str, int]:
    """The peak of the second step and what is held before it, in bytes, of this rank."""
    with running_mesh(recipe.parallel) as mesh:
        plan = made_up_plan(recipe, mesh)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=activities, profile_memory=True) as profile,
            open_trial(plan, mesh) as trial,
            trial.step_function(plan.batch) as take,
        ):
            take(0)
            with torch.profiler.record_function(SECOND):
                take(1)
        mesh.barrier()
        return _peak(profile.profiler.kineto_results.events())


def _peak(events: Sequence[Any]) -> dict[str, int]:
    step = next(event for event in events if event.name() == SECOND)
    first, last = step.start_ns(), step.start_ns() + step.duration_ns()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    held = before = peak = 0
    for moment, change in changes:
        held += change
        if moment < first:
            before = peak = held
        elif moment <= last:
            peak = max(peak, held)
    return {"peak": peak, "before": before}


def launched(world: int, arguments: list[str]) -> None:
    """Run a module of Python in `world` processes of one thread."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = ["--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}"]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", *place]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    subprocess.run([*launch, "-m", *arguments], check=True, env=environment, capture_output=True)


def measure_case(case: str, folder: Path) -> list[dict[str, int]]:
    """What every rank of a case measures."""
    world, _ = CASES[case]
    launched(world, ["benchmarks.plan_memory", "--measure", case, str(folder)])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_memory", description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of names")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        case, folder = asked.measure[0], Path(asked.measure[1])
        found = measured(recipe_of(case, folder))
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    chosen = [case for case in CASES if any(part in case for part in asked.cases or [""])]
    print(f"{'case':22} rank {'measured':>10} {'planned':>10}  difference, MiB at the peak")
    for case in chosen:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recipe, world = recipe_of(case, folder), CASES[case][0]
            ranks = range(world) if "pipeline" in case else [0]
            planned = trace_all([TraceRequest(recipe, world, rank) for rank in ranks])
            peaks = measure_case(case, folder)
            for rank, trace in zip(ranks, planned, strict=True):
                assert isinstance(trace, RankTrace), trace
                there, said = peaks[rank]["peak"] / 2**20, trace.peak.total / 2**20
                print(f"{case:22} {rank:4} {there:10.1f} {said:10.1f}  {said / there - 1:+.2%}")


if __name__ == "__main__":
    main()
