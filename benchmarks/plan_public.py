"""Steps of other programs on GPUs, as published, within what `ingot plan` tells of the same
model and layout with its shipped coefficients.

    python -m benchmarks.plan_public [NAME ...]

A check of the method, not of the figures: the programs are others, and the coefficients are
guesses, so only that the published time lies within the range is asked for. Each row traces two and
four layers of the model, and draws the line to all of them. Sources stand beside the rows; the
shapes of MPT models, whose feed-forward network has no gate, are those of a gated one with as many
weights.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ingot.base.errors import WrongInput
from ingot.config.load import load_recipe
from ingot.plan.devices.coefficients import guessed
from ingot.plan.devices.types import device_type
from ingot.plan.seconds import StepLayout, StepSeconds, step_seconds
from ingot.plan.tracing.records import RankTrace
from ingot.plan.tracing.workers import TraceRequest, trace_all

TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (H100 of 500 W)"
FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"


class PublishedRow(NamedTuple):
    """A published figure: tokens a second and GPU."""

    name: str
    model: str
    gpus: int
    rows: int
    seq_len: int
    recompute: str
    compiled: bool
    tokens_s: float
    source: str


PUBLISHED = (
    PublishedRow("llama-8b-8", "llama-8b", 8, 2, 8192, "selective", False, 5762, TITAN),
    PublishedRow("llama-8b-8-compiled", "llama-8b", 8, 2, 8192, "selective", True, 6667, TITAN),
    PublishedRow("llama-8b-128", "llama-8b", 128, 2, 8192, "selective", False, 5605, TITAN),
    PublishedRow("llama-8b-128-compiled", "llama-8b", 128, 2, 8192, "selective", True, 6514, TITAN),
    PublishedRow("mpt-1b", "mpt-1b", 8, 14, 2048, "none", False, 45_455, FOUNDRY),
    PublishedRow("mpt-7b", "mpt-7b", 8, 6, 2048, "none", False, 10_643, FOUNDRY),
    PublishedRow("mpt-13b", "mpt-13b", 64, 2, 2048, "none", False, 4800, FOUNDRY),
    PublishedRow("mpt-30b", "mpt-30b", 8, 3, 2048, "full", False, 2002, FOUNDRY),
    PublishedRow("mpt-70b", "mpt-70b", 64, 8, 2048, "full", False, 1039, FOUNDRY),
)
MPT = {
    "mpt-1b": (2048, 24, 16),
    "mpt-7b": (4096, 32, 32),
    "mpt-13b": (5120, 40, 40),
    "mpt-30b": (7168, 48, 56),
    "mpt-70b": (8192, 80, 64),
}
"""Width, layers and heads; the last one's are not published."""
LAYERS = {"llama-8b": 32, **{name: layers for name, (_, layers, _) in MPT.items()}}
FEW, MORE = 2, 4


def config_of(model: str, layers: int) -> dict[str, Any]:
    if model not in MPT:
        return {"num_hidden_layers": layers}
    width, _, heads = MPT[model]
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": width * 8 // 3 // 64 * 64,
        "vocab_size": 50_368,
        "tie_word_embeddings": True,
    }


def request_of(row: PublishedRow, layers: int, folder: Path) -> TraceRequest:
    config = config_of(row.model, layers)
    preset = row.model if row.model in LAYERS and row.model not in MPT else "llama-8b"
    knobs = [
        "name=public",
        "data.train=[{source: 'builtin:stdlib'}]",
        f"data.seq_len={row.seq_len}",
        "data.pack=none",
        f"model.source=preset:{preset}",
        *(f"model.config.{name}={value}" for name, value in config.items()),
        "tokenizer.source=train",
        f"tokenizer.vocab_size={config.get('vocab_size', 128_256)}",
        f"train.micro_batch={row.rows}",
        f"train.global_batch={row.rows * row.gpus}",
        "train.steps=2",
        "precision.compute=bf16",
        f"parallel.shard={row.gpus}",
        f"memory.recompute.kind={row.recompute}",
    ]
    file = folder / "recipe.yaml"
    file.write_text("{}\n", encoding="utf-8")
    return TraceRequest(load_recipe([file], knobs), row.gpus, kind="cuda")


def planned(row: PublishedRow) -> StepSeconds:
    with tempfile.TemporaryDirectory() as name:
        requests = [request_of(row, layers, Path(name)) for layers in (FEW, MORE)]
    traces: list[RankTrace] = []
    for trace in trace_all(requests):
        if isinstance(trace, WrongInput):
            raise trace
        traces.append(trace)
    few, more = traces
    layout = StepLayout(8, compiled=row.compiled)
    whole = few.with_layers(LAYERS[row.model], more)
    return step_seconds([whole], guessed(device_type("h100")), layout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_public", description=__doc__)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args().names
    print(f"{'row':24}{'published':>10}  {'planned, seconds a step':30}  within  of likely")
    for row in PUBLISHED:
        if asked and row.name not in asked:
            continue
        published = row.rows * row.seq_len / row.tokens_s
        took = planned(row).total
        within = "yes" if took.low <= published <= took.high else "NO"
        print(
            f"{row.name:24}{published:10.3f}  {took.text('{:.3f}'.format):30}  {within:6}"
            f"  {took.likely / published - 1:+.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
