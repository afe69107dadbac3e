"""What is served from the device in bf16 against the trainer: `ingot verify export` of runs that
were trained there, and greedy texts of a batch against each request alone.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.record import Asked, Record
from benchmarks.gpu.resume import prepared
from ingot.config.recipe import Recipe
from ingot.models.device import graph_recorder
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request
from ingot.models.hf.folder import load_model
from ingot.train.trainer import train
from ingot.verify.export.proof import verify_export
from tests.models.tiny import make_member

NEW_TOKENS = 24
PROMPTS = ([5, 9, 2], [7] * 11, [3, 1, 4, 1, 5, 9, 2, 6], [8, 8])


def run(asked: Asked, record: Record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with record.trying("full"):
            full = prepared(Path(folder), asked)
            proved("full", full, record)
        with record.trying("LoRA"):
            # An adapter of the model that was just trained.
            base = str(full.folder.model)
            of = {"name": "adapted", "model.source": base, "tokenizer.source": base}
            lora = {**of, "model.config": {}, "model.lora": {"rank": 4}}
            proved("LoRA", prepared(Path(folder), asked, **lora), record)
    for case in ("llama3.2", "qwen3-window"):
        with record.trying(f"generation, {case}"):
            together(case, asked, record)


def proved(name: str, recipe: Recipe, record: Record) -> None:
    """Train and export it, and hold what is served against the trainer."""
    train(recipe.at("train"))
    for check in verify_export(recipe).checks:
        what = f"{name}: {check.what}"
        if check.passed is None:
            record.not_run(what, check.detail)
        else:
            record.holds(what, check.passed, check.detail)


def together(case: str, asked: Asked, record: Record) -> None:
    """In float32: in bf16 a batch of another size rounds otherwise, and texts part at ties."""
    with tempfile.TemporaryDirectory() as folder:
        made = make_member(Path(folder) / case, case)
        batch = texts(made, asked.device, len(PROMPTS))
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            recorded = texts(made, asked.device, len(PROMPTS), recorded=True)
        told = said.getvalue().strip() or "every step"
        record.holds(f"generation, {case}: steps are recorded", told == "every step", told)
        record.holds(f"generation, {case}: recorded as not", recorded == batch)
        for what, other in {
            "as alone": texts(made, asked.device, 1),
            "as on the CPU": texts(made, torch.device("cpu"), len(PROMPTS)),
        }.items():
            equal = sum(one == another for one, another in zip(batch, other, strict=True))
            told = f"{equal} of {len(PROMPTS)} texts"
            record.holds(f"generation, {case}: together {what}", equal == len(PROMPTS), told)


def texts(
    folder: Path, device: torch.device, together: int, *, recorded: bool = False
) -> list[list[int]]:
    """Greedy tokens after each prompt, so many requests at a time."""
    model = load_model(folder, device=device)
    requests = [Request(prompt, NEW_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    record = graph_recorder(device) if recorded else None
    answers = Generator(model, max_rows=together, record=record).run(requests)
    return [[token.id for token in answer.tokens] for answer in answers]
