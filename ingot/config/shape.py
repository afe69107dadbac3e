"""Arithmetic over knobs: does a layout fit, how large is a model, how much work is a token. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.family import Sizes, sizes
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
    """Weights of a decoder of the native family with this Hugging Face configuration."""
    read = sizes(config)
    embeddings = read.vocab * read.hidden * (1 if read.tied else 2)
    queries, keys = read.heads * read.head_dim, read.kv_heads * read.head_dim
    biases = read.qkv_bias * (queries + 2 * keys) + read.output_bias * read.hidden + read.mlp_bias * (2 * read.feed_forward + read.hidden)
    norms = 2 * read.hidden + read.qk_norm * 2 * read.head_dim
    return embeddings + read.layers * (_matrices(read) + biases + norms) + read.hidden


def flops_per_token(config: Mapping[str, Any], seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token.

    6 per matrix weight (the head included, the embedding lookup not), and 12 * heads * head size per layer for each token that
    attention sees: seq_len / 2 on average, causal attention being half of the full square (the formula of PaLM, appendix B,
    with the causal half left out), and less in a layer with a sliding window.
    """
    read = sizes(config)
    matrices = read.layers * _matrices(read) + read.vocab * read.hidden
    return 6.0 * matrices + 12.0 * read.heads * read.head_dim * sum(_seen(seq_len, window) for window in read.windows)


def _seen(seq_len: int, window: int | None) -> float:
    """How many tokens a token attends to on average, itself counted half: the first `window` ever more, the others `window` each."""
    reach = min(seq_len, window or seq_len)
    return reach * (2 * seq_len - reach + 1) / (2 * seq_len) - 0.5


def _matrices(read: Sizes) -> int:
    """Weights of the seven matrices of one layer."""
    return read.hidden * read.head_dim * 2 * (read.heads + read.kv_heads) + 3 * read.hidden * read.feed_forward
