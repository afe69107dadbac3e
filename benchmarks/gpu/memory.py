"""What each way to save memory frees on the device and costs in time, beside what the plan says."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.training import BF16, recipe_of, train
from ingot.plan.tracing.memory import plan_memory

BIG = {
    **BF16,
    "model.source": "preset:llama-135m",
    "tokenizer.vocab_size": 49_152,
    "data.seq_len": 1024,
    "train.global_batch": 8,
    "train.micro_batch": 8,
}
TINY = {**BF16, "data.seq_len": 32, "train.global_batch": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recomputation": {"memory.recompute.kind": "full"},
    "selective recomputation": {"memory.recompute.kind": "selective"},
    "activations offloaded": {"memory.offload.activations": True},
    "the optimizer offloaded": {"memory.offload.optimizer": 1.0},
    "stochastic rounding": {"precision.master": "stochastic"},
    "LoRA": {"model.lora": {"rank": 8}},
}


def run(asked: Asked, record: Record) -> None:
    plain = 0
    for way, more in WAYS.items():
        with record.trying(way):
            knobs = {**(TINY if asked.tiny else BIG), **more}
            with tempfile.TemporaryDirectory() as folder:
                recipe = recipe_of(Path(folder), knobs)
                [planned] = plan_memory(recipe, 1, asked.device.type)
            found = train(knobs, asked.device, 4)
            record.figures(
                **{
                    way: {
                        "peak_bytes": found.peak_bytes,
                        "planned_bytes": planned.trace.peak.total,
                        "step_s": found.step_s,
                    }
                }
            )
            if not asked.cuda:
                record.not_run(f"{way}: memory")
                continue
            plain = plain or found.peak_bytes
            if way != "plain":
                freed = 1 - found.peak_bytes / plain
                record.holds(f"{way}: frees memory", freed > 0.05, f"{freed:.0%} of the plain peak")
