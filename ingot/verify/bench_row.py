"""Measures one row of `ingot bench`: this process, or all ranks started by torchrun, train a few
steps of the recipe and keep nothing.

A measured step is a full training step, including loading, counting targets and the optimizer,
without logging, evaluation and checkpoints. Running out of memory is a result.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ingot.base.environment import ranks, usable_cores
from ingot.base.errors import Failed, WrongInput
from ingot.base.hostmemory import host_memory
from ingot.base.storage import write_atomic
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count
from ingot.models.device import (
    accelerator,
    accelerator_count,
    device_name,
    gpu_usage,
    measured_peak,
    peak_memory_bytes,
)
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.hooks import Workload
from ingot.train.micro_batch.memory import forget_peak, is_out_of_memory
from ingot.train.micro_batch.trial import Trial, made_up_setup, open_trial
from ingot.train.setup import TrainSetup, make_setup
from ingot.train.step import BatchCounts, StepInfo
from ingot.verify.bench import WARM_UP

PEAK_TIMES = 3
"""How often the peak is measured before and after the steps; the best counts, since a shared
machine is slow at times.
"""
SAMPLE_EVERY_S = 0.2
MAX_REASON_CHARS = 200
OOM_SCORE_FILE = Path("/proc/self/oom_score_adj")


def measure_row(recipe: Recipe, steps: int, into: Path, *, synthetic: bool) -> None:
    """Measure `steps` steps of the recipe; rank 0 writes the row to `into`, and any rank may write
    that memory ran out.

    Raises:
        WrongInput: recipe, data, model and ranks do not fit together, or there are fewer
            accelerators than processes.
        Failed: memory ran out.
    """
    here = ranks()
    if accelerator() and (there := accelerator_count()) < here.local_world:
        raise WrongInput(
            f"{here.local_world} processes want a device each, and this machine has {there}; ask"
            f" for --devices {there}"
        )
    try:
        with running_mesh(recipe.parallel) as mesh, _memory_limited(mesh):
            row = _measure(
                made_up_setup(recipe, mesh) if synthetic else make_setup(recipe, mesh), mesh, steps
            )
            if mesh.is_main:
                write_atomic(into, json.dumps(row))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # torch's message begins with a place in its own source.
        reason = (
            str(error).strip().partition("\n")[0].rpartition("err == 0. ")[2][:MAX_REASON_CHARS]
            or "the system has no more"
        )
        write_atomic(into, json.dumps({"status": "out of memory", "reason": reason}))
        raise Failed(f"out of memory: {reason}") from None


@contextlib.contextmanager
def _memory_limited(mesh: Mesh) -> Iterator[None]:
    """On a CPU, limit this process to the free memory, so that an allocation beyond it fails
    instead of swapping; and let the kernel kill this process first if memory still runs out.
    """
    if mesh.device.type != "cpu" or sys.platform != "linux":
        yield
        return
    with contextlib.suppress(OSError):
        OOM_SCORE_FILE.write_text("1000")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(psutil.Process().memory_info().data) + host_memory().free // mesh.ranks.local_world
    limits = [most, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _measure(setup: TrainSetup, mesh: Mesh, steps: int) -> dict[str, Any]:
    """Measure the row; collective. Memory is that of the rank that uses most; GPU utilisation is
    the mean.
    """
    with open_trial(setup, mesh, quick=True) as trial:
        best = _peak(mesh, setup)
        with UsageSampler(mesh.device) as samples:
            seconds, cores, counted = _steps(trial, steps)
        mine = [
            samples.mean("util"),
            samples.most("memory"),
            samples.most("host"),
            peak_memory_bytes(mesh.device),
            cores,
        ]
        best = max(best, _peak(mesh, setup))
        weights = sum(parameter.numel() for parameter in trial.train_state.model.parameters())
    util, memory, host, process, busy = zip(*mesh.gather(mine), strict=True)
    config = setup.model_spec.config.to_hf()
    native = setup.model_spec.kind == "decoder"
    on_gpu = mesh.device.type != "cpu"
    tokens = statistics.mean(step.tokens for step in counted)
    positions = statistics.mean(step.positions for step in counted)
    work = Workload.of(setup, mesh)
    cost = work.flops_per_token
    reached = positions / seconds * (cost or 0.0)  # padding is computed too
    best = max(best, reached)  # the machine may have been disturbed whenever a peak was measured
    return {
        "status": "measured",
        "compute": setup.compute,
        "tokens_per_s": tokens / seconds,
        "examples_per_s": setup.batch.global_batch / seconds,
        "seconds_per_step": seconds,
        "tokens_per_step": tokens,
        "positions_per_step": positions,
        "flops_per_token": cost,
        "peak_flops": best,
        "stated_peak_flops": work.stated_peak,
        "share_of_peak": None if cost is None else reached / best,
        "cpu": sum(busy) / usable_cores(),
        "host_memory": max(host),
        "gpu": statistics.mean(util) if on_gpu else None,
        "gpu_memory": max(memory) if on_gpu else None,
        "process_memory_bytes": int(max(process)),
        "parameters": parameter_count(config) if native else weights,
        "active_parameters": parameter_count(config, active=True) if native else weights,
        "device": device_name(mesh.device),
        "device_kind": mesh.device.type,
    }


class _Counted(list[BatchCounts]):
    """The hook that keeps what is in the batch of each step."""

    def after_step(self, info: StepInfo) -> bool:
        self.append(info.counts)
        return False

    def close(self) -> None:
        pass


def _steps(trial: Trial, steps: int) -> tuple[float, float, list[BatchCounts]]:
    """The typical seconds of a step, the number of cores that this process kept busy, and what was
    in the batches.
    """
    times, counted = list[float](), _Counted()
    with trial.step_function(trial.setup.batch, [counted]) as take:
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
            # Like the training loop: wait for the previous step while this one runs, so that the
            # device never waits for the host.
            float(before.skipped)
            before = outcome
            now = time.perf_counter()
            times.append(now - began)
            began = now
        float(before.skipped)
        ended = time.perf_counter()
    times[-1] += ended - began
    cores = (time.process_time() - busy) / (ended - first)
    return _typical_step_s(times, trial.mesh.device), cores, counted[WARM_UP:]


def _typical_step_s(times: Sequence[float], device: torch.device) -> float:
    """The mean on an accelerator, since the host runs ahead of the device; the median on a CPU,
    since other processes disturb it less.
    """
    return statistics.median(times) if device.type == "cpu" else statistics.mean(times)


def _peak(mesh: Mesh, setup: TrainSetup) -> float:
    """FLOP/s of all ranks together, each computing a large matrix product at the same time."""
    mesh.barrier()
    best = max(measured_peak(mesh.device, setup.compute) for _ in range(PEAK_TIMES))
    [total] = mesh.agree(best)
    return total


class UsageSampler:
    """A thread that samples shares of 1: `host` (host memory), `util` and `memory` (of this rank's
    GPU).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._over = device, threading.Event()
        self._seen: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def __enter__(self) -> UsageSampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            self._sample()

    def _sample(self) -> None:
        host = host_memory()
        self._seen.append({"host": host.used / host.total, **gpu_usage(self._device)})

    def mean(self, name: str) -> float:
        """The mean of a sampled quantity; 0 if it was not measured."""
        return statistics.mean([seen.get(name, 0.0) for seen in self._seen])

    def most(self, name: str) -> float:
        """The maximum of a sampled quantity; 0 if it was not measured."""
        return max(seen.get(name, 0.0) for seen in self._seen)
