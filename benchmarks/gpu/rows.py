"""What a GPU is asked, in the order of its worth. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CORRECT, SPEED, PLANNED = "correct", "speed", "planned"


@dataclass(frozen=True)
class Row:
    """A row of the results, done by a process of its own.

    program: the module of `benchmarks.gpu` whose `run` does it, with `knobs`.
    estimate_s: what it takes on an H100, its start included; it is not begun where less is left.
    unless_measured: it is tried only where that row was not measured, for want of memory.
    beside: on the host's processor alone, while the device does other rows.
    shared: it measures no time, and such rows that follow each other share the device.
    """

    name: str
    kind: str
    program: str
    estimate_s: float
    knobs: Mapping[str, Any] = field(default_factory=dict)
    unless_measured: str | None = None
    beside: bool = False
    shared: bool = False

    @property
    def about(self) -> str:
        """What tells rows of one name apart that ask for something else."""
        return json.dumps([self.program, dict(self.knobs)], sort_keys=True)


def training(name: str, estimate_s: float, smaller: str | None = None, **knobs: Any) -> Row:
    """A row of `ingot bench`: `preset`, `micro_batch`, and knobs of `steps.StepsAsked`."""
    return Row(name, SPEED, "steps", estimate_s, knobs, unless_measured=smaller)


def trainer(name: str, estimate_s: float, smaller: str | None = None, **knobs: Any) -> Row:
    return Row(name, SPEED, "trainer", estimate_s, knobs, unless_measured=smaller)


CHECKS = (
    Row("ceilings", SPEED, "ceilings", 30),
    Row("attention", CORRECT, "attention", 150, shared=True),
    Row(
        "training beside the CPU", CORRECT, "training", 100, {"part": "beside the CPU"}, shared=True
    ),
    Row("training, bits", CORRECT, "training", 100, {"part": "bits"}, shared=True),
    Row(
        "training, bits of long rows",
        CORRECT,
        "training",
        40,
        {"part": "bits of long rows"},
        shared=True,
    ),
    Row("training, rounded", CORRECT, "training", 100, {"part": "rounded"}, shared=True),
    Row(
        "training, weights offloaded",
        CORRECT,
        "training",
        60,
        {"part": "weights offloaded"},
        shared=True,
    ),
    Row("families", CORRECT, "families", 120, shared=True),
    Row("resume", CORRECT, "resume", 90, shared=True),
    Row("serving", CORRECT, "serving", 80, shared=True),
)
B1, B8 = {"preset": "llama-1b"}, {"preset": "llama-8b"}
SPEEDS = (
    training("1B full, 8 rows", 40, **B1, micro_batch=8),
    training("1B full, 4 rows", 40, "1B full, 8 rows", **B1, micro_batch=4),
    training("1B full, 2 rows", 40, "1B full, 4 rows", **B1, micro_batch=2),
    # After what compiled the same step.
    Row("1B kernels, 8 rows", SPEED, "kernels", 25, {**B1, "micro_batch": 8}),
    Row("1B kernels, 2 rows", SPEED, "kernels", 30, {**B1, "micro_batch": 2}, "1B kernels, 8 rows"),
    training("8B LoRA, 4 rows", 120, **B8, micro_batch=4, lora=True),
    training("8B LoRA, 2 rows", 60, "8B LoRA, 4 rows", **B8, micro_batch=2, lora=True),
    training("8B, 10 layers, bf16", 45, **B8, layers=10, micro_batch=2),
    training("8B, 10 layers, float8 rowwise", 40, **B8, layers=10, micro_batch=2, float8="rowwise"),
    Row(
        "8B kernels, float8 rowwise",
        SPEED,
        "kernels",
        50,
        {**B8, "layers": 10, "micro_batch": 2, "float8": "rowwise"},
    ),
    training("8B, 6 layers, bf16", 50, "8B, 10 layers, bf16", **B8, layers=6, micro_batch=2),
    training(
        "8B, 6 layers, float8 rowwise",
        60,
        "8B, 10 layers, float8 rowwise",
        **B8,
        layers=6,
        micro_batch=2,
        float8="rowwise",
    ),
    trainer("1B full, Trainer compiled, 4 rows", 95, **B1, micro_batch=4, compiled=True),
    trainer(
        "1B full, Trainer compiled, 2 rows",
        75,
        "1B full, Trainer compiled, 4 rows",
        **B1,
        micro_batch=2,
        compiled=True,
    ),
    trainer(
        "1B full, Trainer compiled, 1 row",
        75,
        "1B full, Trainer compiled, 2 rows",
        **B1,
        micro_batch=1,
        compiled=True,
    ),
    Row("1B serving", SPEED, "generation", 80, B1),
    training(
        "8B, 10 layers, float8 tensorwise", 40, **B8, layers=10, micro_batch=2, float8="tensorwise"
    ),
    training("mixture, 4 rows", 50, preset="mixture", micro_batch=4),
    training("mixture, 2 rows", 60, "mixture, 4 rows", preset="mixture", micro_batch=2),
    training("1B full, packed, 4 rows", 90, **B1, micro_batch=4, packed=True),
    training("1B full, not compiled, 4 rows", 40, **B1, micro_batch=4, compiled=False),
    trainer("1B full, Trainer, 2 rows", 40, **B1, micro_batch=2, compiled=False),
    Row("memory", CORRECT, "memory", 120),
    Row("attention kernels", SPEED, "attention_kernels", 80),
)
PLANS = tuple(
    Row(f"plan: {row.name}", PLANNED, "planned", 60, row.knobs, beside=True)
    for row in SPEEDS
    if row.program == "steps"
)
ROWS = (*CHECKS[:1], *PLANS, *CHECKS[1:], *SPEEDS)


def in_miniature() -> list[Row]:
    """Rows but for those that differ in numbers alone that are the same in miniature."""
    found: dict[str, Row] = {}
    for row in ROWS:
        knobs = {**row.knobs, "micro_batch": 2, "layers": "layers" in row.knobs}
        found.setdefault(json.dumps([row.program, knobs], sort_keys=True), row)
    return list(found.values())


def named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)
