"""The task of a case of `benchmarks.peers`: weights, columns and rows, written once for all sides,
and the file that each program reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.data import texts, write_tokenizer
from benchmarks.peer_cases import Case, Sizes, t5_config, write_rows
from benchmarks.spine import random_model
from ingot.config.load import load_recipe
from ingot.config.models.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import AdamW
from ingot.config.shape import BatchPlan, flops_per_token
from ingot.data.batches.loader import Batch, Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import Rows, open_rows
from ingot.data.batches.samples import Samples
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.models.adapters.lora import add_lora
from ingot.models.adapters.peft import save_adapter
from ingot.models.device import fast_compute

CHATML = ("<|im_start|>", "<|im_end|>")
TARGET_SHARE = 8
"""A target has at most a so-manieth of the tokens of its source."""


def task_of(root: Path, case: Case, sizes: Sizes, steps: int, rounds: int) -> dict[str, Any]:
    """Prepare the same weights and rows for all: a Hugging Face folder, prepared columns for us,
    and their rows in our order for the others.
    """
    optimizer, most = AdamW(lr=case.lr), steps * (rounds + 1)
    write_tokenizer(root / "tokenizer", sizes.corpus_mb / 2, sizes.vocab_size, CHATML)
    flops = _write_model(root / "model", case, sizes)
    adapter = None if case.adapter is None else _write_adapter(root, case, sizes)
    knobs = _knobs(root, case, sizes, optimizer, most)
    if adapter is not None:
        knobs.append(f"model.lora.adapter={json.dumps(adapter)}")
    recipe = load_recipe((), knobs, environ={}, dotenv=None)
    _write_documents(root, case, sizes, most * sizes.batch)
    ingest(recipe)
    prepare(recipe)
    tokens = _write_rows(root, recipe, case, sizes, most)
    return {
        "knobs": knobs,
        "model": str(root / "model"),
        "adapter": adapter,
        "tokenizer": str(root / "tokenizer"),
        "rows": str(root / ("rows.npy" if case.rows is None else "rows.jsonl")),
        "seq_len": sizes.seq_len,
        "batch": sizes.batch,
        "steps": steps,
        "most": most + 1,
        "device": "cpu",
        "compute": recipe.precision.compute,
        "clip": recipe.train.clip_norm,
        "flops_per_token": flops,
        "tokens_per_step": tokens / most,
        **optimizer.model_dump(exclude={"kind"}),
    }


def _write_model(folder: Path, case: Case, sizes: Sizes) -> float | None:
    """A Hugging Face folder of random weights; answers its FLOP per trained token where all of its
    weights are trained on all tokens, else None.
    """
    if case.seq2seq:
        from transformers import AutoConfig, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = t5_config(sizes)
        T5ForConditionalGeneration(AutoConfig.for_model(**config)).save_pretrained(folder)
        return None
    folder.mkdir()
    given = preset(sizes.preset)
    (folder / "config.json").write_text(json.dumps(given), encoding="utf-8")
    save_file(
        dict(random_model(sizes.preset).state_dict()),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    plain = case.rows is None and case.adapter is None
    return flops_per_token(given, sizes.seq_len, None) if plain else None


def _write_adapter(root: Path, case: Case, sizes: Sizes) -> str:
    model = random_model(sizes.preset)
    add_lora(model, Lora.model_validate(case.knobs["model.lora"]), seed=0)
    save_adapter(model, root / "adapter", base=str(root / "model"), kind="decoder")
    return str(root / "adapter")


def _knobs(root: Path, case: Case, sizes: Sizes, optimizer: AdamW, most: int) -> list[str]:
    given: dict[str, Any] = {
        "name": "peers",
        "output": str(root / "runs"),
        "model.source": str(root / "model"),
        "seed": 0,
        "tokenizer.source": str(root / "tokenizer"),
        "data.train": [{"source": str(root / "corpus.jsonl")}],
        "data.validation": [{"source": str(root / "held-out.jsonl")}],
        "data.seq_len": sizes.seq_len,
        "precision.compute": fast_compute("auto", torch.device("cpu")),
        "train.steps": most + 1,
        "train.global_batch": sizes.batch,
        "train.optimizer.lr": optimizer.lr,
        "train.schedule.kind": "constant",
        "train.schedule.warmup": 0,
        "track.every": 1,
        "track.tensorboard": False,
        "checkpoint.every": most + 2,
        **({"data.target_len": sizes.seq_len // TARGET_SHARE} if case.seq2seq else {}),
        **case.knobs,
    }
    return [f"{name}={json.dumps(value)}" for name, value in given.items()]


def _write_documents(root: Path, case: Case, sizes: Sizes, rows: int) -> None:
    """The corpus; and one document held out, which nobody asks for."""
    if case.documents is None:
        _write_long_texts(root / "corpus.jsonl", sizes.corpus_mb)
        held_out: dict[str, Any] = {"text": "nobody asks for it " * sizes.seq_len}
    else:
        made = case.documents(rows + sizes.batch, sizes.seq_len)
        held_out = next(made)
        with (root / "corpus.jsonl").open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(document) + "\n" for document in made)
    (root / "held-out.jsonl").write_text(json.dumps(held_out) + "\n", encoding="utf-8")


def _write_long_texts(path: Path, megabytes: float) -> None:
    """A few long documents."""
    source, size = texts(), int(megabytes * 1e6 / 4)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(4):
            parts: list[str] = []
            while sum(map(len, parts)) < size:
                parts.append(next(source))
            stream.write(json.dumps({"text": "\n".join(parts)}) + "\n")


def _write_rows(root: Path, recipe: Recipe, case: Case, sizes: Sizes, most: int) -> int:
    """What the peers read: the rows of all steps; answers how many tokens they have."""
    opened = open_rows(
        recipe.folder.columns,
        "train",
        sizes.seq_len,
        pad_last=False,
        pack=recipe.row_plan,
        target_len=recipe.data.target_len,
    )
    if case.rows is not None:
        return write_rows(root / "rows.jsonl", _steps(opened, recipe, sizes, most), case.rows)
    assert isinstance(opened, Rows)
    order = SampleOrder(opened.sizes, recipe.seed, opened.weights).rows(0, most * sizes.batch)
    rows = opened.batch(order.tolist()).tokens.astype(np.int32)
    np.save(root / "rows.npy", rows)
    return rows.size


def _steps(opened: Rows | Samples, recipe: Recipe, sizes: Sizes, most: int) -> Iterator[Batch]:
    order = SampleOrder(opened.sizes, recipe.seed, opened.weights)
    loader = Loader(opened, order, BatchPlan(sizes.batch, sizes.batch, 1), 0)
    try:
        for step in range(most):
            yield from loader.step(step)
    finally:
        loader.close()
