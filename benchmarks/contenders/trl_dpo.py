"""TRL's DPOTrainer, which computes the reference's log-probabilities before it trains."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from benchmarks.contenders.transformers_turns import Turns, arguments, read_rows
from benchmarks.contenders.turnstile import Turnstile, read_task


class Encoded(DPOTrainer):
    """Pairs that are ids already."""

    def _prepare_dataset(self, dataset: Dataset, *args: Any, **more: Any) -> Dataset:
        return dataset


def main() -> None:
    task = read_task()
    Encoded(
        model=AutoModelForCausalLM.from_pretrained(
            task["model"], dtype="float32", attn_implementation="sdpa"
        ),
        args=DPOConfig(
            **arguments(task),
            beta=0.1,
            precompute_ref_log_probs=True,
            max_length=None,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(read_rows(task)),
        processing_class=AutoTokenizer.from_pretrained(task["tokenizer"]),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
