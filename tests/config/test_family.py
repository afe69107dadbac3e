"""Configurations of the native family with values changed, as `model.config` changes them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.config.models.family import MAX_LISTED, sizes
from ingot.config.models.presets import preset
from ingot.config.models.rotary import overridden, rope_values
from ingot.config.models.types import REFUSED_DECODERS

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
OLD: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
NEW: dict[str, Any] = {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}


@pytest.mark.parametrize("base", [OLD, NEW, {**OLD, **NEW}])
@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"rope_theta": 1e6}, {**LLAMA3, "rope_theta": 1e6}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
        ),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_scaling": None, "rope_theta": 9.0}, {"rope_type": "default", "rope_theta": 9.0}),
        ({"rope_parameters": PLAIN}, PLAIN),
        ({"rms_norm_eps": 1e-4}, {**LLAMA3, "rope_theta": 5e5}),
    ],
)
def test_rotary_positions_are_changed_in_any_spelling(
    base: dict[str, Any], changes: dict[str, Any], values: dict[str, Any]
) -> None:
    assert rope_values(overridden(base, changes)) == values


def test_spellings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(WrongInput, match=r"factor is both 8\.0 and 4\.0"):
        rope_values({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}})
    with pytest.raises(WrongInput, match="rope_theta is both"):
        overridden(NEW, {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}})


def test_what_follows_from_a_size_changes_with_it() -> None:
    base = preset("llama-3m")
    assert sizes(base).head_dim == 64
    assert sizes(overridden(base, {"hidden_size": 64})).head_dim == 16
    assert sizes(overridden(base, {"hidden_size": 64, "head_dim": 32})).head_dim == 32
    assert overridden(base, {"num_hidden_layers": 2}) == {**base, "num_hidden_layers": 2}


def test_layer_types_follow_the_number_of_layers() -> None:
    base = {**preset("qwen3-0.6b"), "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    for layers in (2, 4, 6):
        assert sizes(overridden(base, {"num_hidden_layers": layers})).windows == (None,) * layers
    mixed = {
        **base,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    }
    assert sizes(overridden(mixed, {"num_hidden_layers": 2})).windows == (None, 9)
    with pytest.raises(WrongInput, match="layer_types names 4 layers, num_hidden_layers is 5"):
        sizes(overridden(mixed, {"num_hidden_layers": 5}))


@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3m", "exaone4-1m"])
def test_more_layers_than_any_model_has_are_refused(name: str) -> None:
    many = {"num_hidden_layers": MAX_LISTED + 1}
    for config in ({**preset(name), **many}, overridden(preset(name), many)):
        assert len(config.get("layer_types") or ()) < MAX_LISTED
        with pytest.raises(WrongInput, match=r"here\.json: num_hidden_layers is 10,001, and no"):
            sizes(config, "here.json")


def installed_with(key: str) -> set[str]:
    """The model types whose text configuration in the installed transformers has a key."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found = set()
    for path in Path(spec.origin).parent.glob("models/*/configuration_*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(rf"^    {key}\b", text, re.MULTILINE):
            found |= {path.parent.name, *re.findall(r'^    model_type = "(\w+_text)"$', text, re.M)}
    return found


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("kv_lora_rank", "its multi-head latent attention|its layers of linear attention"),
        ("linear_conv_kernel_dim", "its layers of linear attention"),
    ],
)
def test_attention_of_another_kind_is_refused_by_name(key: str, said: str) -> None:
    types = installed_with(key)
    assert len(types) > 3
    for model_type in types:
        assert re.search(said, REFUSED_DECODERS.get(model_type, "")), model_type
        with pytest.raises(WrongInput, match=f"`{model_type}` is not supported: its "):
            sizes({**preset("llama-3m"), "model_type": model_type})
