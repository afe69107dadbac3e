"""Memory of a training step as `ingot plan` predicts it, beside what the CPU's allocator reports.

    python -m benchmarks.plan_memory [CASE ...]

Each rank of each case runs some steps of the recipe under torch's profiler, from the build on,
whose memory events tell what the allocator counts. The peak of a step but the first is compared
with the plan's for the same rank, which runs in a process of its own and touches no weight.

The allocator is told to count in every thread. The events alone are not enough: those of gloo's
threads are lost where one of them lets go of a block after its collective, and the sum of the rest
was up to 10 % too high, another one in every run.

Of several ranks the smallest peak of several steps counts. A thread of gloo first wakes the rank
that waits for its collective, and lets go of its copy then: where the system runs something else
between the two, the rank already allocates what comes next. On busy cores that is one step in ten,
by up to 9 %, in no order.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.config.load import load_recipe
from ingot.config.recipe import Recipe
from ingot.parallel.mesh import running_mesh
from ingot.plan.tracing.records import RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all
from ingot.train.micro_batch.trial import made_up_setup, open_trial

MEASURED = "measured step"
REPEATED = 8
"""Steps of several ranks of which the one with the smallest peak counts."""
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
WIDE = [
    "tokenizer.vocab_size=512",
    "model.config.hidden_size=512",
    "model.config.intermediate_size=2048",
    "data.seq_len=64",
]
"""Short rows and a small vocabulary, so that weights and gradients take more than activations."""

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
    "shard 2, wide": (2, ["parallel.shard=2", "train.global_batch=4", *WIDE]),
    "shard 2, wide, full": (
        2,
        ["parallel.shard=2", "train.global_batch=4", "memory.recompute.kind=full", *WIDE],
    ),
    "shard 4, wide, bf16": (4, ["parallel.shard=4", "train.global_batch=8", BF16, *WIDE]),
    "replicate 2 accumulation": (2, ["parallel.replicate=2", "train.global_batch=8"]),
    "replicate 2 bf16": (2, ["parallel.replicate=2", "train.global_batch=4", BF16]),
    "tensor 2 x shard 2": (
        4,
        ["parallel.tensor=2", "parallel.shard=2", "train.global_batch=4", *WIDE],
    ),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "tensor 2 bf16": (2, ["parallel.tensor=2", BF16]),
    "context 2": (2, ["parallel.context=2"]),
    "context 2, wide, accumulation": (
        2,
        ["parallel.context=2", "train.global_batch=4", *WIDE],
    ),
    "pipeline 2": (2, ["parallel.pipeline=2", "train.global_batch=8"]),
    "pipeline 2 x shard 2": (
        4,
        ["parallel.pipeline=2", "parallel.shard=2", "train.global_batch=16"],
    ),
    "lora": (1, ["model.lora.rank=8"]),
    "lora, shard 2": (2, ["model.lora.rank=8", "parallel.shard=2", "train.global_batch=4", BF16]),
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
    """The peak of a step and what is held before it, in bytes, of this rank; the smallest of
    `REPEATED` steps where there are several ranks.
    """
    count_everywhere()
    with running_mesh(recipe.parallel) as mesh:
        setup = made_up_setup(recipe, mesh)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=activities, profile_memory=True) as profile,
            open_trial(setup, mesh) as trial,
            trial.step_function(setup.batch) as take,
        ):
            take(0)
            for step in range(1, 1 + (REPEATED if mesh.degrees.world > 1 else 1)):
                with torch.profiler.record_function(MEASURED):
                    take(step)
        mesh.barrier()
        return smallest_peak(profile)


def count_everywhere() -> None:
    """Have the CPU's allocator count in every thread from now on, also in those that are not
    profiled.
    """
    gc.collect()
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    for node in roots:
        yield node
        yield from _nodes(node.children)


def smallest_peak(profile: torch.profiler.profile) -> dict[str, int]:
    """What the allocator counted in the profiled block `MEASURED` of the smallest peak, and before
    it, of what was allocated since profiling began.
    """
    events = list(_nodes(profile.profiler.kineto_results.experimental_event_tree()))
    found = [event for event in events if event.tag.name == "Allocation"]
    found.sort(key=lambda event: event.start_time_ns)
    first = found[0].extra_fields
    there = first.total_allocated - first.alloc_size
    counts = [(one.start_time_ns, one.extra_fields.total_allocated - there) for one in found]
    peaks = []
    for step in (event for event in events if event.name == MEASURED):
        before = next((total for at, total in reversed(counts) if at < step.start_time_ns), 0)
        during = [total for at, total in counts if step.start_time_ns <= at <= step.end_time_ns]
        peaks.append({"peak": max(before, *during), "before": before})
    return min(peaks, key=lambda one: one["peak"])


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
    print(f"{'case':30} rank {'measured':>10} {'planned':>10}  difference, MiB at the peak")
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
                print(f"{case:30} {rank:4} {there:10.1f} {said:10.1f}  {said / there - 1:+.2%}")


if __name__ == "__main__":
    main()
