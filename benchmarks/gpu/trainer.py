"""transformers' Trainer on the same model and shape: one turn to warm up, one that counts."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.record import Asked, Record, Refused
from benchmarks.gpu.steps import SEQ_LEN, TINY_SEQ_LEN, flops_of, model_values, threads
from benchmarks.peer_cases import Contender
from benchmarks.peers import Player
from ingot.config.sections.training import AdamW


def run(asked: Asked, record: Record, *, preset: str, micro_batch: int, compiled: bool) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise Refused("transformers' Trainer needs accelerate, which is not installed")
    values = model_values(preset, None, tiny=asked.tiny)
    length = TINY_SEQ_LEN if asked.tiny else SEQ_LEN
    micro_batch = min(micro_batch, 2) if asked.tiny else micro_batch
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = folder / "model", folder / "rows.npy"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
        shape = (2 * (asked.steps + 1) * micro_batch, length)
        tokens = np.random.default_rng(0).integers(0, values["vocab_size"], shape, dtype=np.int32)
        np.save(rows, tokens)
        task = {
            "model": str(model),
            "rows": str(rows),
            "seq_len": length,
            "batch": micro_batch,
            "steps": asked.steps,
            "most": 2 * asked.steps + 1,
            "device": asked.device.type,
            "clip": 1.0,
            "compute": "bf16",
            "backend": "aot_eager" if compiled and asked.tiny and not asked.cuda else None,
            **AdamW().model_dump(exclude={"kind"}),
        }
        contender = Contender("Trainer", "trainer", None, compiled=compiled)
        player = Player(contender, sys.executable, task, folder / "run", threads())
        try:
            player.turn()
            answer = player.turn()
        except SystemExit as error:
            told = str(error).strip().rpartition("\n")[2]
            if "out of memory" in str(error) or "OutOfMemoryError" in str(error):
                raise torch.OutOfMemoryError(told) from None
            raise RuntimeError(told) from None
        finally:
            player.close()
    tokens_of_a_step = micro_batch * length
    record.figures(
        tokens_per_s=asked.steps * tokens_of_a_step / answer["seconds"],
        step_s=answer["seconds"] / asked.steps,
        flops_per_token=flops_of(tiny=asked.tiny, preset=preset),
        allocated_bytes=answer["device_bytes"] or answer["memory_bytes"],
    )
