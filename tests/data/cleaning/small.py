"""Cleaning of a few documents, and an engine that deals the work out in another way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.data.cleaning.clean import clean
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.folding import FoldedTexts, fold
from ingot.data.engines.engine import Engine, Result, Stage, Task
from ingot.data.engines.local import LocalEngine
from ingot.data.ingest import ingest
from ingot.data.raw import ranges as ranges_module
from ingot.data.raw import store as raw_module
from ingot.data.raw.ranges import ranges, read_range
from ingot.data.raw.store import RawData, open_raw
from tests.data.small import recipe, write_jsonl

Kept = list[tuple[str, str]]
WORDS = (
    "copper",
    "tin",
    "iron",
    "melts",
    "cools",
    "pours",
    "mould",
    "furnace",
    "slag",
    "flux",
    "ingot",
    "bronze",
    "rod",
    "wire",
    "sheet",
    "anneal",
    "quench",
    "temper",
    "forge",
)


@dataclass(frozen=True)
class Shuffled:
    """Several workers in one process, that take tasks in any order and do some of them twice, as
    Spark may.
    """

    seed: int
    workers: int

    def run(
        self, work: Stage[Task, Result], tasks: Sequence[Task], progress: Progress
    ) -> list[Result]:
        chance = random.Random(self.seed)
        doers = [work.open() for _ in range(self.workers)]
        order = list(range(len(tasks))) + chance.choices(range(len(tasks)), k=len(tasks) // 2)
        chance.shuffle(order)
        results = {number: chance.choice(doers)(tasks[number], lambda _: None) for number in order}
        return [results[number] for number in range(len(tasks))]


def cut(monkeypatch: pytest.MonkeyPatch, group: int, part: int, smallest: int) -> None:
    """Let raw documents be written and read in pieces of so many bytes."""
    monkeypatch.setattr(raw_module, "GROUP_BYTES", group)
    monkeypatch.setattr(raw_module, "PART_BYTES", part)
    monkeypatch.setattr(ranges_module, "SMALLEST_BYTES", smallest)


def small(
    root: Path, train: Sequence[str], validation: Sequence[str] | None = None, **knobs: Any
) -> Recipe:
    """A recipe whose documents are ingested."""
    own = (
        {}
        if validation is None
        else {
            "data__validation__fraction": None,
            "data__validation": [{"source": str(write_jsonl(root / "in" / "v.jsonl", validation))}],
        }
    )
    made = recipe(
        root,
        write_jsonl(root / "in" / "t.jsonl", train),
        **{**own, **{f"data__clean__{knob}": value for knob, value in knobs.items()}},
    )
    ingest(made)
    return made


def kept(
    made: Recipe, engine: Engine | None = None, raw: RawData | None = None
) -> tuple[CleaningResult, Kept]:
    """What cleaning says, and the documents of all ranges that stay."""
    raw = raw or open_raw(made)
    cleaned = clean(made, raw, engine or LocalEngine(1))
    documents: Kept = []
    for task in ranges(raw):
        for table in cleaned.tables(task, read_range(raw.folder, task)):
            documents += zip(
                table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True
            )
    return cleaned, documents


def places(documents: Kept) -> list[str]:
    return [doc_id for doc_id, _ in documents]


def text(seed: int, count: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count)) + f" {seed}."


def numbered(*numbers: int, split: str = "t") -> list[str]:
    return [f"{split}.jsonl:{number}" for number in numbers]


def stays(
    root: Path, train: Sequence[str], validation: Sequence[str] | None = None, **knobs: Any
) -> list[str]:
    """The doc_ids that stay: `t.jsonl:1` is the first training document."""
    return places(kept(small(root, train, validation, **knobs))[1])


def folded_texts(folded: FoldedTexts) -> list[str]:
    return [
        bytes(folded.flat[begin:end]).decode()
        for begin, end in zip(folded.begins, folded.ends, strict=True)
    ]


def folded(*texts: str) -> list[str]:
    return folded_texts(fold(pa.array(texts, pa.string())))
