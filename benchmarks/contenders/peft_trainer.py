"""PEFT's adapter in transformers' Trainer, over weights in the dtype of computing, which takes less
than casting frozen weights in each step.
"""

from __future__ import annotations

from peft import PeftModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from benchmarks.contenders.rows import TokenRows
from benchmarks.contenders.transformers_turns import Turns, arguments
from benchmarks.contenders.turnstile import Turnstile, read_task

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main() -> None:
    task = read_task()
    base = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=DTYPES[task["compute"]], attn_implementation="sdpa"
    )
    Trainer(
        model=PeftModel.from_pretrained(base, task["adapter"], is_trainable=True),
        args=TrainingArguments(**arguments(task)),
        train_dataset=TokenRows(task),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
