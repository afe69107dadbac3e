"""Rotary positions of the native family, in every spelling of a `config.json`, and configurations
with some values changed. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.doors import FAMILIES
from ingot.config.models.family import FULL, MAX_LISTED, SLIDING, family_of, rotary_layers, sizes

ROTARY = ("rope_scaling", "rope_parameters")
_KNOWN = """
rope_type rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow truncate
original_max_position_embeddings max_position_embeddings attention_factor mscale mscale_all_dim
short_factor long_factor partial_rotary_factor llama_4_scaling_beta finetuned
"""


def layer_ropes(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any] | None, ...]:
    """The rotary values of each layer, as `rope_values` gives them; None for a layer without."""
    family, windows = family_of(config, where), sizes(config, where).windows
    by_type = ropes_by_type(config, where)
    return tuple(
        by_type[FULL if window is None else SLIDING] if rotated else None
        for window, rotated in zip(
            windows, rotary_layers(family.filled(config), family, where), strict=True
        )
    )


def ropes_by_type(
    config: Mapping[str, Any], where: str = "model.config"
) -> dict[str, dict[str, Any]]:
    """The rotary values of each type of layers."""
    thetas = family_of(config, where).thetas
    if thetas is None:
        return dict.fromkeys((FULL, SLIDING), rope_values(config, where))
    return _nested(config, thetas, where)


def _nested(
    config: Mapping[str, Any], thetas: Mapping[str, float], where: str
) -> dict[str, dict[str, Any]]:
    """The rotary values of each layer type: `rope_parameters` by type, or in the older spelling
    `rope_scaling` for layers without a window, and a base of each.
    """
    given = dict(config.get("rope_parameters") or {})
    if foreign := sorted(given.keys() - {FULL, SLIDING}):
        raise WrongInput(
            f"{where}: rope_parameters has {', '.join(foreign)} beside the types of layers; give"
            f" them within {FULL} and {SLIDING}"
        )
    old = {
        FULL: {"rope_scaling": config.get("rope_scaling"), "rope_theta": config.get("rope_theta")},
        SLIDING: {"rope_theta": config.get("rope_local_base_freq")},
    }
    if "rope_local_base_freq" not in config and given.get(SLIDING) is None:
        # Readers differ in the base of the windowed layers; equal bases leave no doubt.
        base = config.get("rope_theta")
        if thetas[FULL] == thetas[SLIDING] and base not in (None, thetas[SLIDING]):
            raise WrongInput(
                f"{where}: rope_theta {base!r} leaves open whether layers with a window have it;"
                f" give rope_parameters for {FULL} and {SLIDING}"
            )
    return {
        kind: rope_values(
            {**old[kind], "rope_parameters": given.get(kind)}, where, theta=thetas[kind]
        )
        for kind in (FULL, SLIDING)
    }


def rope_values(
    config: Mapping[str, Any], where: str = "model.config", theta: float | None = None
) -> dict[str, Any]:
    """Normalise both spellings of rotary positions: `rope_parameters` (transformers 5), and
    `rope_theta` beside `rope_scaling` (earlier). `theta`: the base of a configuration that has
    none; None: the family's.

    Raises:
        WrongInput: both are given and contradict each other; readers differ in which one wins; or
            a value that is not known.
    """
    family = FAMILIES.find(str(config.get("model_type") or "llama"))
    defaults = {} if theta is not None or family is None else family.defaults
    if not any(config.get(name) for name in ROTARY):
        config = {**config, "rope_parameters": defaults.get("rope_parameters")}
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
            if spelling["rope_type"] == "su":
                spelling["rope_type"] = "longrope"  # its name in the first Phi-3 files
    values: dict[str, Any] = {}
    for spelling in (*spellings, {"rope_theta": config.get("rope_theta")}):
        for key, value in spelling.items():
            if value is not None and values.setdefault(key, value) != value:
                raise WrongInput(
                    f"{where}: {key} is both {values[key]!r} and {value!r} in rope_theta,"
                    " rope_scaling and rope_parameters; give it in rope_parameters alone"
                )
    if unknown := sorted(values.keys() - set(_KNOWN.split())):
        raise WrongInput(
            f"{where}: {', '.join(unknown)} of rope_parameters is not known and may change what the"
            " model computes; choose another model"
        )
    base = theta or defaults.get("rope_theta") or 10_000.0
    return {"rope_type": "default", "rope_theta": base, **values}


def overridden(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with some values changed, and with the values that depend on them.

    Rotary positions may be changed in either spelling and come out in one; the base is kept unless
    it is changed too. Changing the width or number of heads adjusts the head size, changing the
    number of layers adjusts `layer_types`.
    """
    made = {**config, **changes}
    new = {name: changes[name] for name in ("rope_theta", *ROTARY) if name in changes}
    family = FAMILIES.find(str(config.get("model_type") or "llama"))
    if new and (family is None or family.thetas is None):
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
    layers = changes.get("num_hidden_layers")
    for name in ("layer_types", "no_rope_layers"):
        kinds = made.get(name)
        if kinds and name not in changes and isinstance(layers, int) and layers <= MAX_LISTED:
            made[name] = [kinds[0]] * layers if len(set(kinds)) == 1 else kinds[:layers]
    return made
