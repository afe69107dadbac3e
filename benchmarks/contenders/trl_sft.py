"""TRL's SFTTrainer without padding: it lays the packed rows of a batch end to end, and positions
tell the documents apart.
"""

from __future__ import annotations

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.contenders.transformers_turns import Turns, arguments, read_rows
from benchmarks.contenders.turnstile import Turnstile, read_task


def main() -> None:
    task = read_task()
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            task["model"], dtype="float32", attn_implementation="sdpa"
        ),
        args=SFTConfig(
            **arguments(task),
            padding_free=True,
            max_length=None,
            # The rows are packed already, by the same kind of algorithm.
            dataset_kwargs={"skip_prepare_dataset": True},
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(read_rows(task)),
        processing_class=AutoTokenizer.from_pretrained(task["tokenizer"]),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
