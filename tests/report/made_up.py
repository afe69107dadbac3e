"""A run folder as a finished quick start leaves it, made up: the right files with plausible
numbers, no model behind them.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    write_record,
    write_report,
)
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.config.load import dump_recipe
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count

BEGAN = 1_750_000_000.0
PROMPTS = ("def ", "import os\n", "class Test", "    for i in range(")
COMPLETIONS = (
    (
        '_get_value(self, name, default=None):\n        """Return the value of the option.\n\n     '
        '   If the name is not a string, it is returned.\n        """\n        if name is None:\n  '
        "          return self._name"
    ),
    (
        "import sys\nimport time\n\nfrom test import support\nfrom test.support import"
        " import_helper\n\n\nclass TestCase(unittest.TestCase):\n    def test_init(self):"
    ),
    (
        "Case(unittest.TestCase):\n\n    def setUp(self):\n       "
        " self.addCleanup(self.assertEqual)\n        self.assertRaises(TypeError, self.f, 0)"
    ),
    (
        "len(s)):\n            if i == 0:\n                yield i\n            else:\n            "
        "    break"
    ),
)


def made_up_run(
    output: Path,
    name: str = "quickstart",
    *,
    steps: int = 300,
    log_every: int = 10,
    seed: int = 0,
    bits: float = 2.258,
) -> RunFolder:
    """Write the run folder `output/name` and return it."""
    recipe = Recipe.model_validate(
        {
            "name": name,
            "seed": 1,
            "output": str(output),
            "tokenizer": {"source": "train", "vocab_size": 4096},
            "data": {
                "train": [{"source": "builtin:stdlib"}],
                "validation": {"fraction": 0.02},
                "seq_len": 256,
            },
            "train": {
                "steps": steps,
                "global_batch": 8,
                "micro_batch": 8,
                "optimizer": {"lr": 2e-3},
                "evaluate_every": 100,
                "schedule": {"kind": "cosine", "warmup": 20, "min_ratio": 0.1},
            },
            "checkpoint": {"every": 50},
            "evaluate": {
                "tasks": [{"kind": "loss", "baselines": ["gzip", "xz", "bigram"]}],
                "prompts": list(PROMPTS),
            },
            "serve": {"prompt": "def main("},
        }
    )
    run = recipe.folder
    for folder in (run.model, run.steps):
        folder.mkdir(parents=True)
    run.recipe.write_text(dump_recipe(recipe))
    _metrics(run, steps, log_every, random.Random(seed))
    _reports(run, bits)
    _records(run, steps, bits)
    _events(run, steps)
    (run.model / "config.json").write_text(json.dumps(preset("llama-3m")))
    lineage = {
        "schema": 1,
        "ingot": "0.1.0",
        "model_hash": "9f2c41aa7d3e0b15",
        "tokenizer": "41d0c9be77aa2f60",
        "export_type": "bf16",
        "run": name,
        "step": steps,
        "seed": 1,
        "objective": "pretrain",
        "base": None,
        "data": "c0ffee1234567890",
        "held_out": "0ff0ff1234567890",
        "parameters": parameter_count(preset("llama-3m")),
    }
    (run.model / "ingot.json").write_text(json.dumps(lineage))
    return run


def _metrics(run: RunFolder, steps: int, every: int, generator: random.Random) -> None:
    for step in range(1, steps + 1):
        if step % every == 0 or step in (1, steps):
            ideal = (
                3.62
                + 4.75 * math.exp(-step / (0.11 * steps))
                + 0.9 * math.exp(-step / (0.6 * steps))
            )
            lr = 2e-3 * (
                min(step, 20) / 20
                if step <= 20
                else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 20) / (steps - 20)))
            )
            speed = (
                6100
                + generator.gauss(0, 170)
                - (2600 if step == 1 else 0)
                - (700 if generator.random() < 0.03 else 0)
            )
            append_line(
                run.metrics,
                {
                    "step": step,
                    "t_wall": BEGAN + 30 + step / 3,
                    "train/loss": ideal + generator.gauss(0, 0.07),
                    "train/tokens_per_step": 2048.0,
                    "train/lr": lr,
                    "train/grad_norm": (
                        0.6 + 6 * math.exp(-step / (0.06 * steps)) + abs(generator.gauss(0, 0.12))
                    ),
                    "train/tokens_per_s": speed,
                    "train/mfu": speed * 1.66e7 / 3.1e11,
                    "train/examples_per_s": speed / 256,
                    "train/skipped_steps": 0.0,
                    "memory/rank0_gb": 0.81,
                },
            )
        if step % 100 == 0:
            append_line(
                run.metrics,
                {
                    "step": step,
                    "t_wall": BEGAN + 30 + step / 3,
                    "validation/loss": ideal + 0.09,
                    "validation/seconds": 1.9,
                },
            )


def _reports(run: RunFolder, bits: float) -> None:
    metrics = {
        "loss/loss": Metric(3.7412, 3.6855, 3.7969, "lower", 214, "5be1f00dcafe0001"),
        "loss/perplexity": Metric(42.148, 39.865, 44.562, "lower", 214, "5be1f00dcafe0001"),
        "loss/bits_per_byte": Metric(
            bits, bits - 0.034, bits + 0.034, "lower", 214, "0ddba11decaf0002"
        ),
    }
    samples = [
        {"prompt": prompt, "completion": completion}
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    report = EvaluationReport(
        "9f2c41aa7d3e0b15",
        "41d0c9be77aa2f60",
        metrics,
        {"gzip": 2.041, "xz": 1.796, "bigram": 2.902},
        samples,
    )
    write_report(run.reports / "evaluate.json", report)
    reason = (
        f"loss/bits_per_byte {bits}, live 2.4193, lower is better: better by {2.4193 - bits:.4f}"
    )
    gate = {
        "schema": 1,
        "decision": "deploy",
        "reason": reason,
        "rule": {
            "metric": "loss/bits_per_byte",
            "direction": None,
            "margin": 0.0,
            "override": None,
        },
        "metrics": [
            {
                "metric": "loss/bits_per_byte",
                "direction": "lower",
                "candidate": bits,
                "live": 2.4193,
                "better": True,
                "reason": reason,
            }
        ],
        "live": {"version": 1, "model_hash": "77e0"},
        "candidate": {"model_hash": "9f2c41aa7d3e0b15"},
        "time": "2025-06-15T15:08:51+00:00",
    }
    (run.reports / "gate.json").write_text(json.dumps(gate))
    completion = (
        "self, *args, **kwargs):\n        return self._name == other._name\n\n    def"
        " __init__(self):"
    )
    answer = {"schema": 1, "prompt": "def main(", "completion": completion, "seconds": {}}
    (run.reports / "predict.json").write_text(json.dumps(answer))


def _records(run: RunFolder, steps: int, bits: float) -> None:
    for verb, seconds, result, where in (
        ("ingest", 4.213, "1,718 documents, 33.9 MB", "data/raw"),
        ("prepare", 31.87, "10,640,113 tokens, vocabulary 4,096", "data/columns"),
        ("train", 112.4, f"{steps} steps in 1m 52s, loss 3.641", "model"),
        ("evaluate", 38.02, f"{bits:.2f} bits per byte, perplexity 42.1", "reports/evaluate.json"),
        ("gate", 0.041, "deploy: better by 0.1613", "reports/gate.json"),
        ("register", 0.112, "quickstart v2, live", "../registry/quickstart/v2"),
        ("serve", 6.318, "answered in 1.4 s", "reports/predict.json"),
    ):
        write_record(
            run.steps, PipelineStepRecord(verb, "in", "out", seconds, result, str(run.root / where))
        )


def _events(run: RunFolder, steps: int) -> None:
    """Killed at step 118, 8 seconds after the last checkpoint's snapshot, and started again 42
    seconds later.
    """

    def event(
        at: float,
        kind: str,
        step: int | None = None,
        cause: str | None = None,
        seconds: float | None = None,
        attempt: int = 1,
        **more: Any,
    ) -> None:
        what = {"kind": kind, "step": step, "seconds": seconds, "cause": cause, **more}
        append_line(
            run.events, {"t_wall": BEGAN + at, "t_mono": at, "attempt": attempt, "rank": 0, **what}
        )

    def save(at: float, step: int, productive: float, attempt: int = 1) -> None:
        spent = {
            "productive": productive,
            "waiting": 0.1,
            "evaluating": 0.0 if step % 100 else 1.9,
            "saving": 0.2,
        }
        event(at, "save", step, None, 0.2, attempt, total_s=1.0, bytes=29_000_000, spent=spent)

    event(37, "start", 0, "first step", 6.0)
    save(56, 50, 17.7)
    save(74, 100, 15.8)
    event(81, "failure", 118, "train: killed (out of memory?)")
    event(125, "lost", 100, "attempt 1 ended in phase step", 8.0, attempt=2, steps=18)
    event(127, "start", 100, "resumed", 4.0, attempt=2)
    for step in range(150, steps + 1, 50):
        save(127 + step / 4, step, 34.7 if step == 150 else 10.3, attempt=2)
    event(205, "finish", steps, None, 78.0, attempt=2)
    event(
        244,
        "gate",
        cause="loss/bits_per_byte 2.258, live 2.4193, lower is better: better by 0.1613",
    )
    event(245, "register", cause="quickstart v2, live")
