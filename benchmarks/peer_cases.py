"""What `benchmarks.peers` trains: for each case our knobs, documents, the rows that the peers get,
and who takes part.

The rows are those that our own loader makes, step by step, so that all sides compute the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import texts
from ingot.config.models.presets import preset
from ingot.data.batches.loader import Batch

OURS, TRAINER, PEFT, SFT, DPO, SEQ2SEQ = (
    "ours",
    "trainer",
    "peft_trainer",
    "trl_sft",
    "trl_dpo",
    "seq2seq_trainer",
)


@dataclass(frozen=True)
class Contender:
    """A program of `benchmarks.contenders`, and in which environment it runs; None for this one."""

    name: str
    program: str
    environment: str | None
    compiled: bool = False
    micro_batch: int | None = None
    """On our side: rows that are computed at once; the step stays the same."""


@dataclass(frozen=True)
class Sizes:
    """What is trained."""

    preset: str = "llama-56m"
    seq_len: int = 512
    batch: int = 8
    vocab_size: int = 32_000
    corpus_mb: float = 8
    """Text in all; of plain text a document is a fourth of it, so that hardly a row meets the end
    of one and all sides mask alike.
    """
    t5: tuple[int, int, int] = (512, 6, 8)
    """Width, layers of either half and heads of the sequence-to-sequence model: T5 small's."""


QUICK = Sizes("llama-3m", 64, 2, 512, 0.4, (64, 1, 2))

Row = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """One way of training.

    Args:
        documents: writes the corpus: so many documents for rows of so many tokens.
        rows: what the peers read in place of a batch; None for rows of tokens alone.
    """

    title: str
    contenders: tuple[Contender, ...]
    documents: Callable[[int, int], Iterator[dict[str, Any]]] | None = None
    rows: Callable[[Batch], Iterator[Row]] | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-3
    adapter: int | None = None
    """Rank of the adapter that is trained; None for all weights."""
    seq2seq: bool = False


class Words:
    """Runs of words of the corpus, one after another; how many is drawn around a share of a row."""

    def __init__(self, seq_len: int) -> None:
        self._words = (word for text in texts() for word in text.split())
        self._draw, self._seq_len = random.Random(0), seq_len

    def some(self, share: float) -> str:
        """As many words as half to one and a half of this share of a row has tokens."""
        count = max(2, round(share * self._seq_len * self._draw.uniform(0.5, 1.5)))
        return " ".join(next(self._words) for _ in range(count))


def _chats(rows: int, seq_len: int) -> Iterator[dict[str, Any]]:
    words = Words(seq_len)
    for _ in range(8 * rows):
        said = (("user", words.some(0.05)), ("assistant", words.some(0.1)))
        yield {"messages": [{"role": role, "content": content} for role, content in said]}


def _preferences(rows: int, seq_len: int) -> Iterator[dict[str, Any]]:
    words = Words(seq_len)
    for _ in range(rows):
        yield {
            "prompt": words.some(0.1),
            "chosen": words.some(0.12),
            "rejected": words.some(0.12),
        }


def _pairs(rows: int, seq_len: int) -> Iterator[dict[str, Any]]:
    words = Words(seq_len)
    for _ in range(rows):
        yield {"source": words.some(0.7), "target": words.some(0.07)}


def _packed_rows(batch: Batch) -> Iterator[Row]:
    """Labels stand at their own token, as transformers has them, and the lengths of the documents
    that share the row.
    """
    for tokens, labels, segments in zip(batch.tokens, batch.labels, batch.segments, strict=True):
        live = segments > 0
        at_token = torch.cat((labels.new_full((1,), -100), labels[:-1]))
        lengths = segments[live].unique_consecutive(return_counts=True)[1]
        yield {
            "input_ids": tokens[live].tolist(),
            "labels": at_token[live].tolist(),
            "seq_lengths": lengths.tolist(),
        }


def _answers(batch: Batch) -> Iterator[Row]:
    for first in range(0, len(batch.tokens), 2):
        found: Row = {}
        for side, row in (("chosen_ids", first), ("rejected_ids", first + 1)):
            prompt = int((batch.labels[row] != -100).nonzero()[0]) + 1
            tokens = batch.tokens[row][batch.segments[row] > 0].tolist()
            found["prompt_ids"], found[side] = tokens[:prompt], tokens[prompt:]
        yield found


def _sources(batch: Batch) -> Iterator[Row]:
    for tokens, segments, labels in zip(batch.tokens, batch.segments, batch.labels, strict=True):
        yield {
            "input_ids": tokens[segments > 0].tolist(),
            "labels": labels[labels != -100].tolist(),
        }


def _sides(peer: str, program: str, environment: str) -> tuple[Contender, ...]:
    return (
        Contender("ingot compiled", OURS, None, compiled=True),
        Contender("ingot", OURS, None),
        Contender(f"{peer} compiled", program, environment, compiled=True),
        Contender(peer, program, environment),
    )


CASES = {
    "pretrain": Case(
        "all weights, plain text",
        (
            *_sides("transformers Trainer", TRAINER, "transformers"),
            Contender("ingot compiled, micro-batch 2", OURS, None, compiled=True, micro_batch=2),
            Contender("bare loop compiled", "bare_loop", "transformers", compiled=True),
            Contender("Lightning compiled", "lightning_compiled", "lightning", compiled=True),
            Contender("litgpt compiled", "litgpt_compiled", "litgpt", compiled=True),
        ),
    ),
    "lora": Case(
        "LoRA of rank 16 on all linear layers, plain text",
        _sides("PEFT Trainer", PEFT, "trl"),
        knobs={"model.lora": {"rank": 16, "alpha": 32}},
        adapter=16,
    ),
    "sft": Case(
        "SFT of packed chats, the loss on answers",
        _sides("TRL SFTTrainer", SFT, "trl"),
        _chats,
        _packed_rows,
        {"objective.kind": "sft", "tokenizer.template": "chatml"},
    ),
    "dpo": Case(
        "DPO, the reference computed before",
        _sides("TRL DPOTrainer", DPO, "trl"),
        _preferences,
        _answers,
        {"objective": {"kind": "dpo", "beta": 0.1}, "tokenizer.template": "chatml"},
        lr=1e-5,
    ),
    "seq2seq": Case(
        "T5 small, pairs of texts",
        _sides("transformers Seq2SeqTrainer", SEQ2SEQ, "transformers"),
        _pairs,
        _sources,
        {"objective.kind": "seq2seq"},
        seq2seq=True,
    ),
}


def t5_config(sizes: Sizes) -> dict[str, Any]:
    """T5 small's configuration, of other sizes if asked; without dropout, so that all sides find
    the same losses.
    """
    width, layers, heads = sizes.t5
    return {
        **preset("t5-mini"),
        "vocab_size": sizes.vocab_size + 128,
        "d_model": width,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "relu",
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    }


def write_rows(path: Path, batches: Iterator[Batch], rows: Callable[[Batch], Iterator[Row]]) -> int:
    """JSONL for the peers; answers how many tokens there are in all, padding left out."""
    tokens = 0
    with path.open("w", encoding="utf-8") as stream:
        for batch in batches:
            tokens += _live(batch.segments)
            for row in rows(batch):
                stream.write(json.dumps(row) + "\n")
    return tokens


def _live(segments: Tensor) -> int:
    return int((segments > 0).sum())
