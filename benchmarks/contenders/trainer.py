"""transformers' Trainer: as it comes, or with `torch_compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.contenders.rows import TokenRows
from benchmarks.contenders.transformers_turns import Turns, arguments
from benchmarks.contenders.turnstile import Turnstile, read_task


def main() -> None:
    task = read_task()
    knobs: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
    if (Path(task["model"]) / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(task["model"], **knobs)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task["model"]), **knobs)
    Trainer(
        model=model,
        args=TrainingArguments(**arguments(task)),
        train_dataset=TokenRows(task),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
