"""Sizes of models and checkpoints, how long saves take, the room that a run needs, the costs that
grow with the number of ranks, and memory by formula. Arithmetic on knobs; imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.degrees import Degrees, degrees_of
from ingot.config.models.source import trained_kind
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.sections.training import SGD, AdamW, Muon
from ingot.config.shape import batch_plan, least_parameters, lora_parameters, parameter_count
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range
from ingot.plan.unknown import Estimate, Unknown, plus, times

DISK_BYTES_S = Range(0.15e9, 0.8e9, 3e9, "guessed")
"""What a node writes to its disk in a second: a network disk, an SSD, several of them."""
BUCKET_BYTES_S = Range(0.1e9, 0.5e9, 2e9, "guessed")
"""What a node sends to or gets from a bucket in a second."""
HASH_BYTES_S = Range(0.4e9, 1.0e9, 2.0e9, "guessed")
"""SHA-256 of one thread in a second; 1.05e9 measured on the machine that this was written on."""
VERIFIED_AT_ONCE = 8
"""Files of a checkpoint that rank 0 verifies at a time when it resumes."""
COPY_BYTES_S = {
    "cpu": Range(1e9, 4e9, 10e9, "guessed"),
    "cuda": Range(4e9, 12e9, 25e9, "guessed"),
    "tpu": Range(2e9, 8e9, 20e9, "guessed"),
}
"""What a rank copies into the host's memory in a second, by device type: PCIe 3 to 5 with all
devices of a node at once.
"""
NOTE_S = Range(0.0005, 0.005, 0.05, "guessed")
"""Reading a rendezvous note from a shared folder."""
BUCKET_NOTE_S = Range(0.02, 0.05, 0.2, "guessed")


KEPT_BYTES = {
    "none": Range(24.0, 34.0, 80.0, "guessed"),
    "selective": Range(16.0, 24.0, 40.0, "guessed"),
    "full": Range(2.0, 2.0, 6.0, "guessed"),
}
"""Bytes kept for backward of each token, layer and element of the width, in 16 bits; twice of it in
32. By `memory.recompute.kind`. The upper end has scores of attention in it.
"""
LOGITS_BYTES = Range(2.0, 8.0, 14.0, "guessed")
"""Of each token and entry of the vocabulary."""
SAVE_WAITS_S, SAVE_S = Range(0.002, 0.03, 0.8, "guessed"), Range(0.2, 1.5, 9.0, "guessed")
"""What any save takes beside its bytes: agreeing, naming tensors, waiting for the disk; the upper
ends are those of a first save on a machine under load.
"""
RENDEZVOUS = "notes of nodes that meet"
LISTED = "files listed by a save"
VERIFIED = "files verified to resume"


@dataclass(frozen=True)
class ModelSize:
    """Weights of the model, and how many of them are trained, or of adapters at most; lower bounds
    where not `exact`. `active`: those that one token meets; None: all of them, it is no mixture.
    """

    weights: int
    trained: int
    exact: bool = True
    active: int | None = None


def model_size(recipe: Recipe, config: Mapping[str, Any]) -> ModelSize | None:
    """From a Hugging Face configuration with the size of the vocabulary that is trained; None if it
    lacks sizes.
    """
    lora, is_decoder = recipe.model.lora, trained_kind(recipe) == "decoder"
    try:
        weights = parameter_count(config) if is_decoder else least_parameters(config)
        if not is_decoder:
            trained = weights if lora is None else weights // 100
            return ModelSize(weights, trained, exact=False)
        active = parameter_count(config, active=True)
        trained = (
            weights
            if lora is None
            else lora_parameters(config, lora.rank, dora=lora.kind == "dora")
        )
        return ModelSize(weights, trained, active=None if active == weights else active)
    except (KeyError, TypeError, ValueError, WrongInput):
        return None


def state_bytes(recipe: Recipe) -> Range:
    """Bytes of a checkpoint for each trained weight: the weight, and the optimizer's state in
    float32.
    """
    weight = 2 if recipe.precision.master == "stochastic" else 4
    if (average := recipe.train.average) is not None and average.kind == "ema":
        weight += 4
    optimizer = recipe.train.optimizer
    if isinstance(optimizer, AdamW):
        return Range.exactly(weight + 8)
    if isinstance(optimizer, Muon):  # matrices of layers have one moment, embeddings two
        return Range(weight + 4, weight + 5, weight + 8)
    if isinstance(optimizer, SGD):
        return Range.exactly(weight + (4 if optimizer.momentum else 0))
    return Range(weight, weight + 8, weight + 12, "guessed")


@dataclass(frozen=True)
class Space:
    """Room that is taken, and what there is, in bytes."""

    what: str
    bytes: Estimate
    where: str
    together: bool = False
    """Whether it is the sum of others."""


@dataclass(frozen=True)
class PerRank:
    """A cost that grows with the number of ranks or nodes, once a start or a save."""

    what: str
    count: int
    seconds: Range


def checkpoint_bytes(recipe: Recipe, model: ModelSize | None) -> Estimate:
    """Bytes of one checkpoint, of all ranks together."""
    if model is None:
        return Unknown("the model's configuration")
    size, lora = state_bytes(recipe) * float(model.trained), recipe.model.lora
    if lora is not None and lora.targets != "all-linear":
        return Range(0.0, size.likely / 2, size.high, "guessed")
    return size if model.exact else _at_least(size)


def holders(recipe: Recipe, place: PlannedPlace) -> int:
    """Ranks among which one copy of the training state is divided; replicas hold it again."""
    try:
        degrees = degrees_of(recipe.parallel, place.world)
    except WrongInput:  # which the checks report
        return place.world
    return degrees.shard * degrees.tensor * degrees.pipeline


def _at_least(size: Range) -> Range:
    """A size of which only a lower bound is known."""
    return Range(size.low, size.likely * 1.2, size.high * 2, "guessed")


def saving(
    recipe: Recipe, place: PlannedPlace, checkpoint: Estimate, gap_s: Estimate
) -> tuple[Estimate, Estimate]:
    """What training waits for a save, and how long the save takes in all. `gap_s`: seconds of
    training between two saves.
    """
    if isinstance(checkpoint, Unknown):
        return checkpoint, checkpoint
    own = checkpoint / float(place.nodes)
    write_s = SAVE_S + own / DISK_BYTES_S + own / (HASH_BYTES_S * float(place.processes))
    if recipe.checkpoint.upload or place.rented:
        write_s = write_s + own / BUCKET_BYTES_S
    copy_s = SAVE_WAITS_S + checkpoint / float(holders(recipe, place)) / COPY_BYTES_S[place.type]
    if not recipe.checkpoint.asynchronous:
        return write_s, write_s
    whole = write_s + copy_s
    if isinstance(gap_s, Unknown):
        return copy_s, whole
    # The next save waits for this one, and training with it.
    late = Range(
        max(0.0, whole.low - gap_s.high),
        max(0.0, whole.likely - gap_s.likely),
        max(0.0, whole.high - gap_s.low),
        whole.origin,
    )
    return copy_s + late, whole


def rank_costs(place: PlannedPlace, checkpoint: Estimate) -> tuple[PerRank, ...]:
    """What grows with the number of nodes, ranks or bytes and is waited for by all of them."""
    found = []
    if place.nodes > 1:
        note_s = BUCKET_NOTE_S if place.rented else NOTE_S
        count = 2 * place.nodes
        found.append(PerRank(RENDEZVOUS, count, note_s * float(count)))
    if place.world > 1:
        listing_s = NOTE_S * float(place.world)
        found.append(PerRank(LISTED, place.world, listing_s))
    if not isinstance(checkpoint, Unknown):
        threads = min(VERIFIED_AT_ONCE, place.world, place.cores or VERIFIED_AT_ONCE)
        verify_s = checkpoint / (HASH_BYTES_S * float(threads)) + checkpoint / DISK_BYTES_S
        if place.rented:
            verify_s = verify_s + checkpoint / BUCKET_BYTES_S
        found.append(PerRank(VERIFIED, place.world, verify_s))
    return tuple(found)


def host_copy(
    recipe: Recipe, place: PlannedPlace, checkpoint: Estimate, beside: Estimate
) -> Estimate:
    """Bytes of each node's memory that saving takes, as a copy of the state; `beside`: saves while
    training goes on, without which nothing is copied.
    """
    rare = isinstance(beside, Range) and not beside.high and recipe.checkpoint.best is None
    if rare or not recipe.checkpoint.asynchronous:
        return Range.exactly(0.0)
    if isinstance(checkpoint, Unknown):
        return checkpoint
    own = checkpoint * (place.processes / holders(recipe, place))
    # Pinned memory is handed out in powers of two.
    pinned = 1 if place.type == "cpu" else 2
    return Range(own.low, own.likely, own.high * pinned, own.origin)


def disk_spaces(
    recipe: Recipe, model: ModelSize | None, checkpoint: Estimate, where: str = "disk"
) -> tuple[Space, Space]:
    """Room on the disk for all checkpoints at once and for the exported model."""
    kept = recipe.checkpoint.keep + (recipe.checkpoint.best is not None)
    # One more while it is written, before the oldest goes.
    held = times(checkpoint, Range.exactly(kept + 1.0))
    each = 4 if recipe.precision.export == "fp32" else 2
    exported: Estimate = Unknown("the model's configuration")
    if model is not None:
        whole = Range.exactly(float(model.weights * each))
        exported = whole if model.exact else _at_least(whole)
    return Space(f"{kept} + 1 checkpoints", held, where), Space("exported model", exported, where)


def spaces(
    recipe: Recipe,
    place: PlannedPlace,
    model: ModelSize | None,
    data: Estimate,
    checkpoint: Estimate,
) -> tuple[Space, ...]:
    """Room for data, checkpoints and models, on the disk and in the bucket."""
    disk = "disk" if place.nodes == 1 else "disk of each node, or a shared one"
    checkpoints, exported = disk_spaces(recipe, model, checkpoint, disk)
    together = plus(plus(data, checkpoints.bytes), exported.bytes)
    found = [
        Space("data", data, disk),
        checkpoints,
        exported,
        Space("together on the disk", together, disk, together=True),
    ]
    if place.rented or recipe.checkpoint.upload:
        in_bucket = together if place.rented else checkpoints.bytes
        found.append(Space("in the bucket", in_bucket, "bucket", together=True))
    return tuple(found)


def tokens_of_row(recipe: Recipe) -> int:
    """Positions of one row: of a preference both sides, of a pair source and target, of hidden
    spans these and what is read.
    """
    if recipe.documents in TWO_ROWS:
        return 2 * recipe.data.seq_len
    writes = recipe.documents == "pair" or recipe.objective.spans is not None
    return recipe.data.seq_len + (recipe.target_len if writes else 0)


def formula_memory(
    recipe: Recipe, config: Mapping[str, Any], size: ModelSize, degrees: Degrees, *, half: bool
) -> Range:
    """Bytes that a rank holds at its highest use, tensors alone, for models that cannot be traced:
    a wide range. Activations follow Korthikanti et al. 2022 (Reducing Activation Recomputation in
    Large Transformer Models, https://arxiv.org/abs/2205.05198). `half`: it computes in 16 bits.

    Raises:
        WrongInput: the batch does not divide over the ranks.
    """
    shards = degrees.shard * degrees.tensor * degrees.pipeline
    each = 2.0 if half else 4.0
    held = _weights(config, size) / float(shards)
    trained = min(1.0, size.trained / max(1, size.weights))
    state = state_bytes(recipe) * held * trained
    gradients = Range(4.0, 4.0, 8.0) * held * trained
    # Copies in 16 bits beside float32 masters, and whole layers gathered.
    weights = Range(0.0, each, 2 * each) * held
    frozen = Range(each, 4.0, 4.0) * held * (1.0 - trained)
    batch = batch_plan(recipe.train, recipe.parallel, degrees.world)
    tokens = batch.micro_batch * tokens_of_row(recipe) / degrees.context
    layers, width = _sizes(config)
    kept = KEPT_BYTES[recipe.memory.recompute.kind] * (each / 2)
    # A rank of a pipeline holds as many micro-batches as there are stages: all layers' worth.
    activations = kept * (tokens * layers * width / degrees.tensor)
    logits = LOGITS_BYTES * (tokens * float(config.get("vocab_size") or 0) / degrees.tensor)
    return state + gradients + weights + frozen + activations + logits


def _weights(config: Mapping[str, Any], size: ModelSize) -> Range:
    """Weights of the model; where only a lower bound is known, up to twice those of encoder layers
    of its width.
    """
    if size.exact:
        return Range.exactly(float(size.weights))
    layers, width = _sizes(config)
    wide = (config.get(name) for name in ("intermediate_size", "d_ff", "encoder_ffn_dim"))
    inner = float(next((value for value in wide if isinstance(value, int)), 4 * width))
    embedded = float(config.get("vocab_size") or 0) * width
    likely = max(float(size.weights), embedded + layers * (4 * width**2 + 2 * width * inner))
    return Range(float(size.weights), likely, 2 * likely, "guessed")


def _sizes(config: Mapping[str, Any]) -> tuple[float, float]:
    """Layers, of encoder and decoder together, and width."""

    def first(*names: str) -> float:
        found = (config.get(name) for name in names)
        return float(next((value for value in found if isinstance(value, int)), 0))

    layers = first("num_layers", "encoder_layers", "num_hidden_layers", "n_layer")
    decoder = first("num_decoder_layers", "decoder_layers") if "d_model" in config else 0.0
    return layers + decoder, first("d_model", "hidden_size", "n_embd")
