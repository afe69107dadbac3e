"""The native decoder family as configurations: how its members differ, and the defaults of keys
missing in `config.json`.

The defaults are transformers' own for each model type, so that a sparse `config.json` means the
same model in both. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.doors import FAMILIES

FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class FamilyMember:
    """One member of the native decoder family: how it differs from the others.

    A new member is one such object and one row in `ingot.config.doors.BUILT_IN["family"]`, under
    the `model_type` of its Hugging Face configuration. `None` for a bias: as the configuration's
    `attention_bias` says.
    """

    description: str
    """The models of this type, for users."""
    positions: int = 2048
    kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: the hidden size divided by the heads."""
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    may_bias_mlp: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head."""
    window: int | None = None
    """The default sliding window if `config.json` gives none; None: no window."""
    window_switch: bool = False
    """Windows apply only if `use_sliding_window` is set, and from layer `max_window_layers` on."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of `config.json` that must have one of these values if given."""


LLAMA = FamilyMember(
    "Llama 1, 2, 3, 3.1, 3.2, 3.3, SmolLM2 and others of the same architecture",
    may_bias_mlp=True,
    fixed={"sliding_window": (None,)},
)
MISTRAL = FamilyMember(
    "Mistral 7B with and without sliding window, Nemo and others of the same architecture",
    positions=131_072,
    kv_heads=8,
    qkv_bias=False,
    output_bias=False,
    window=4096,
)
QWEN2 = FamilyMember(
    "Qwen 2 and 2.5 (biases on queries, keys and values)",
    positions=32_768,
    kv_heads=32,
    qkv_bias=True,
    output_bias=False,
    window=4096,
    window_switch=True,
)
QWEN3 = FamilyMember(
    "Qwen 3, dense (normed queries and keys)",
    positions=32_768,
    kv_heads=32,
    head_dim=128,
    qk_norm=True,
    window=4096,
    window_switch=True,
)


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
        known = FAMILIES.kinds()
        near = difflib.get_close_matches(model_type, known, n=1, cutoff=0.0)[0]
        raise WrongInput(
            f"{where}: model_type `{model_type}` is not supported, only {', '.join(known)}"
            f" (nearest: `{near}`); see `ingot show models`"
        )
    return family


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes that determine a decoder's tensors and compute. `windows`: for each layer how many
    tokens back a query attends to, itself included; None: all.
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
    """Read the sizes from a Hugging Face configuration; one without a `model_type` is read as
    Llama's.

    Raises:
        KeyError, TypeError, ValueError: a size is missing or not a number.
        WrongInput: a `model_type` that is not native, or contradictory windows.
    """
    family = family_of(config, where)
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
        kv_heads=int(config.get("num_key_value_heads", family.kv_heads) or heads),
        head_dim=int(config.get("head_dim") or family.head_dim or hidden // max(heads, 1)),
        positions=int(config.get("max_position_embeddings", family.positions)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.may_bias_mlp and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, layers, where),
    )


def _windows(
    config: Mapping[str, Any], family: FamilyMember, layers: int, where: str
) -> tuple[int | None, ...]:
    window, types = config.get("sliding_window", family.window), config.get("layer_types")
    if family.window is None or (
        family.window_switch and not config.get("use_sliding_window", False)
    ):
        window = None
    if window is not None and int(window) < 1:
        raise WrongInput(
            f"{where}: sliding_window is {window}; it must be at least 1, or null for none"
        )
    first = int(config.get("max_window_layers", 28)) if family.window_switch else 0
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
    if not family.window_switch and types != usual:
        raise WrongInput(
            f"{where}: layer_types mixes windows, which model_type `{config.get('model_type')}`"
            " does not; take layer_types out"
        )
    return tuple(int(window) if window is not None and name == SLIDING else None for name in types)


def rope_values(config: Mapping[str, Any], where: str = "model.config") -> dict[str, Any]:
    """Normalise both spellings of rotary positions: `rope_parameters` (transformers 5), and
    `rope_theta` beside `rope_scaling` (earlier).

    Raises:
        WrongInput: both are given and contradict each other; readers differ in which one wins.
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
    """A configuration with some values changed, and with the values that depend on them.

    Rotary positions may be changed in either spelling and come out in one; the base is kept unless
    it is changed too. Changing the width or number of heads adjusts the head size, changing the
    number of layers adjusts `layer_types`.
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
