"""Copies of weights in another type: which ones a step keeps, and that a plan sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.config.load import load_recipe
from ingot.plan.tracing import trace

RECIPE = """
name: traced
model: {source: "preset:llama-3m"}
tokenizer: {source: train, vocab_size: 512}
data: {train: [{source: "builtin:stdlib"}], seq_len: 16, target_len: 8, pack: none}
train: {steps: 2, global_batch: 4, micro_batch: 2}
precision: {compute: bf16}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE, encoding="utf-8")
    return lambda *knobs: load_recipe([file], list(knobs))


@pytest.mark.drawn("a plan at length", keep=2)
def test_what_is_gathered_of_an_encoder_and_decoder_is_let_go_in_forward(recipe: Any) -> None:
    """Weights in float32 are gathered and cast layer by layer: no copy of all of them is kept."""
    t5 = ["objective.kind=seq2seq", "model.source=preset:t5-mini"]
    layers = ["model.config.num_layers=4", "model.config.num_decoder_layers=4"]
    sharded = ["parallel.shard=2", "memory.recompute.kind=full"]
    found = trace.trace_rank(recipe(*t5, *layers, *sharded), 2, kind="cuda")
    whole_in_bf16 = found.between.bytes["weights"]  # half of them on each rank, in float32
    assert found.windows[0].bytes["temporary"] < whole_in_bf16


@pytest.mark.drawn
@pytest.mark.parametrize("double", ["true", "false"])
def test_a_base_in_four_bits_is_traced(recipe: Any, double: str) -> None:
    adapter = ["model.lora.rank=4", "model.config.num_hidden_layers=2"]
    packed = ["model.quantize.kind=nf4", f"model.quantize.double={double}"]
    plain = trace.trace_rank(recipe(*adapter), 1, kind="cuda")
    found = trace.trace_rank(recipe(*adapter, *packed), 1, kind="cuda")
    assert found.between.bytes["weights"] < plain.between.bytes["weights"]
