"""The native decoder family as configurations: how its members differ, and the sizes that a
`config.json` of one of them means.

The members are rows of `dense.py` and `mixtures.py` beside this file; rotary positions are read in
`rotary.py`. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ingot.base.errors import WrongInput
from ingot.config.doors import FAMILIES
from ingot.config.models.experts import ExpertKeys, ExpertsConfig, read_experts, sparse_layers
from ingot.config.models.types import PROVED, REFUSED_DECODERS, check_own_code

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerNorms(NamedTuple):
    """Where a layer has norms, each by its name in the files of the family; None: none there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


BEFORE = LayerNorms()


@dataclass(frozen=True)
class FamilyMember:
    """One member of the native decoder family: how it differs from Llama.

    A new member is one such object and one row in `ingot.config.doors.BUILT_IN["family"]`, under
    the `model_type` of its Hugging Face configuration. A bias is there or not, or as the named key
    of the configuration says.
    """

    description: str
    """The models of this type, for users."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The meaning of keys that a `config.json` leaves out: those of transformers' class."""
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = False
    norms: LayerNorms = BEFORE
    norm_offset: float = 0.0
    """Added to the weight of each norm."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Queries and keys are normalised: per head, or over the width of all heads."""
    qk_norm_if: str | None = None
    """The key of the configuration that says whether they are; None: they are."""
    further_layers: tuple[str, ...] = ()
    """Keys of the number of layers after the last one, which predict further tokens. Files may hold
    them; they are neither read nor trained nor written."""
    windows: Literal["none", "all", "switch", "pattern", "unrotated"] = "none"
    """Layers with a sliding window: all; from layer `max_window_layers` on if `use_sliding_window`
    is set; all but every `sliding_window_pattern`th; those without rotary positions."""
    rotary: Literal["all", "windowed", "listed"] = "all"
    """Layers with rotary positions: all; where there are windows, only layers that have one; those
    that `no_rope_layers` lists with a 1."""
    thetas: Mapping[str, float] | None = None
    """The default rotary base of each layer type, if their rotary positions differ."""
    scalings: tuple[str, ...] | None = None
    """The kinds of rotary scaling that the type has; None: every supported one."""
    share: float | None = None
    """The default share of a head that is rotated; None: all of it, and nothing else is known."""
    rotated: str | None = None
    """The key of the number of rotated channels of a head: another spelling of the share."""
    interleaved: bool = False
    """Adjacent channels are rotated with each other, not the two halves of a head."""
    sinks: bool = False
    """Each head has a score that takes part in the softmax and has no value."""
    query_growth: bool = False
    """Queries grow with their position (`llama_4_scaling_beta`)."""
    embedding_root: bool = False
    """Embeddings are multiplied by the square root of the width."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of a layer whose files hold several of ours, one after the other by rows."""
    experts: ExpertKeys | None = None
    """How `config.json` describes the experts of its sparse layers; None: all layers are dense."""
    reads: frozenset[str] = frozenset()
    """Keys of `config.json` that only some members have, and that are read for this one."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of `config.json` that must have one of these values if given."""

    def norm_of_heads(self, values: Mapping[str, Any]) -> Literal["none", "head", "full"]:
        """`qk_norm` of a configuration with its defaults."""
        return "none" if self.qk_norm_if and not values.get(self.qk_norm_if) else self.qk_norm

    def filled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the defaults of what it leaves out."""
        return {**self.defaults, **config}


def is_native(model_type: Any) -> bool:
    """Whether the native decoder implements this `model_type`."""
    return FAMILIES.find(str(model_type)) is not None


def native_families() -> dict[str, str]:
    """The model types that the native decoder implements, with descriptions."""
    return {name: FAMILIES.load(name, "model_type").description for name in FAMILIES.kinds()}


def family_of(config: Mapping[str, Any], where: str = "model.config") -> FamilyMember:
    """The family member of a Hugging Face configuration; Llama if it has no `model_type`.

    Raises:
        WrongInput: the native decoder does not implement its `model_type`.
    """
    model_type = str(config.get("model_type") or "llama")
    family: FamilyMember | None = FAMILIES.find(model_type)
    if family is None:
        if lacking := REFUSED_DECODERS.get(model_type):
            raise WrongInput(
                f"{where}: model_type `{model_type}` is not supported: {lacking} missing here; take"
                " another model (`ingot show models`)"
            )
        check_own_code(config, where)
        if model_type in PROVED["masked"]:
            raise WrongInput(
                f"{where}: model_type `{model_type}` is an encoder, which writes no text; train it"
                " by objective.kind classify or mlm, or take a decoder (`ingot show models`)"
            )
        near = difflib.get_close_matches(model_type, FAMILIES.kinds(), n=1, cutoff=0.0)[0]
        raise WrongInput(
            f"{where}: model_type `{model_type}` is not supported (nearest: `{near}`); `ingot show"
            " models` names those that are"
        )
    return family


# Keys of `config.json` that every member reads or checks, and those without effect on a decoder.
_READ = """
model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings rms_norm_eps
hidden_act initializer_range tie_word_embeddings rope_theta rope_scaling rope_parameters
partial_rotary_factor attention_bias mlp_bias attention_dropout sliding_window layer_types
pretraining_tp quantization_config use_mrope
"""
_INERT = """
architectures auto_map bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id
unk_token_id decoder_start_token_id dtype torch_dtype transformers_version use_cache
cache_implementation id2label label2id num_labels problem_type is_encoder_decoder is_decoder
add_cross_attention cross_attention_hidden_size tie_encoder_decoder return_dict
return_dict_in_generate output_attentions output_hidden_states output_scores torchscript
use_bfloat16 tf_legacy_loss pruned_heads chunk_size_feed_forward finetuning_task
task_specific_params tokenizer_class prefix suppress_tokens begin_suppress_tokens
forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty bad_words_ids
early_stopping do_sample temperature top_k top_p typical_p min_length max_length num_beams
num_beam_groups num_return_sequences diversity_penalty length_penalty repetition_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size remove_invalid_values is_llama_config
transformers.js_config model_name name unsloth_fixed unsloth_version attn_implementation
"""

SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "attention_out_bias"),
    *("use_sliding_window", "norm_topk_prob", "use_qk_norm"),
)
"""Keys that are true or false. Anything else would be taken for true: `"false"`, too."""


def refuse_unknown_keys(config: Mapping[str, Any], where: str) -> None:
    """Refuse a key that this code does not know, since it may change what the model computes, and a
    switch that is neither on nor off.

    A key that is null or false is taken to be off. Raises WrongInput.
    """
    family = family_of(config, where)
    known = {*_READ.split(), *_INERT.split(), *family.reads, *family.fixed}
    known |= {*family.further_layers, *filter(None, [family.qk_norm_if, family.rotated])}
    if family.experts is not None:
        known |= family.experts.reads
    for key, value in config.items():
        if key in known or key.startswith("_") or value is None or value is False:
            continue
        raise WrongInput(
            f"{where}: `{key}` ({value!r}) is not known for model_type"
            f" `{config.get('model_type')}` and may change what the model computes; set"
            f" model.config.{key}=null if it does not, or choose another model"
        )
    for key in SWITCHES:
        if config.get(key) not in (True, False, None):
            raise WrongInput(f"{where}: {key} {config[key]!r} is neither true nor false; set it")


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes that determine a decoder's tensors and compute. `windows`: for each layer how many
    tokens back a query attends to, itself included; None: all. `norms`, `sinks`: weights of a
    layer's norms and sinks. `sparse`: for each layer whether `experts` take the place of its
    feed-forward.
    """

    vocab: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    norms: int
    sinks: int
    windows: tuple[int | None, ...]
    experts: ExpertsConfig | None
    sparse: tuple[bool, ...]


MAX_LISTED = 10_000
"""Layers, and experts of one: what a damaged file says beyond it would be listed one by one, until
the memory is full.
"""
MAX_SIZE = 1 << 22
"""Of any side of a tensor; with larger ones, products of them are beyond 64 bits."""


def sizes(config: Mapping[str, Any], where: str = "model.config") -> DecoderSizes:
    """Read the sizes from a Hugging Face configuration; one without a `model_type` is read as
    Llama's.

    Raises:
        KeyError, TypeError, ValueError: a size is missing or not a number.
        WrongInput: a `model_type` that is not native, sizes of no model, or contradictory windows.
    """
    family = family_of(config, where)
    values = family.filled(config)
    heads = int(values["num_attention_heads"])
    layers = int(values["num_hidden_layers"])
    hidden = int(values["hidden_size"])
    kv_heads = int(values.get("num_key_value_heads") or heads)
    head_dim = int(values.get("head_dim") or hidden // max(heads, 1))
    vocab, feed_forward = int(values["vocab_size"]), int(values["intermediate_size"])
    _refuse_above(MAX_LISTED, where, num_hidden_layers=layers)
    _refuse_above(
        MAX_SIZE, where, vocab_size=vocab, hidden_size=hidden, intermediate_size=feed_forward
    )
    width = max(heads, kv_heads) * head_dim
    _refuse_above(MAX_SIZE, where, **{"num_attention_heads times head_dim": width})
    mixture = family.experts
    experts = None if mixture is None else read_experts(values, mixture, where)
    if experts is not None:
        widths = {"width of an expert": max(experts.width, experts.shared)}
        _refuse_above(MAX_LISTED, where, **{"number of experts": experts.count})
        _refuse_above(MAX_SIZE, where, **widths)
    normed = {"none": 0, "head": 2 * head_dim, "full": (heads + kv_heads) * head_dim}

    def has(bias: bool | str) -> bool:
        return bool(values.get(bias, False)) if isinstance(bias, str) else bias

    return DecoderSizes(
        vocab=vocab,
        hidden=hidden,
        feed_forward=feed_forward,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=_positions(values),
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=has(family.qkv_bias),
        output_bias=has(family.output_bias),
        mlp_bias=has(family.mlp_bias),
        norms=hidden * sum(name is not None for name in family.norms)
        + normed[family.norm_of_heads(values)],
        sinks=heads if family.sinks else 0,
        windows=_windows(values, family, layers, where),
        experts=experts,
        sparse=(False,) * layers if mixture is None else sparse_layers(values, mixture, where),
    )


def _refuse_above(most: int, where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size > most:
            raise WrongInput(
                f"{where}: {name} is {size:,}, and no model has more than {most:,}; mend it"
            )


def _positions(values: Mapping[str, Any]) -> int:
    """Positions that a row may have: of LongRoPE those of the original model, since a result would
    depend on the batch beyond them.
    """
    positions = int(values.get("max_position_embeddings", 2048))
    return min(positions, longrope_turn(values) or positions)


def longrope_turn(values: Mapping[str, Any]) -> int | None:
    """The positions of the original model, where LongRoPE is used: transformers takes other
    frequencies for a whole batch once its longest row has more. None: no LongRoPE.
    """
    for rope in (values.get("rope_scaling"), values.get("rope_parameters")):
        if isinstance(rope, Mapping) and "short_factor" in rope:
            name = "original_max_position_embeddings"
            before = values.get(name) or rope.get(name)
            return int(before) if before else None
    return None


def rotary_layers(values: Mapping[str, Any], family: FamilyMember, where: str) -> tuple[bool, ...]:
    """Which layers have rotary positions, of a configuration with its defaults."""
    layers = int(values["num_hidden_layers"])
    if family.rotary == "windowed" and values.get("sliding_window") is not None:
        return tuple(window is not None for window in _windows(values, family, layers, where))
    listed = values.get("no_rope_layers") if family.rotary == "listed" else [1] * layers
    if listed is None:
        every = int(values["no_rope_layer_interval"])
        listed = [(layer + 1) % every for layer in range(layers)]
    if len(listed) != layers:
        raise WrongInput(
            f"{where}: no_rope_layers names {len(listed)} layers, num_hidden_layers is {layers};"
            " give both in model.config"
        )
    return tuple(bool(rotated) for rotated in listed)


def _windows(
    values: Mapping[str, Any], family: FamilyMember, layers: int, where: str
) -> tuple[int | None, ...]:
    window, types = values.get("sliding_window"), values.get("layer_types")
    if family.windows == "none" or (
        family.windows in ("switch", "unrotated") and not values.get("use_sliding_window", False)
    ):
        window = None
    if window is not None and int(window) < 1:
        raise WrongInput(
            f"{where}: sliding_window is {window}; it must be at least 1, or null for none"
        )
    if window is None or types is not None:
        usual = [FULL] * layers if window is None else [SLIDING] * layers
    else:
        usual = _usual_types(values, family, layers, where)
    types = usual if types is None else list(types)
    if unknown := sorted({str(name) for name in types} - {FULL, SLIDING}):
        raise WrongInput(
            f"{where}: layer_types has {', '.join(unknown)}; only {FULL} and {SLIDING} are"
            " supported, choose another model"
        )
    if len(types) != layers:
        raise WrongInput(
            f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}; give"
            " both in model.config"
        )
    if window is None and SLIDING in types:
        raise WrongInput(
            f"{where}: layer_types has {SLIDING}, but there is no window; set sliding_window (and"
            " use_sliding_window where there is one)"
        )
    if family.windows in ("none", "all") and types != usual:
        raise WrongInput(
            f"{where}: layer_types mixes windows, which model_type `{values.get('model_type')}`"
            " does not; take layer_types out"
        )
    return tuple(int(window) if window is not None and name == SLIDING else None for name in types)


def _usual_types(
    values: Mapping[str, Any], family: FamilyMember, layers: int, where: str
) -> list[str]:
    """The types of layers with a window, where `layer_types` does not name them."""
    windowed = [True] * layers
    if family.windows == "switch":
        first = int(values.get("max_window_layers", 28))
        windowed = [layer >= first for layer in range(layers)]
    elif family.windows == "pattern":
        every = values["sliding_window_pattern"]
        if not isinstance(every, int):
            raise WrongInput(
                f"{where}: sliding_window_pattern {every!r} without layer_types is not supported,"
                " only a number; give layer_types"
            )
        windowed = [(layer + 1) % every != 0 for layer in range(layers)]
    elif family.windows == "unrotated":
        windowed = [not rotated for rotated in rotary_layers(values, family, where)]
    return [SLIDING if here else FULL for here in windowed]
