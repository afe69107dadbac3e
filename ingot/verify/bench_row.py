"""One row of `ingot bench`, measured: this process, or all ranks that torchrun started, train a few steps of the recipe and keep nothing.

What is measured is a step of training as it is, loading, the count of targets and the optimizer included, without logging, evaluation and
checkpoints. Memory that runs out is an outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.base.environment import ranks
from ingot.base.errors import Failed, WrongInput
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token
from ingot.models.device import device_name, gpu_usage, measured_peak, peak_flops, peak_memory_bytes
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.made_up import made_up_plan
from ingot.train.plan import Plan, plan_run
from ingot.train.room import forget_peak, host_memory, is_out_of_memory
from ingot.train.trial import Trial, trying

WARM_UP = 2
"""Steps that are not counted: memory is taken, kernels are chosen, models compiled."""
PEAK_TIMES = 3
"""How often the peak is measured before and after the steps; the best counts, since a machine that is shared is slow now and then."""
SAMPLE_EVERY_S = 0.2
DATA, SCORE = resource.RLIMIT_DATA, Path("/proc/self/oom_score_adj")


def measure_row(recipe: Recipe, steps: int, into: Path, *, synthetic: bool) -> None:
    """Measure `steps` steps of the recipe as it stands and write the row to `into`, from rank 0; any rank may write that memory ran out.

    Raises:
        WrongInput: recipe, data, model and ranks do not fit together, or there are fewer accelerators than processes.
        Failed: memory ran out.
    """
    here = ranks()
    if torch.accelerator.is_available() and (there := torch.accelerator.device_count()) < here.local_world:
        raise WrongInput(f"{here.local_world} processes want a device each, and this machine has {there}; ask for --devices {there}")
    _die_first()
    try:
        with running_mesh(recipe.parallel) as mesh, _bounded(mesh):
            plan = made_up_plan(recipe, mesh) if synthetic else plan_run(recipe, mesh)
            row = _measure(plan, mesh, steps)
            if mesh.is_main:
                write_atomic(into, json.dumps(row))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200] or "no more memory from the system"
        write_atomic(into, json.dumps({"status": "out of memory", "reason": reason}))
        raise Failed(f"out of memory: {reason}") from None


def _measure(plan: Plan, mesh: Mesh, steps: int) -> dict[str, Any]:
    with trying(plan, mesh) as trial:
        peaks = [_peak(mesh, plan)]
        with _sampling(mesh) as samples:
            seconds, processor = _steps(trial, steps)
        peaks.append(_peak(mesh, plan))
        usage = [samples.mean("util"), samples.most("memory"), samples.most("host"), peak_memory_bytes(mesh.device), processor]
        everyone = mesh.gather(usage)
        sizes = [float(sum(parameter.numel() for parameter in trial.trainee.model.parameters()))]
    batch, per_step = plan.batch.global_batch, plan.batch.global_batch * plan.tokens_per_sample
    best = max(peaks)
    cost = flops_per_token(plan.drawing.config.to_hf(), plan.recipe.data.seq_len) if plan.drawing.kind == "decoder" else None
    gpus = mesh.device.type != "cpu"
    return {
        "status": "measured", "compute": plan.compute, "tokens_per_s": per_step / seconds, "examples_per_s": batch / seconds, "seconds_per_step": seconds,
        "share_of_peak": None if cost is None else per_step / seconds * cost / best, "peak_flops": best,
        "stated_peak_flops": peak_flops(mesh.device, plan.compute), "flops_per_token": cost,
        "cpu": sum(row[4] for row in everyone) / _cores(mesh), "host_memory": max(row[2] for row in everyone),
        "gpu": statistics.mean(row[0] for row in everyone) if gpus else None, "gpu_memory": max(row[1] for row in everyone) if gpus else None,
        "process_memory_bytes": int(max(row[3] for row in everyone)), "micro_steps": plan.batch.micro_steps,
        "tokens_per_step": per_step, "parameters": int(sizes[0]), "device": device_name(mesh.device), "kind": mesh.device.type,
    }


def _steps(trial: Trial, steps: int) -> tuple[float, float]:
    """The median of the seconds of a step, and how many cores this process kept busy."""
    times: list[float] = []
    with trial.dealing(trial.plan.batch) as take:
        before = take(0)
        for step in range(1, WARM_UP):
            before = take(step)
        float(before.loss)
        forget_peak(trial.mesh.device)
        trial.mesh.barrier()
        first = began = time.perf_counter()
        busy = time.process_time()
        for step in range(WARM_UP, WARM_UP + steps):
            outcome = take(step)
            # As the loop does: the step before is waited for while this one runs, so that the device never waits for the host.
            float(before.skipped)
            before = outcome
            now = time.perf_counter()
            times.append(now - began)
            began = now
        float(before.skipped)
        ended = time.perf_counter()
    times[-1] += ended - began
    return _typical(times, trial.mesh.device), (time.process_time() - busy) / (ended - first)


def _typical(times: Sequence[float], device: torch.device) -> float:
    """On an accelerator the mean, as the host hands out steps before they are done; on a CPU the median, which passing guests disturb less."""
    return statistics.median(times) if device.type == "cpu" else statistics.mean(times)


def _peak(mesh: Mesh, plan: Plan) -> float:
    """FLOP/s of all ranks together, each with a large matrix product at the same time."""
    mesh.barrier()
    best = max(measured_peak(mesh.device, plan.compute) for _ in range(PEAK_TIMES))
    [together] = mesh.agree(best)
    return together


def _cores(mesh: Mesh) -> int:
    """What the processes of this machine may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
