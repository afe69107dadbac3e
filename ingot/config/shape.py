"""Arithmetic over knobs: does a layout fit, how large is a model, how much work is a token. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.work import Parallel, Train


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is dealt: every rank computes `micro_steps` micro-batches of at most `micro_batch` rows."""

    global_batch: int
    micro_batch: int
    world: int

    @property
    def per_rank(self) -> int:
        return self.global_batch // self.world

    @property
    def micro_steps(self) -> int:
        return math.ceil(self.per_rank / self.micro_batch)


def batch_plan(train: Train, parallel: Parallel, world: int) -> BatchPlan:
    """Raises WrongInput, with the numbers, when the batch or the mesh does not divide."""
    if parallel.replicate not in ("auto", world):
        raise WrongInput(
            f"parallel.replicate {parallel.replicate} needs {parallel.replicate} processes, {world} are running; "
            f"set it to {world} or auto, or start {parallel.replicate} processes"
        )
    if train.global_batch % world:
        # The nearest divisor; 1 always is one.
        near = next(n for distance in range(1, world) for n in (world - distance, world + distance) if train.global_batch % n == 0)
        raise WrongInput(f"train.global_batch {train.global_batch} does not divide over {world} processes; {near} would fit")
    return BatchPlan(train.global_batch, min(train.micro_batch, train.global_batch // world), world)


def total_steps(train: Train, rows: int, seq_len: int) -> int:
    """Optimizer steps that `steps`, `epochs` or `tokens` mean for `rows` training rows of `seq_len` tokens."""
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(train.tokens / (train.global_batch * seq_len))
    return max(1, math.floor((train.epochs or 1.0) * rows / train.global_batch))


def parameter_count(config: Mapping[str, Any]) -> int:
    """Weights of a Llama-like decoder with this Hugging Face configuration."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(embeddings + layers * (_matrices(config) + _biases(config) + 2 * hidden) + hidden)


def flops_per_token(config: Mapping[str, Any], seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token.

    6 per matrix weight (the head included, the embedding lookup not), and 6 * seq_len * heads * head size per layer for
    causal attention, which is half of the full square (the formula of PaLM, appendix B, with the causal half left out).
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, head_size = config["num_attention_heads"], _head_size(config)
    matrices = layers * _matrices(config) + config["vocab_size"] * hidden
    return float(6.0 * matrices + 6.0 * layers * seq_len * heads * head_size)


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Query heads, key/value heads."""
    heads = int(config["num_attention_heads"])
    return heads, int(config.get("num_key_value_heads") or heads)


def _matrices(config: Mapping[str, Any]) -> int:
    """Weights of the seven matrices of one layer."""
    hidden, head_size = config["hidden_size"], _head_size(config)
    heads, kv_heads = _heads(config)
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    return int(attention + 3 * hidden * config["intermediate_size"])


def _biases(config: Mapping[str, Any]) -> int:
    """Biases of one layer, where the configuration has them."""
    heads, kv_heads = _heads(config)
    attention = (heads + 2 * kv_heads) * _head_size(config) + config["hidden_size"]
    feed_forward = 2 * config["intermediate_size"] + config["hidden_size"]
    return int(bool(config.get("attention_bias")) * attention + bool(config.get("mlp_bias")) * feed_forward)
