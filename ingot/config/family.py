"""The native decoder family as configurations: how its members differ, and what a key that
`config.json` leaves out means.

The defaults are transformers' own of each model type, so that a sparse `config.json` is the same
model here and there. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput

FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class FamilyMember:
    """One model type. `None` for a bias: as the configuration's `attention_bias` says."""

    positions: int = 2048
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: width over heads
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    may_bias_mlp: bool = False
    qk_norm: bool = False
    window: int | None = None
    # windows only where `use_sliding_window` is set, and from layer `max_window_layers` on
    window_switch: bool = False


FAMILY_MEMBERS: dict[str, FamilyMember] = {
    "llama": FamilyMember(may_bias_mlp=True),
    "mistral": FamilyMember(
        positions=131_072, kv_heads=8, qkv_bias=False, output_bias=False, window=4096
    ),
    "qwen2": FamilyMember(
        positions=32_768,
        kv_heads=32,
        qkv_bias=True,
        output_bias=False,
        window=4096,
        window_switch=True,
    ),
    "qwen3": FamilyMember(
        positions=32_768, kv_heads=32, head_dim=128, qk_norm=True, window=4096, window_switch=True
    ),
}


@dataclass(frozen=True)
class DecoderSizes:
    """What decides a decoder's tensors and their work. `windows`: for each layer how many tokens
    back a query sees, itself included; None: all.
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
    qk_norm: bool
    windows: tuple[int | None, ...]


def sizes(config: Mapping[str, Any], where: str = "model.config") -> DecoderSizes:
    """Read them from a Hugging Face configuration; one without a known `model_type` is read as
    Llama's.

    Raises:
        KeyError, TypeError, ValueError: a size is missing or no number.
        WrongInput: windows that contradict each other.
    """
    kind = FAMILY_MEMBERS.get(str(config.get("model_type")), FAMILY_MEMBERS["llama"])
    heads, layers, hidden = (
        int(config["num_attention_heads"]),
        int(config["num_hidden_layers"]),
        int(config["hidden_size"]),
    )
    bias = bool(config.get("attention_bias", False))
    return DecoderSizes(
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        feed_forward=int(config["intermediate_size"]),
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads", kind.kv_heads) or heads),
        head_dim=int(config.get("head_dim") or kind.head_dim or hidden // max(heads, 1)),
        positions=int(config.get("max_position_embeddings", kind.positions)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if kind.qkv_bias is None else kind.qkv_bias,
        output_bias=bias if kind.output_bias is None else kind.output_bias,
        mlp_bias=kind.may_bias_mlp and bool(config.get("mlp_bias", False)),
        qk_norm=kind.qk_norm,
        windows=_windows(config, kind, layers, where),
    )


def _windows(
    config: Mapping[str, Any], kind: FamilyMember, layers: int, where: str
) -> tuple[int | None, ...]:
    window, types = config.get("sliding_window", kind.window), config.get("layer_types")
    if kind.window is None or (kind.window_switch and not config.get("use_sliding_window", False)):
        window = None
    if window is not None and int(window) < 1:
        raise WrongInput(
            f"{where}: sliding_window is {window}; it must be at least 1, or null for none"
        )
    first = int(config.get("max_window_layers", 28)) if kind.window_switch else 0
    usual = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
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
    if not kind.window_switch and types != usual:
        raise WrongInput(
            f"{where}: layer_types mixes windows, which model_type `{config.get('model_type')}`"
            " does not; take layer_types out"
        )
    return tuple(int(window) if window is not None and name == SLIDING else None for name in types)


def rope_values(config: Mapping[str, Any], where: str = "model.config") -> dict[str, Any]:
    """Rotary positions of both spellings as one: `rope_parameters` (transformers 5), and
    `rope_theta` beside `rope_scaling` (before).

    Raises:
        WrongInput: they contradict each other; readers then differ in which one wins.
    """
    spellings = [dict(config.get(name) or {}) for name in ROTARY]
    if nested := [
        key
        for spelling in spellings
        for key, value in spelling.items()
        if isinstance(value, Mapping)
    ]:
        raise WrongInput(
            f"{where}: rotary positions that differ by layer ({', '.join(nested)}) are not"
            " supported; choose another model"
        )
    for spelling in spellings:
        if spelling:
            spelling["rope_type"] = spelling.get("rope_type") or spelling.get("type") or "default"
            spelling.pop("type", None)
    values: dict[str, Any] = {}
    for spelling in (*spellings, {"rope_theta": config.get("rope_theta")}):
        for key, value in spelling.items():
            if value is not None and values.setdefault(key, value) != value:
                raise WrongInput(
                    f"{where}: {key} is both {values[key]!r} and {value!r} in rope_theta,"
                    " rope_scaling and rope_parameters; give it in rope_parameters alone"
                )
    return {"rope_type": "default", "rope_theta": 10_000.0, **values}


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some of its values changed, and with those that follow from them.

    Rotary positions are changed in whichever spelling and come out in one, the base kept unless it
    is changed too. Another width or number of heads takes the head size along, another number of
    layers `layer_types`.
    """
    made = {**config, **changes}
    new = {name: changes[name] for name in ("rope_theta", *ROTARY) if name in changes}
    if new:
        before = rope_values(config)
        if new.keys() == {"rope_theta"}:
            values = {**before, **new}
        elif any(
            "rope_theta" in (part or {}) for part in (new, *(new.get(name) for name in ROTARY))
        ):
            values = rope_values(new)
        else:
            values = {**rope_values(new), "rope_theta": before["rope_theta"]}
        made = {key: value for key, value in made.items() if key not in ("rope_theta", *ROTARY)} | {
            "rope_parameters": values
        }
    if "head_dim" not in changes and {"hidden_size", "num_attention_heads"} & changes.keys():
        made.pop("head_dim", None)
    types, layers = made.get("layer_types"), made.get("num_hidden_layers")
    if (
        types
        and "layer_types" not in changes
        and "num_hidden_layers" in changes
        and isinstance(layers, int)
    ):
        made["layer_types"] = [types[0]] * layers if len(set(types)) == 1 else types[:layers]
    return made
