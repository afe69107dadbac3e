"""Rows and batches: ours and megatron-core's side by side on one column, the loader beside a
training step, the start on many parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.comparison import Comparison
from benchmarks.spine import OPTIMIZER, train_ours
from benchmarks.turns import Contender, Turn, Work
from ingot.base.markers import FileEntry, entry_of
from ingot.base.progress import Progress
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, open_rows
from ingot.data.columns.column import ColumnWriter, bin_path, column_prefix, idx_path, token_dtype
from ingot.data.columns.manifest import (
    ColumnPart,
    PreparedData,
    PreparedSource,
    read_prepared,
    write_prepared,
)
from ingot.data.engines.local import LocalEngine
from ingot.data.packing.tables import pack

VOCAB_SIZE, EOS = 50_000, 0
MEAN_TOKENS = 600
"""Tokens in a document, as in English web text; their logarithms are spread by 1."""
BATCH = 64


def write_columns(folder: Path, parts: int, documents: int, seed: int = 0) -> Path:
    """Token columns of random documents, `documents` in each part; each ends with its EOS."""
    random = np.random.default_rng(seed)
    written, entries = list[ColumnPart](), list[FileEntry]()
    for number in range(parts):
        lengths = np.clip(
            random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, documents), 2, 100_000
        ).astype(np.int64)
        flat = random.integers(1, VOCAB_SIZE, int(lengths.sum()))
        flat[np.cumsum(lengths) - 1] = EOS
        prefix = column_prefix(folder, "train", "tokens", number)
        with ColumnWriter(prefix, token_dtype(VOCAB_SIZE)) as writer:
            writer.append(flat, lengths)
        entries += [entry_of(folder, path.name) for path in (bin_path(prefix), idx_path(prefix))]
        written.append(ColumnPart(number, documents, len(flat), 0, "0"))
    source = PreparedSource(
        "random", 1.0, parts * documents, sum(part.tokens for part in written), 0, written
    )
    kinds = [{"name": "tokens", "dtype": token_dtype(VOCAB_SIZE).name}]
    write_prepared(
        folder,
        PreparedData(
            "pretrain",
            kinds,
            {"train": [source]},
            "none",
            None,
            VOCAB_SIZE,
            "random",
            {"train": "random"},
        ),
        {},
        entries,
    )
    return folder


def load_ours(folder: str, how: str, seq_len: int, count: int) -> Work:
    """Our loader: random rows in batches of `BATCH`, tensors of tokens, labels, positions and
    segments.
    """
    if how != "cut":
        pack(
            Path(folder),
            read_prepared(Path(folder)),
            seq_len,
            how,
            LocalEngine(1),
            Progress("pack", None, "MB", quiet=True),
        )
    rows = open_rows(Path(folder), "train", seq_len, pack=how, pad_last=False)
    loader = Loader(rows, SampleOrder(rows.sizes, 0), BatchPlan(BATCH, BATCH, 1), 0)
    steps = itertools.count()

    def work() -> Turn:
        targets = 0
        for _ in range(count // BATCH):
            (batch,) = loader.step(next(steps))
            targets += int((batch.labels[:1] != IGNORE).sum())
        return Turn(count // BATCH * BATCH, targets)

    return work


def load_megatron(folder: str, seq_len: int, count: int) -> Work:
    """megatron-core's `GPTDataset` and a stack of its samples: tokens, labels, loss mask, and
    positions that restart.

    The mask of attention [T, T], which it can make too, is left out.
    """
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # type: ignore[import-untyped]
    from megatron.core.datasets.utils import Split  # type: ignore[import-untyped]

    tokenizer = SimpleNamespace(
        eod=EOS, pad=-1, vocab_size=VOCAB_SIZE, unique_identifiers={}, special_tokens_dict={}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=seq_len,
        tokenizer=tokenizer,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask=False,
        path_to_cache=str(Path(folder) / "megatron"),
    )
    prefix = str(column_prefix(Path(folder), "train", "tokens", 0))
    column = GPTDataset.build_low_level_dataset(prefix, config)
    data = GPTDataset(
        column, prefix, np.arange(len(column), dtype=np.int32), None, Split.train, config
    )
    places = itertools.cycle(range(len(data)))

    def work() -> Turn:
        targets = 0
        for _ in range(count // BATCH):
            samples = [data[next(places)] for _ in range(BATCH)]
            batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
            targets += int(batch["loss_mask"][:1].sum())
        return Turn(count // BATCH * BATCH, targets)

    return work


def start(folder: str, seq_len: int) -> Work:
    """Open the rows and make the first batch, as at the start of training."""

    def work() -> Turn:
        rows = open_rows(Path(folder), "train", seq_len, pad_last=False)
        loader = Loader(rows, SampleOrder(rows.sizes, 0), BatchPlan(BATCH, BATCH, 1), 0)
        loader.step(0)
        loader.close()
        return Turn(1)

    return work


def loading(folder: Path, seq_len: int, documents: int, count: int) -> Comparison:
    write_columns(folder, 1, documents)
    contenders = [
        Contender(
            f"ingot, {how}",
            load_ours,
            (str(folder), how, seq_len, count),
            ("ingot.data.batches.loader",),
        )
        for how in ("cut", "best_fit")
    ]
    contenders.append(
        Contender(
            "megatron-core",
            load_megatron,
            (str(folder), seq_len, count),
            ("megatron.core.datasets.gpt_dataset",),
        )
    )
    ratios = [(contender.name, "megatron-core") for contender in contenders[:2]]
    notes = [
        "ours makes the next batch in a thread; megatron-core makes no segments, its mask of"
        " attention is left out"
    ]
    return Comparison(
        f"random rows of {seq_len:,} tokens, batches of {BATCH}", "rows", contenders, ratios, notes
    )


def beside_a_step(folder: Path, rows: int, seq_len: int, documents: int) -> Comparison:
    """As in the quick start: what a step of the smallest model costs, and its batch."""
    write_columns(folder, 1, documents)
    contenders = [
        Contender("loader", load_step, (str(folder), rows, seq_len)),
        Contender("step of llama-3m", train_ours, ("llama-3m", rows, seq_len), OPTIMIZER),
    ]
    notes = ["the loader's share of a step is one over the ratio"]
    return Comparison(
        f"batches of {rows} x {seq_len}, and the step that takes one",
        "tokens",
        contenders,
        [("loader", "step of llama-3m")],
        notes,
    )


def load_step(folder: str, rows: int, seq_len: int) -> Work:
    opened = open_rows(Path(folder), "train", seq_len, pad_last=False)
    loader = Loader(opened, SampleOrder(opened.sizes, 0), BatchPlan(rows, rows, 1), 0)
    steps = itertools.count()

    def work() -> Turn:
        return Turn(sum(loader.step(next(steps))[0].tokens.numel() for _ in range(100)))

    return work


def starting(root: Path, few: int, many: int) -> Comparison:
    folders = [(parts, write_columns(root / f"{parts}", parts, 20)) for parts in (few, many)]
    contenders = [
        Contender(f"{parts:,} parts", start, (str(folder), 128), ("ingot.data.batches.loader",))
        for parts, folder in folders
    ]
    return Comparison(
        "start of training: rows opened, first batch made",
        "starts",
        contenders,
        [(contenders[1].name, contenders[0].name)],
    )


COMPARISONS: dict[str, Callable[[bool, Path], Comparison]] = {
    "loader": lambda quick, root: loading(
        root / "loader", 64 if quick else 1024, 500 if quick else 100_000, 128 if quick else 32_768
    ),
    "loader-step": lambda quick, root: beside_a_step(
        root / "step", 2 if quick else 16, 32 if quick else 128, 500 if quick else 20_000
    ),
    "loader-start": lambda quick, root: starting(root / "start", 2, 8 if quick else 4096),
}
"""Name -> the comparison; the first argument asks for tiny sizes that only show that everything
runs.
"""
