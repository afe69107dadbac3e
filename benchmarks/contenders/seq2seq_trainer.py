"""transformers' Seq2SeqTrainer: sources and targets padded to the longest of a batch."""

from __future__ import annotations

from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from benchmarks.contenders.transformers_turns import Turns, arguments, read_rows
from benchmarks.contenders.turnstile import Turnstile, read_task


class Pairs(Dataset[dict[str, list[int]]]):
    """Sources and targets, ids already."""

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._rows[index]


def main() -> None:
    task = read_task()
    model = AutoModelForSeq2SeqLM.from_pretrained(task["model"], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(**arguments(task)),
        train_dataset=Pairs(read_rows(task)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[Turns(Turnstile(task["steps"]))],
    ).train()


if __name__ == "__main__":
    main()
