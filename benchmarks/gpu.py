"""One GPU near its limit: training in full, with LoRA and in float8, beside transformers' Trainer.
`python -m benchmarks.gpu`: one command, one table.

Every row has a process of its own; memory that runs out is a row. On the same made-up rows of one
document each, in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.comparison import machine
from benchmarks.peers import RESULTS, Contender, Player
from ingot.config.models.presets import preset
from ingot.config.sections.training import AdamW
from ingot.config.shape import flops_per_token
from ingot.verify.bench import BenchCase, run_case

FORMULA = (
    "share of peak = tokens/s x flops per token / peak; flops per token = 6 (with LoRA 4, as kept"
    " weights have no gradients) x weights of matrices (head included, embedding not) + 12 x layers"
    " x heads x head size x seq_len / 2; peak = the best large bf16 matrix product of the same"
    " process, of float8 too"
)
OUT_OF_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "not enough memory")


@dataclass(frozen=True)
class Row:
    """What is trained: a preset, with other numbers of its configuration where `config` has
    some.
    """

    name: str
    preset: str
    micro_batch: int
    seq_len: int = 4096
    config: tuple[tuple[str, int], ...] = ()
    lora: bool = False
    float8: str = "none"
    trainer: bool = False
    """By transformers' Trainer, not by us."""

    @property
    def values(self) -> dict[str, Any]:
        return {**preset(self.preset), **dict(self.config)}

    @property
    def flops(self) -> float:
        """Of a token, forward and backward."""
        whole = flops_per_token(self.values, self.seq_len)
        return whole - flops_per_token(self.values, 1) / 3 if self.lora else whole


def rows_of(one_gpu: bool = True) -> list[Row]:
    """What is asked of a GPU; else the same in miniature, which shows that everything runs and
    measures nothing.
    """
    sizes = (8, 4, 2, 1) if one_gpu else (2,)
    layers = (24, 16, 8) if one_gpu else (2, 1)
    small, large, length = (
        ("llama-1b", "llama-8b", 4096) if one_gpu else ("llama-3m", "llama-3m", 32)
    )
    full = [Row(f"{small}, full, {n} rows", small, n, length) for n in sizes]
    theirs = [
        replace(
            row,
            name=f"{small}, full, {row.micro_batch} rows, transformers Trainer{how}",
            trainer=True,
        )
        for row in full
        for how in ("", " compiled")
    ]
    adapted = [
        Row(f"{large}, LoRA, {n} rows", large, n, length, lora=True) for n in sizes[1:] or sizes
    ]
    formats = [
        Row(
            f"{large} with {count} layers, {told}",
            large,
            sizes[-1],
            length,
            (("num_hidden_layers", count),),
            float8=form,
        )
        for count in layers
        for form, told in (
            ("none", "bf16"),
            ("tensorwise", "float8 tensorwise"),
            ("rowwise", "float8 rowwise"),
        )
    ]
    return [*full, *theirs, *adapted, *formats]


def measure(rows: Sequence[Row], steps: int, device: str) -> list[dict[str, Any]]:
    """Each row after the other; of the numbers of layers, the most that fit stand for the smaller
    ones, which are not tried.
    """
    found: list[dict[str, Any]] = []
    fits = 0
    for row in rows:
        layers = dict(row.config).get("num_hidden_layers", 0)
        if layers and layers < fits:
            continue
        with tempfile.TemporaryDirectory() as folder:
            answer = (
                theirs(row, steps, device, Path(folder))
                if row.trainer
                else ours(row, steps, Path(folder))
            )
        if layers and row.float8 == "none" and answer["status"] == "measured":
            fits = layers
        found.append({"name": row.name, **answer})
    peak = max((row["peak_flops"] for row in found if row.get("peak_flops")), default=None)
    for row, asked in zip(
        found, [row for row in rows if row.name in {one["name"] for one in found}], strict=True
    ):
        if row["status"] == "measured" and peak:
            row["flops_per_token"], row["share_of_peak"] = (
                asked.flops,
                row["tokens_per_s"] * asked.flops / peak,
            )
    return found


def ours(row: Row, steps: int, folder: Path) -> dict[str, Any]:
    """A row of `ingot bench`."""
    given = {
        "name": "gpu",
        "output": str(folder),
        "model.source": f"preset:{row.preset}",
        "model.config": dict(row.config),
        "tokenizer.source": "train",
        "tokenizer.vocab_size": row.values["vocab_size"],
        "data.train": [{"source": "made-up.jsonl"}],
        "data.seq_len": row.seq_len,
        "data.pack": "none",
        "train.steps": 1000,
        "train.global_batch": row.micro_batch,
        "train.compile": True,
        "precision.compute": "bf16",
        "precision.float8": row.float8,
        **({"model.lora": {}} if row.lora else {}),
    }
    knobs = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    case = BenchCase(1, row.micro_batch, "recipe")

    def start(case: BenchCase, into: Path) -> tuple[list[str], dict[str, str]]:
        options = ["--synthetic", "--steps", str(steps), "--into", str(into)]
        return [sys.executable, "-m", "ingot", "bench", *knobs, *case.overrides, *options], dict(
            os.environ
        )

    return run_case(case, start)


def theirs(row: Row, steps: int, device: str, folder: Path) -> dict[str, Any]:
    """transformers' Trainer: one turn to warm up, one that counts."""
    model, tokens = folder / "model", folder / "rows.npy"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(row.values), encoding="utf-8")
    shape = (2 * (steps + 1) * row.micro_batch, row.seq_len)
    np.save(
        tokens,
        np.random.default_rng(0).integers(0, row.values["vocab_size"], shape, dtype=np.int32),
    )
    optimizer = AdamW()
    task = {
        "model": str(model),
        "rows": str(tokens),
        "seq_len": row.seq_len,
        "batch": row.micro_batch,
        "steps": steps,
        "most": 2 * steps + 1,
        "device": device,
        "clip": 1.0,
        **optimizer.model_dump(exclude={"kind"}),
    }
    player = Player(
        Contender(row.name, "trainer", None, compiled="compiled" in row.name),
        sys.executable,
        task,
        folder / "run",
        torch.get_num_threads(),
    )
    try:
        player.turn()
        answer = player.turn()
    except SystemExit as error:
        reason = str(error).strip().rpartition("\n")[2]
        return {
            "status": (
                "out of memory" if any(mark in str(error) for mark in OUT_OF_MEMORY) else "failed"
            ),
            "reason": reason,
        }
    finally:
        player.close()
    return {
        "status": "measured",
        "tokens_per_s": steps * row.micro_batch * row.seq_len / answer["seconds"],
        "process_memory_bytes": answer["device_bytes"] or answer["memory_bytes"],
    }


def show(found: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(
        "", "tokens/s", "share of peak", "memory, GB", "", title="one GPU", title_justify="left"
    )
    for row in found:
        if row["status"] == "measured":
            share = f"{row['share_of_peak']:.1%}" if "share_of_peak" in row else "unknown"
            table.add_row(
                row["name"],
                f"{row['tokens_per_s']:,.0f}",
                share,
                f"{row['process_memory_bytes'] / 1e9:.1f}",
                "",
            )
        else:
            table.add_row(row["name"], "", "", "", f"{row['status']}: {row.get('reason', '')}"[:80])
    console.print(table)
    console.print(FORMULA, style="dim")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--steps", type=int, default=10, help="steps of each row that count")
    parser.add_argument("--write", metavar="NAME", help="keep the figures as results/NAME.json")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu measures a CUDA GPU, and torch sees none here; run it on a machine with"
            " one, or `python -m benchmarks.peers` on this"
        )
    console = Console(highlight=False, width=150)
    about = machine(torch.get_num_threads())
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    found = measure(rows_of(), asked.steps, "cuda")
    show(found, console)
    if asked.write:
        path = RESULTS / f"{asked.write}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps({"machine": about, "formula": FORMULA, "rows": found}, indent=1) + "\n",
            encoding="utf-8",
        )
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
