"""Arithmetic on knobs: whether a layout fits, the size of a model, the work per token. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.degrees import degrees_of, first_few
from ingot.config.models.family import DecoderSizes, sizes
from ingot.config.sections.layout import MemorySettings, Parallel
from ingot.config.sections.loop import RouterSettings
from ingot.config.sections.lora import Lora
from ingot.config.sections.training import Train

FLOAT8_MULTIPLE = 16
"""Kernels require matrix sides that are multiples of this."""
KNOWN_LAYERS = ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "bert", "roberta", "xlm-roberta")
"""transformers' model types whose layers are plain attention and two feed-forward matrices, three
where T5's are gated, with no sharing.
"""


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
        over = "processes" if data == world else f"{data} shares of the batch ({degrees.text()})"
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
    _check_experts(parallel, None if read.experts is None else read.experts.count)
    _check_divided(parallel, read)
    _check_pieces(parallel, seq_len)
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
            f" {_divisors(read.hidden)} would"
        )


def _check_divided(parallel: Parallel, read: DecoderSizes) -> None:
    """Heads and columns that the ranks of an axis share evenly."""
    tensor = (
        (read.heads, "heads"),
        (read.kv_heads, "key/value heads"),
        (0 if all(read.sparse) else read.feed_forward, "columns of the feed-forward"),
        (0 if read.experts is None else read.experts.shared, "columns of the shared expert"),
    )
    of_a_rank = (
        (read.heads // parallel.tensor, "heads of a rank"),
        (read.kv_heads // parallel.tensor, "key/value heads of a rank"),
    )
    wanted = [("tensor", parallel.tensor, count, what) for count, what in tensor]
    if parallel.context_by == "ulysses":
        wanted += [("context", parallel.context, count, what) for count, what in of_a_rank]
    for axis, degree, count, what in wanted:
        if count % degree:
            raise WrongInput(
                f"parallel.{axis} {degree} does not divide the model's {count} {what};"
                f" {_divisors(count)} would"
            )


def _check_pieces(parallel: Parallel, seq_len: int) -> None:
    """Pieces of a row that the ranks of the context and tensor axes compute."""
    halves = 2 * parallel.context
    if parallel.context > 1 and seq_len % halves:
        raise WrongInput(
            f"parallel.context {parallel.context} cuts a row in {halves} pieces, and data.seq_len"
            f" {seq_len} is no multiple of that; {_multiple(seq_len, halves)} would be"
        )
    pieces = parallel.context * parallel.tensor
    if parallel.tensor > 1 and parallel.sequence and seq_len % pieces:
        raise WrongInput(
            f"parallel.sequence cuts a row in {pieces} pieces, and data.seq_len {seq_len} is no"
            f" multiple of that; {_multiple(seq_len, pieces)} would be, or set parallel.sequence to"
            " false"
        )


def _divisors(count: int) -> str:
    return first_few([n for n in range(1, count + 1) if count % n == 0])


def _multiple(length: int, of: int) -> int:
    """The largest multiple that is no longer, and at least one."""
    return length // of * of or of


def check_routers(settings: RouterSettings, config: Mapping[str, Any] | None) -> None:
    """Check that a decoder of this configuration (None: another kind of model) has what
    `train.experts` is about.

    Raises:
        WrongInput: no experts, or no correction bias that its files could hold.
    """
    given = [name for name, value in settings.model_dump().items() if value]
    if not given:
        return
    experts = None if config is None else sizes(config).experts
    if config is None or experts is None:
        raise WrongInput(
            f"train.experts.{given[0]} is about the experts of a mixture, and the model has none;"
            " remove it"
        )
    if settings.bias_rate and not experts.corrected:
        raise WrongInput(
            f"train.experts.bias_rate {settings.bias_rate:g} trains a bias that chooses experts,"
            f" and files of model_type `{config.get('model_type')}` cannot hold one, so that the"
            " exported model would choose others; set train.experts.aux_loss instead"
        )


def _check_experts(parallel: Parallel, count: int | None) -> None:
    """Check `parallel.expert` for a model with so many experts in a layer; None: with none."""
    if parallel.expert > 1 and count is None:
        raise WrongInput(
            f"parallel.expert {parallel.expert} shares the experts of a mixture, and the model has"
            " none; set it to 1"
        )
    if count is not None and parallel.expert % parallel.tensor:
        raise WrongInput(
            f"parallel.tensor {parallel.tensor} divides a row's tokens among ranks before their"
            f" experts, which these ranks must share: parallel.expert is {parallel.expert}; set it"
            f" to {parallel.tensor} or a multiple of that"
        )
    if count is not None and count % parallel.expert:
        raise WrongInput(
            f"parallel.expert {parallel.expert} does not divide the model's {count} experts;"
            f" {_divisors(count)} would"
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


def total_steps(
    train: Train, samples: Fraction | int, seq_len: int, left_out: Fraction | int = 0
) -> int:
    """The number of optimizer steps given by `steps`, `epochs` or `tokens`, where a pass over the
    training rows of `seq_len` tokens makes so many `samples` of `train.global_batch`; `left_out`
    of all epochs are not trained on.
    """
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(train.tokens / (train.global_batch * seq_len))
    # As it is written: in binary 1.4 is less, which is a step less at times.
    epochs = Fraction(str(train.epochs or 1.0))
    return max(1, math.floor((epochs * samples - left_out) / train.global_batch))


def parameter_count(config: Mapping[str, Any], *, active: bool = False) -> int:
    """Number of weights of a native decoder with this Hugging Face configuration; `active`: of
    those that one token meets, which of a layer's experts are only the chosen ones.
    """
    read = sizes(config)
    embeddings = read.vocab * read.hidden * (1 if read.tied else 2)
    queries, keys = read.heads * read.head_dim, read.kv_heads * read.head_dim
    biases = read.qkv_bias * (queries + 2 * keys) + read.output_bias * read.hidden
    in_mlp = read.mlp_bias * (2 * read.feed_forward + read.hidden) * read.sparse.count(False)
    vectors = biases + read.norms + read.sinks
    if read.experts is not None and read.experts.swiglu is not None:
        taken = read.experts.chosen if active else read.experts.count
        vectors += read.experts.count + taken * (2 * read.experts.width + read.hidden)
    layers = _matrices(read, active=active) + read.layers * vectors + in_mlp
    return embeddings + layers + read.hidden


def expert_parameters(config: Mapping[str, Any]) -> int:
    """Number of weights in the matrices of all experts that tokens choose from."""
    read = sizes(config)
    if read.experts is None:
        return 0
    each = 3 * read.hidden * read.experts.width
    return read.sparse.count(True) * read.experts.count * each


def lora_parameters(config: Mapping[str, Any], rank: int, *, dora: bool = False) -> int:
    """Number of weights of a rank-`rank` adapter on every linear layer of such a decoder; of a
    mixture of experts on those of attention. `dora`: with a magnitude for each output.
    """
    read = sizes(config)
    queries, keys = read.heads * read.head_dim, read.kv_heads * read.head_dim
    sides = read.layers * (4 * read.hidden + 2 * queries + 2 * keys)
    outputs = read.layers * (read.hidden + queries + 2 * keys)
    if read.experts is None:
        sides += read.layers * 3 * (read.hidden + read.feed_forward)
        outputs += read.layers * (read.hidden + 2 * read.feed_forward)
    return rank * sides + (outputs if dora else 0)


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
    gated = "gated" in str(config.get("feed_forward_proj"))
    attention, forward = 4 * hidden * heads, (3 if gated else 2) * hidden * wide
    return embeddings + encoder * (attention + forward) + decoder * (2 * attention + forward)


def flops_per_token(
    config: Mapping[str, Any], seq_len: int, lora: Lora | None, forward_only: float = 0.0
) -> float:
    """Floating-point operations of forward and backward for one token; nothing is computed twice.
    The mean, where a share `forward_only` of the tokens has no backward.

    6 per matrix weight that a token meets (including the head, excluding the embedding lookup),
    plus 12 * heads * head size per layer and token attended to: seq_len / 2 on average, since
    causal attention is half of the full square (the formula of PaLM, appendix B, for the causal
    half only), and fewer in a layer with a sliding window. With `lora` 4 per weight, which is kept
    and has no gradient, and 6 per weight of an adapter on all layers; one on named layers is small
    and left out.
    """
    read = sizes(config)
    matrices = _matrices(read, active=True) + read.vocab * read.hidden
    on_all = lora is not None and lora.targets == "all-linear"
    adapters = lora_parameters(config, lora.rank) if lora is not None and on_all else 0
    attention = read.heads * read.head_dim * sum(_seen(seq_len, window) for window in read.windows)
    forward = 2.0 * (matrices + adapters) + 4.0 * attention
    backward = (4.0 if lora is None else 2.0) * matrices + 4.0 * adapters + 8.0 * attention
    return forward + (1 - forward_only) * backward


def _seen(seq_len: int, window: int | None) -> float:
    """The average number of tokens that a token attends to, itself counted as half: growing up to
    `window` tokens, then `window` each.
    """
    reach = min(seq_len, window or seq_len)
    return reach * (2 * seq_len - reach + 1) / (2 * seq_len) - 0.5


def _matrices(read: DecoderSizes, *, active: bool) -> int:
    """Number of weights in the matrices of all layers; `active`: without experts that a token does
    not take.
    """
    attention = read.hidden * read.head_dim * 2 * (read.heads + read.kv_heads)
    dense, sparse = 3 * read.hidden * read.feed_forward, 0
    if read.experts is not None:
        experts = read.experts
        width = (experts.chosen if active else experts.count) * experts.width + experts.shared
        sparse = read.hidden * (experts.count + 3 * width)
    return (
        read.layers * attention
        + read.sparse.count(False) * dense
        + read.sparse.count(True) * sparse
    )
