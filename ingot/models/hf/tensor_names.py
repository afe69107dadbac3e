"""Tensor names of every layout, as one table used in both directions, and the error text for
tensors that do not fit.

The native decoder uses Hugging Face's names. Meta's original files and PEFT's adapters have their
own; import, export and adapters translate only through this file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Native and Hugging Face name | Meta's name; in layers prefixed with `model.layers.N.` and
# `layers.N.`.
_LAYER = (
    ("self_attn.q_proj.weight", "attention.wq.weight"),
    ("self_attn.k_proj.weight", "attention.wk.weight"),
    ("self_attn.v_proj.weight", "attention.wv.weight"),
    ("self_attn.o_proj.weight", "attention.wo.weight"),
    ("mlp.gate_proj.weight", "feed_forward.w1.weight"),
    ("mlp.up_proj.weight", "feed_forward.w3.weight"),
    ("mlp.down_proj.weight", "feed_forward.w2.weight"),
    ("input_layernorm.weight", "attention_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
)
_WHOLE = (
    (EMBEDDING, "tok_embeddings.weight"),
    ("model.norm.weight", "norm.weight"),
    (HEAD, "output.weight"),
)
_TO_META = dict((*_LAYER, *_WHOLE))
PEFT_PREFIX = "base_model.model."
LORA_A, LORA_B = "lora_A", "lora_B"
"""The two matrices of an adapted layer: parameters in our models, modules with a `weight` in
PEFT.
"""

LINEAR_FROM_META = {
    meta.split(".")[1]: native.split(".")[1] for native, meta in _LAYER if "norm" not in native
}
"""Meta's name of each linear layer of a Llama (`wq`) -> the native one (`q_proj`)."""


def to_meta(name: str) -> str:
    """Meta's name of a native parameter. Raises KeyError for a parameter without one."""
    layer = re.match(r"model\.(layers\.\d+\.)", name)
    return _TO_META[name] if layer is None else layer[1] + _TO_META[name[layer.end() :]]


def to_peft(name: str) -> str:
    """PEFT's key of a parameter from its Hugging Face name: a matrix of an adapted layer
    (`q_proj.lora_A`), or a tensor of a fully trained head.
    """
    return PEFT_PREFIX + (f"{name}.weight" if name.endswith((LORA_A, LORA_B)) else name)


def current_name(stored: str, prefix: str, known: Collection[str]) -> str:
    """Map a tensor name in a folder to its name in the current transformers model: handles older
    spellings, and a base model's `prefix` that only one of the two names has.
    """
    name = re.sub(
        r"LayerNorm\.(gamma|beta)$",
        lambda match: f"LayerNorm.{'weight' if match[1] == 'gamma' else 'bias'}",
        stored,
    )
    spellings = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    return next((spelling for spelling in spellings if spelling in known), name)


Shape = tuple[int, ...]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_mismatches(
    wanted: Mapping[str, Shape], found: Mapping[str, Shape], passed_over: Collection[str] = ()
) -> str:
    """Describe all tensors that are missing, surplus (except `passed_over`) or of another shape;
    empty if all fit.

    Layers with the same problem are grouped: `model.layers.0-3,5.mlp.up_proj.weight is missing`.
    """
    troubles = [(name, "is missing") for name in wanted if name not in found]
    troubles += [
        (name, "is not part of this model")
        for name in sorted(found)
        if name not in wanted and name not in passed_over
    ]
    troubles += [
        (name, f"is {list(found[name])}, {list(shape)} is wanted")
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    return describe_troubles(troubles)


def describe_troubles(troubles: Iterable[tuple[str, str]]) -> str:
    """Describe the problem of each name, in one line."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, trouble in troubles:
        number = _NUMBER.search(name)
        before, after = (
            (name, "") if number is None else (name[: number.start()], name[number.end() :])
        )
        groups.setdefault((before, after, trouble), []).extend(
            [] if number is None else [int(number[0])]
        )
    return "; ".join(
        f"{before}{_ranges(numbers)}{after} {trouble}"
        for (before, after, trouble), numbers in groups.items()
    )


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
