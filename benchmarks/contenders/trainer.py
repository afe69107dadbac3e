"""transformers' Trainer: as it comes, or with `torch_compile`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.contenders.rows import TokenRows
from benchmarks.contenders.turnstile import Turnstile, read_task


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


def main() -> None:
    task = read_task()
    knobs: dict[str, Any] = {"dtype": "float32", "attn_implementation": "sdpa"}
    if (Path(task["model"]) / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(task["model"], **knobs)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task["model"]), **knobs)
    arguments = TrainingArguments(
        output_dir=task["folder"],
        per_device_train_batch_size=task["batch"],
        max_steps=task["most"],
        learning_rate=task["lr"],
        weight_decay=task["weight_decay"],
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        adam_epsilon=task["eps"],
        max_grad_norm=task["clip"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=task["device"] == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        dataloader_num_workers=0,
        torch_compile=task["compiled"],
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=TokenRows(task),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
