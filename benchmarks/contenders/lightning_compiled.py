"""Lightning's Trainer over transformers' Llama, compiled, in bf16-mixed where
the processor is fast in bf16.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.contenders.rows import TokenRows, decay_groups
from benchmarks.contenders.turnstile import Turnstile, knobs_of, read_task

PRECISIONS = {"bf16": "bf16-mixed", "fp32": "32-true"}


class Module(lightning.LightningModule):
    def __init__(self, task: dict[str, Any]) -> None:
        super().__init__()
        self.task = task
        model = AutoModelForCausalLM.from_pretrained(
            task["model"], dtype="float32", attn_implementation="sdpa"
        )
        self.model = torch.compile(model) if task["compiled"] else model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # Lightning refuses its own clipping beside the fused kernel in bf16-mixed; without the
        # kernel it would only be slower.
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.task["clip"])

    def configure_optimizers(self) -> Any:
        knobs = knobs_of(self.task)
        return torch.optim.AdamW(
            decay_groups(self.model, knobs.pop("weight_decay")), fused=True, **knobs
        )


class Turns(lightning.Callback):
    """Waits between turns."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile

    def on_train_start(self, *args: Any) -> None:
        self.turnstile.wait()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: dict[str, Tensor], *args: Any
    ) -> None:
        self.turnstile.step(float(outputs["loss"]))


def main() -> None:
    task = read_task()
    loader: Any = torch.utils.data.DataLoader(TokenRows(task), batch_size=task["batch"])
    trainer = lightning.Trainer(
        max_steps=task["most"],
        precision=PRECISIONS[task["compute"]],
        accelerator="cpu" if task["device"] == "cpu" else "gpu",
        devices=1,
        log_every_n_steps=1,
        logger=CSVLogger(task["folder"]),
        callbacks=[Turns(Turnstile(task["steps"]))],
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(task), loader)


if __name__ == "__main__":
    main()
