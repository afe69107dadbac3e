"""Arithmetic on knobs: whether a layout fits, the size of a model, the work per token. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.family import DecoderSizes, sizes
from ingot.config.sections.layout import MemorySettings, Parallel
from ingot.config.sections.training import Train

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the device mesh, outermost to innermost: ranks adjacent in `tensor` have adjacent
numbers.
"""

FLOAT8_MULTIPLE = 16
"""Kernels require matrix sides that are multiples of this."""
KNOWN_LAYERS = ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "bert", "roberta", "xlm-roberta")
"""transformers' model types whose layers are plain attention and two feed-forward matrices, with no
sharing.
"""


@dataclass(frozen=True)
class Degrees:
    """The degree of each axis of the mesh."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.context * self.tensor

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, or groups of ranks, each with its own share of the
        batch.
        """
        return self.replicate * self.shard

    def told(self) -> str:
        """`shard 2 x tensor 2`; empty for one process."""
        return " x ".join(f"{axis} {degree}" for axis, degree in asdict(self).items() if degree > 1)


def degrees_of(parallel: Parallel, world: int) -> Degrees:
    """The degrees of a mesh of `world` processes, with `auto` resolved. Raises WrongInput with what
    would fit.
    """
    given = {axis: value for axis in AXES if (value := getattr(parallel, axis)) != "auto"}
    if "shard" not in given:
        given.setdefault("replicate", 1)
    product = math.prod(given.values())
    asked = (
        " x ".join(f"parallel.{axis} {value}" for axis, value in given.items() if value > 1)
        or "parallel.replicate 1"
    )
    free = next((axis for axis in ("replicate", "shard") if axis not in given), None)
    if free is None and product != world:
        raise WrongInput(
            f"{asked} needs {product} processes, {world} {_are(world)} running; start {product}, or"
            " set parallel.replicate to auto"
        )
    if world % product:
        more = -(-world // product) * product
        raise WrongInput(
            f"{asked} takes {product} processes a copy, which does not divide {world}; start {more}"
            " processes, or lower a degree"
        )
    return Degrees(**given, **({free: world // product} if free else {}))


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is divided: every rank computes `micro_steps` micro-batches of at most
    `micro_batch` rows.
    """

    global_batch: int
    micro_batch: int
    world: int
    """Number of data-parallel ranks, or groups of ranks, each with its own share of the batch."""

    @property
    def per_rank(self) -> int:
        return self.global_batch // self.world

    @property
    def micro_steps(self) -> int:
        return math.ceil(self.per_rank / self.micro_batch)


def batch_plan(train: Train, parallel: Parallel, world: int, found: int = 1) -> BatchPlan:
    """Divide the batch over `world` processes. Raises WrongInput, with the numbers, if it does not
    divide.

    `found`: the value of `train.micro_batch: auto` once it is known.
    """
    degrees = degrees_of(parallel, world)
    data = degrees.data
    if train.global_batch % data:
        # The nearest divisor; 1 always divides.
        near = next(
            n
            for distance in range(1, data)
            for n in (data - distance, data + distance)
            if train.global_batch % n == 0
        )
        over = "processes" if data == world else f"{data} shares of the batch ({degrees.told()})"
        what = f"{world} {over}" if data == world else over
        raise WrongInput(
            f"train.global_batch {train.global_batch} does not divide over {what}; {near} would fit"
        )
    per_rank = train.global_batch // data
    micro_batch = min(found if train.micro_batch == "auto" else train.micro_batch, per_rank)
    plan = BatchPlan(train.global_batch, micro_batch, data)
    if degrees.pipeline > 1:
        _check_stages(plan, degrees.pipeline, parallel.virtual)
    return plan


def _check_stages(plan: BatchPlan, pipeline: int, virtual: int) -> None:
    """Check that a pipeline gets micro-batches of one size and, with several stages per rank, a
    number of them that its ranks divide.
    """
    if plan.per_rank % plan.micro_batch:
        near = max(n for n in range(1, plan.micro_batch + 1) if plan.per_rank % n == 0)
        raise WrongInput(
            f"train.micro_batch {plan.micro_batch} does not divide the {plan.per_rank} rows of a"
            f" rank, which a pipeline needs; {near} would fit"
        )
    if virtual > 1 and plan.micro_steps % pipeline:
        raise WrongInput(
            f"parallel.virtual {virtual} wants a multiple of parallel.pipeline {pipeline}"
            f" micro-batches a step, there are {plan.micro_steps} ({plan.per_rank} rows of a rank /"
            f" train.micro_batch {plan.micro_batch}); change train.global_batch or"
            " train.micro_batch"
        )


def check_layout(parallel: Parallel, world: int, config: Mapping[str, Any], seq_len: int) -> None:
    """Check that `world` processes can train a decoder of this configuration on rows of `seq_len`
    tokens with the given layout.

    Raises:
        WrongInput: they cannot; says what would fit.
    """
    shard = degrees_of(parallel, world).shard
    read = sizes(config)
    wanted = [
        ("tensor", parallel.tensor, count, what)
        for count, what in (
            (read.heads, "heads"),
            (read.kv_heads, "key/value heads"),
            (read.feed_forward, "columns of the feed-forward"),
        )
    ]
    heads = [
        (read.heads // parallel.tensor, "heads of a rank"),
        (read.kv_heads // parallel.tensor, "key/value heads of a rank"),
    ]
    if parallel.context_by == "ulysses":
        wanted += [("context", parallel.context, count, what) for count, what in heads]
    for axis, degree, count, what in wanted:
        if count % degree:
            fits = [n for n in range(1, count + 1) if count % n == 0]
            raise WrongInput(
                f"parallel.{axis} {degree} does not divide the model's {count} {what};"
                f" {_some(fits)} would"
            )
    if parallel.context > 1 and seq_len % (2 * parallel.context):
        raise WrongInput(
            f"parallel.context {parallel.context} cuts a row in {2 * parallel.context} pieces, and"
            f" data.seq_len {seq_len} is no multiple of that;"
            f" {seq_len // (2 * parallel.context) * 2 * parallel.context or 2 * parallel.context}"
            " would be"
        )
    pieces = parallel.context * parallel.tensor
    if parallel.tensor > 1 and parallel.sequence and seq_len % pieces:
        raise WrongInput(
            f"parallel.sequence cuts a row in {pieces} pieces, and data.seq_len {seq_len} is no"
            f" multiple of that; {seq_len // pieces * pieces or pieces} would be, or set"
            " parallel.sequence to false"
        )
    stages = parallel.pipeline * parallel.virtual
    if stages > read.layers:
        raise WrongInput(
            f"parallel.pipeline {parallel.pipeline} x parallel.virtual {parallel.virtual} makes"
            f" {stages} stages, the model has only {read.layers} layers; lower one of the two"
        )
    if (
        shard > 1
        and parallel.tensor > 1
        and read.vocab % (parallel.tensor * shard)
        and read.hidden % shard
    ):
        raise WrongInput(
            f"parallel.shard {shard} divides neither the vocabulary of {read.vocab} (with"
            f" parallel.tensor {parallel.tensor}) nor the width of {read.hidden};"
            f" {_some([n for n in range(1, read.hidden + 1) if read.hidden % n == 0])} would"
        )


def check_pipeline(
    parallel: Parallel, memory: MemorySettings, *, compiled: bool, dropout: float
) -> None:
    """Check what no pipeline supports, whatever the model. `dropout` is the adapter's. Raises
    WrongInput.
    """
    if parallel.pipeline == 1:
        return
    if parallel.schedule == "zero_bubble":
        if compiled:
            raise WrongInput(
                "parallel.schedule zero_bubble takes the backward pass apart, which train.compile"
                " cannot; set it to interleaved, or train.compile to false"
            )
        if memory.recompute.kind == "selective":
            raise WrongInput(
                "parallel.schedule zero_bubble goes backward twice, which memory.recompute.kind"
                " selective does not keep enough for; set it to full or none, or schedule to"
                " interleaved"
            )
        if parallel.reshard and parallel.shard != 1:
            raise WrongInput(
                "parallel.schedule zero_bubble needs the gathered weights of parallel.shard"
                f" {parallel.shard} until the end of backward; set parallel.reshard to false, or"
                " schedule to interleaved"
            )
    if dropout and memory.recompute.kind != "none":
        raise WrongInput(
            f"model.lora.dropout {dropout} with parallel.pipeline and memory.recompute.kind"
            f" {memory.recompute.kind} would be drawn for another micro-batch when it is computed"
            " again; set the dropout to 0, or recompute to none"
        )


def check_float8_fits(kind: str, lengths: Mapping[str, int], adapted: bool) -> None:
    """Check what float8 supports on no machine. `lengths`: tokens of a micro-batch on one rank, by
    the knob that sets them. Raises WrongInput.
    """
    if adapted:
        raise WrongInput(
            f"precision.float8 {kind} trains the matrices that model.lora leaves as they are; set"
            " one of the two to none"
        )
    for knob, tokens in lengths.items():
        if tokens % FLOAT8_MULTIPLE:
            raise WrongInput(
                f"precision.float8 {kind} wants micro-batches of a multiple of {FLOAT8_MULTIPLE}"
                f" tokens on each rank, {knob} makes {tokens:,}; change it or train.micro_batch"
            )


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")


def total_steps(train: Train, rows: int, seq_len: int) -> int:
    """The number of optimizer steps given by `steps`, `epochs` or `tokens` for `rows` training rows
    of `seq_len` tokens.
    """
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(train.tokens / (train.global_batch * seq_len))
    return max(1, math.floor((train.epochs or 1.0) * rows / train.global_batch))


def parameter_count(config: Mapping[str, Any]) -> int:
    """Number of weights of a native decoder with this Hugging Face configuration."""
    read = sizes(config)
    embeddings = read.vocab * read.hidden * (1 if read.tied else 2)
    queries, keys = read.heads * read.head_dim, read.kv_heads * read.head_dim
    biases = (
        read.qkv_bias * (queries + 2 * keys)
        + read.output_bias * read.hidden
        + read.mlp_bias * (2 * read.feed_forward + read.hidden)
    )
    norms = 2 * read.hidden + read.qk_norm * 2 * read.head_dim
    return embeddings + read.layers * (_matrices(read) + biases + norms) + read.hidden


def lora_parameters(config: Mapping[str, Any], rank: int) -> int:
    """Number of weights of a rank-`rank` adapter on every linear layer of such a decoder."""
    read = sizes(config)
    queries, keys = read.heads * read.head_dim, read.kv_heads * read.head_dim
    sides = 4 * read.hidden + 2 * queries + 2 * keys + 3 * (read.hidden + read.feed_forward)
    return rank * read.layers * sides


def least_parameters(config: Mapping[str, Any]) -> int:
    """A lower bound on the weights of a transformers model with encoder layers: its embeddings, and
    its layers' matrices if their number is known for its type.
    """

    def first(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    hidden = first("embedding_size", "d_model", "hidden_size")
    embeddings = first("vocab_size") * hidden
    if config.get("model_type") not in KNOWN_LAYERS:
        return embeddings
    encoder = first("num_layers", "encoder_layers", "num_hidden_layers")
    decoder = first("num_decoder_layers", "decoder_layers") if "d_model" in config else 0
    wide = first("d_ff", "encoder_ffn_dim", "intermediate_size")
    heads = first("num_heads") * first("d_kv") or hidden
    attention, forward = 4 * hidden * heads, 2 * hidden * wide
    return embeddings + encoder * (attention + forward) + decoder * (2 * attention + forward)


def flops_per_token(config: Mapping[str, Any], seq_len: int) -> float:
    """Floating-point operations of forward and backward for one token.

    6 per matrix weight (including the head, excluding the embedding lookup), plus 12 * heads * head
    size per layer and token attended to: seq_len / 2 on average, since causal attention is half of
    the full square (the formula of PaLM, appendix B, for the causal half only), and fewer in a
    layer with a sliding window.
    """
    read = sizes(config)
    matrices = read.layers * _matrices(read) + read.vocab * read.hidden
    return 6.0 * matrices + 12.0 * read.heads * read.head_dim * sum(
        _seen(seq_len, window) for window in read.windows
    )


def _seen(seq_len: int, window: int | None) -> float:
    """The average number of tokens that a token attends to, itself counted as half: growing up to
    `window` tokens, then `window` each.
    """
    reach = min(seq_len, window or seq_len)
    return reach * (2 * seq_len - reach + 1) / (2 * seq_len) - 0.5


def _matrices(read: DecoderSizes) -> int:
    """Number of weights in the seven matrices of one layer."""
    return (
        read.hidden * read.head_dim * 2 * (read.heads + read.kv_heads)
        + 3 * read.hidden * read.feed_forward
    )
