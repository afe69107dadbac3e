"""What each way to save memory frees on the device and costs in time, beside what the plan says."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.training import BF16, recipe_of, sized, train
from ingot.base.errors import WrongInput
from ingot.plan.tracing.workers import TraceRequest, trace_all

BIG = {
    **BF16,
    "model.source": "preset:llama-135m",
    "tokenizer.vocab_size": 49_152,
    "data.seq_len": 1024,
    "train.global_batch": 8,
    "train.micro_batch": 8,
}
TINY = {**BF16, "train.global_batch": 2}
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
    knobs = {
        way: sized({**(TINY if asked.tiny else BIG), **more}, asked) for way, more in WAYS.items()
    }
    planned: dict[str, int | None] = dict.fromkeys(WAYS)
    with record.trying("plans"):
        planned.update(zip(WAYS, plans([*knobs.values()], asked.device.type), strict=True))
    plain = 0
    for way in WAYS:
        with record.trying(way):
            found = train(knobs[way], asked.device, 2 if asked.tiny else 4)
            record.figures(
                **{
                    way: {
                        "peak_bytes": found.peak_bytes,
                        "planned_bytes": planned[way],
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


def plans(knobs: Sequence[Mapping[str, Any]], kind: str) -> list[int]:
    """Bytes of the tensors at the highest use, all traced by one process and its forks."""
    with tempfile.TemporaryDirectory() as folder:
        recipes = [recipe_of(Path(folder), one) for one in knobs]
        found: list[int] = []
        for trace in trace_all([TraceRequest(recipe, 1, 0, kind) for recipe in recipes]):
            if isinstance(trace, WrongInput):
                raise trace
            found.append(trace.peak.total)
    return found
