"""A tiny model folder, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ingot.checkpoints.export import export_model
from ingot.config.models.presets import preset
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import init_weights
from ingot.tokenizers.bpe import train_bpe
from tests.small import TINY_MODEL


def write_model(folder: Path, special: Sequence[str] = (), seed: int = 1) -> Path:
    """A random model with weights large enough that its answers differ from prompt to prompt, and
    a tokenizer with these special tokens.
    """
    torch.set_num_threads(1)
    texts = ["the bright copper melts and the mould cools slowly " * 3] * 20
    tokenizer = train_bpe(texts, 300, special)
    values = {
        **preset("llama-3m"),
        **TINY_MODEL,
        "head_dim": 8,
        "vocab_size": tokenizer.vocab_size,
        "initializer_range": 0.3,
    }
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(values))
    model.to_empty(device="cpu")
    init_weights(model, seed)
    export_model(model, tokenizer, folder, export_type="fp32", lineage={"run": "tiny"})
    return folder
