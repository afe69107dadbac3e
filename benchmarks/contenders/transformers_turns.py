"""What all programs over transformers' Trainer share: turns, arguments, rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks.contenders.turnstile import Turnstile


class Turns(TrainerCallback):
    """Waits between turns; the Trainer logs each step."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile

    def on_train_begin(self, *args: Any, **more: Any) -> None:
        self.turnstile.wait()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **more: Any
    ) -> None:
        if "loss" in logs:
            self.turnstile.step(logs["loss"])


def arguments(task: dict[str, Any]) -> dict[str, Any]:
    """The knobs of TrainingArguments, and of whatever inherits from it."""
    return {
        "output_dir": task["folder"],
        "per_device_train_batch_size": task["batch"],
        "max_steps": task["most"],
        "learning_rate": task["lr"],
        "weight_decay": task["weight_decay"],
        "adam_beta1": task["betas"][0],
        "adam_beta2": task["betas"][1],
        "adam_epsilon": task["eps"],
        "max_grad_norm": task["clip"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": task["compute"] == "bf16",
        "use_cpu": task["device"] == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": 0,
        "torch_compile": task["compiled"],
        "torch_compile_backend": task.get("backend"),
    }


def read_rows(task: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows of all steps, in order."""
    lines = Path(task["rows"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
