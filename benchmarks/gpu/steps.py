"""A training step as `ingot bench` measures it: tokens a second, share of peak, memory."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.record import Asked, Record
from ingot.base.errors import Failed
from ingot.config.load import load_recipe
from ingot.config.models.presets import preset as preset_of
from ingot.config.recipe import Recipe
from ingot.config.sections.lora import Lora
from ingot.config.shape import flops_per_token
from ingot.parallel import float8 as float8_products
from ingot.verify.bench_row import measure_row

SEQ_LEN, TINY_SEQ_LEN = 4096, 32
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 50_304,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "sliding_window": None,
}
"""1.4 billion weights, 0.3 of them met by a token."""
TINY_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def model_values(preset: str, layers: int | None, *, tiny: bool) -> dict[str, Any]:
    """The configuration of the model; in miniature one with all of its parts."""
    if preset == "mixture":
        return {**MIXTURE, **({**TINY_SIZES, **TINY_EXPERTS} if tiny else {})}
    values = preset_of(preset)
    if layers is not None:
        values["num_hidden_layers"] = layers
    return {**values, **(TINY_SIZES if tiny else {})}


def recipe_of(folder: Path, *, tiny: bool, preset: str, micro_batch: int, **knobs: Any) -> Recipe:
    """The recipe of a row. `knobs`: `layers`, `lora`, `float8`, `compiled`, `packed`."""
    values = model_values(preset, knobs.get("layers"), tiny=tiny)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    rows = min(micro_batch, 2) if tiny else micro_batch
    given = {
        "name": "gpu",
        "output": str(folder),
        "model.source": str(model),
        "model.init": "random",
        "tokenizer.source": "train",
        "tokenizer.vocab_size": values["vocab_size"],
        "data.train": [{"source": "builtin:stdlib"}],
        "data.seq_len": TINY_SEQ_LEN if tiny else SEQ_LEN,
        "data.pack": "best_fit" if knobs.get("packed") else "none",
        "train.steps": 1000,
        "train.global_batch": rows,
        "train.micro_batch": rows,
        "train.compile": knobs.get("compiled", True),
        "precision.compute": "bf16",
        "precision.float8": knobs.get("float8", "none"),
        **({"model.lora": {}} if knobs.get("lora") else {}),
    }
    lines = [f"{name}={json.dumps(value)}" for name, value in given.items()]
    return load_recipe((), lines, environ={}, dotenv=None)


def flops_of(*, tiny: bool, preset: str, lora: bool = False, **knobs: Any) -> float:
    """Of a token, forward and backward."""
    values = model_values(preset, knobs.get("layers"), tiny=tiny)
    adapter = Lora() if lora else None
    return flops_per_token(values, TINY_SEQ_LEN if tiny else SEQ_LEN, adapter)


def run(asked: Asked, record: Record, **knobs: Any) -> None:
    with tempfile.TemporaryDirectory() as name, emulating(asked):
        folder, into = Path(name), Path(name) / "row.json"
        recipe = recipe_of(folder, tiny=asked.tiny, **knobs)
        with contextlib.suppress(Failed):  # the row tells that memory ran out
            measure_row(recipe, asked.steps, into, synthetic=True)
        found = json.loads(into.read_text(encoding="utf-8"))
    if found["status"] != "measured":
        raise torch.OutOfMemoryError(found["reason"])
    total = torch.cuda.get_device_properties(0).total_memory if asked.cuda else 0
    record.figures(
        tokens_per_s=found["tokens_per_s"],
        step_s=found["seconds_per_step"],
        flops_per_token=flops_of(tiny=asked.tiny, **knobs),
        allocated_bytes=found["process_memory_bytes"],
        reserved_bytes=torch.cuda.max_memory_reserved() if asked.cuda else None,
        device_bytes=found["gpu_memory"] * total if asked.cuda else None,
        gpu=found["gpu"],
        own_peak_flops=found["peak_flops"],
        parameters=found["parameters"],
    )


@contextlib.contextmanager
def emulating(asked: Asked) -> Iterator[None]:
    """Float8 products in the wider type where the device has none."""
    before, float8_products.EMULATED = float8_products.EMULATED, not asked.cuda
    try:
        yield
    finally:
        float8_products.EMULATED = before


def threads() -> int:
    """Of the processor, for what runs on it."""
    return int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads())
