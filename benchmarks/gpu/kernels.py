"""Where the time of one compiled training step goes, kernel by kernel."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ceilings import wait
from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.steps import emulating, recipe_of
from ingot.base.environment import Ranks
from ingot.parallel.mesh import Mesh
from ingot.train.micro_batch.trial import made_up_setup, open_trial

WARM_UP, SHOWN = 3, 25
WORK = {
    "attention": ("flash", "fmha", "attention", "flex", "cudnn"),
    "matrix products": ("gemm", "cutlass", "nvjet", "addmm", "::mm", "::bmm", "linear", "xmma"),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "compiled pointwise": ("triton_",),
    "copies": ("memcpy", "memset", "copy_", "direct_copy"),
}
"""Kind of work -> parts of the names of its kernels, the first that fits."""


def run(asked: Asked, record: Record, **knobs: Any) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if asked.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    mesh = Mesh(Ranks(), asked.device)
    with tempfile.TemporaryDirectory() as name, emulating(asked):
        setup = made_up_setup(recipe_of(Path(name), tiny=asked.tiny, **knobs), mesh)
        with open_trial(setup, mesh, quick=True) as trial, trial.step_function(setup.batch) as take:
            for step in range(WARM_UP):
                float(take(step).loss)
            wait(asked.device)
            began = time.perf_counter()
            float(take(WARM_UP).loss)
            wait(asked.device)
            alone = time.perf_counter() - began
            with torch.profiler.profile(activities=activities) as profile:
                float(take(WARM_UP + 1).loss)
                wait(asked.device)
    rows = kernels(profile, asked)
    total = sum(seconds for _, seconds, _ in rows)
    kinds: dict[str, float] = defaultdict(float)
    for kernel, seconds, _ in rows:
        kinds[kind_of(kernel)] += seconds
    record.figures(
        step_s=alone,
        kernels_s=total,
        device_idle=max(0.0, 1 - total / alone) if asked.cuda else None,
        shares={kind: seconds / total for kind, seconds in kinds.items()},
        kernels=[
            {"name": kernel[:120], "share": seconds / total, "calls": calls}
            for kernel, seconds, calls in rows[:SHOWN]
        ],
    )


def kernels(profile: torch.profiler.profile, asked: Asked) -> list[tuple[str, float, int]]:
    """Name, seconds and calls of each kernel, or of each operator of a CPU, longest first."""
    found = []
    for event in profile.key_averages():
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        # A named part, such as a step of an optimizer, is there beside the kernels in it.
        if asked.cuda and (not on_device or event.is_user_annotation):
            continue
        micros = event.self_device_time_total if asked.cuda else event.self_cpu_time_total
        found.append((event.key, micros / 1e6, event.count))
    return sorted((row for row in found if row[1] > 0), key=lambda row: -row[1])


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    for kind, marks in WORK.items():
        if any(mark in lowered for mark in marks):
            return kind
    return "other"
