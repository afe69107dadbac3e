"""Tensor names of every layout, as one table used in both directions, and the error text for
tensors that do not fit.

The native decoder uses Hugging Face's names. Meta's original files and PEFT's adapters have their
own; import, export and adapters translate only through this file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from torch import Tensor

from ingot.config.models.experts import DOWN, GATE_UP, ExpertsConfig
from ingot.models.native.config import DecoderConfig

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
LORA_MAGNITUDE = "lora_magnitude"
"""The changes of DoRA's magnitudes; files have the magnitudes, as `PEFT_MAGNITUDE`."""
LORA_LEAVES = (LORA_A, LORA_B, LORA_MAGNITUDE)
PEFT_MAGNITUDE = "lora_magnitude_vector"

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


_LANGUAGE_PART = (("language_model.model.", "model."), ("model.language_model.", "model."))
_LANGUAGE_HEAD = "language_model.lm_head."
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def language_name(stored: str) -> str | None:
    """The name of a tensor without the prefix that the language part of a multimodal model has;
    None for a tensor of the other parts.
    """
    for prefix, ours in _LANGUAGE_PART:
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    if stored.startswith(_LANGUAGE_HEAD):
        return stored.removeprefix("language_model.")
    return None if stored.removeprefix("model.").startswith(_OTHER_PARTS) else stored


def is_further(stored: str, config: DecoderConfig) -> bool:
    """Whether a tensor of the files is of a layer after the last one, which predicts further
    tokens.
    """
    layer = re.match(r"model\.layers\.(\d+)\.", stored)
    beyond = -1 if layer is None else int(layer[1]) - config.num_hidden_layers
    return 0 <= beyond < config.further_layers


Value = TypeVar("Value")


def stored_name(name: str, fused: Mapping[str, Collection[str]]) -> str:
    """The name in the files of the tensor, or the module of a layer, that holds `name` of ours;
    another one if the family's files hold several of our modules in one (`fused`).
    """
    layer = re.match(r"model\.layers\.\d+\.", name)
    if layer is None or not fused:
        return name
    for stored, parts in fused.items():
        for part in parts:
            if (name[layer.end() :] + ".").startswith(part + "."):
                return layer[0] + stored + name[layer.end() + len(part) :]
    return name


Shape = tuple[int, ...]


class Piece(NamedTuple):
    """A part of one of our tensors that a tensor of the files holds."""

    own: str
    first: Shape
    """Where it begins in ours."""
    shape: Shape
    row: int = 0
    """The row of the stored tensor where it begins."""
    turned: bool = False
    """Whether the files hold the matrices of a stack transposed."""
    single: bool = False
    """Whether it is one expert's of our stack: its shape begins with 1, which the files leave
    out."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part of ours."""
        return tuple(
            slice(first, first + size) for first, size in zip(self.first, self.shape, strict=True)
        )

    @property
    def stored_shape(self) -> Shape:
        """The shape of the part as the files hold it."""
        if self.turned:
            return (self.shape[0], self.shape[2], self.shape[1])
        return self.shape[1:] if self.single else self.shape

    def of(self, whole: Tensor) -> Tensor:
        """This part of our whole tensor, as the files hold it; shares its memory."""
        part = whole[self.slices]
        return part.mT if self.turned else part.view(self.stored_shape)


def stored_pieces(
    shapes: Mapping[str, Shape], config: DecoderConfig, found: Collection[str] = ()
) -> dict[str, list[Piece]]:
    """For each tensor of the files what it holds of ours, in order, by rows. A tensor that is
    `found` there under our own name is taken as it is: transformers 5 has such names in memory.
    """
    held: dict[str, list[Piece]] = {}
    for own, shape in shapes.items():
        stacked = config.experts is not None and config.experts.swiglu is not None
        if own in found and not stacked:
            held[own] = [Piece(own, (0,) * len(shape), shape)]
            continue
        parts = expert_pieces(own, shape, config.experts) or [
            (stored_name(own, config.fused), Piece(own, (0,) * len(shape), shape))
        ]
        for stored, piece in parts:
            there = held.setdefault(stored, [])
            there.append(piece._replace(row=sum(one.stored_shape[0] for one in there)))
    return held


def pieces_shape(pieces: Iterable[Piece]) -> Shape:
    """The shape of a stored tensor that holds these pieces."""
    return joined_shape([piece.stored_shape for piece in pieces])


def expert_pieces(own: str, shape: Shape, experts: ExpertsConfig | None) -> list[tuple[str, Piece]]:
    """The matrices of the single experts in our stack of them, or that of all, by their names in
    the files, in the order of ours; empty for every other tensor.
    """
    if experts is None or not own.endswith((GATE_UP, DOWN)):
        return []
    if experts.swiglu is not None:
        return [(own, Piece(own, (0, 0, 0), shape, turned=True))]
    prefix, names = own.partition("mlp.experts.")[0], experts.names
    parts = (names.gate, names.up) if own.endswith(GATE_UP) else (names.down,)
    rows = shape[1] // len(parts)
    return [
        (
            f"{prefix}{names.block}.experts.{number}.{part}.weight",
            Piece(own, (number, place * rows, 0), (1, rows, shape[2]), single=True),
        )
        for number in range(shape[0])
        for place, part in enumerate(parts)
    ]


def stored_parts(
    names: Iterable[str], fused: Mapping[str, Collection[str]]
) -> dict[str, list[str]]:
    """For each tensor or module of the files those of ours that it holds, in order, by rows."""
    held: dict[str, list[str]] = {}
    for name in names:
        held.setdefault(stored_name(name, fused), []).append(name)
    return held


def joined(
    tensors: Iterable[tuple[str, Value]],
    fused: Mapping[str, Collection[str]],
    join: Callable[[list[Value]], Value],
) -> Iterator[tuple[str, Value]]:
    """The tensors of the files made of ours, as soon as all parts of one have come."""
    waiting: dict[str, list[Value]] = {}
    wanted = {stored: len(parts) for stored, parts in fused.items()}
    for name, value in tensors:
        stored = stored_name(name, fused)
        parts = waiting.setdefault(stored, [])
        parts.append(value)
        count = next((n for module, n in wanted.items() if f".{module}." in stored), 1)
        if len(parts) == count:
            yield stored, join(waiting.pop(stored)) if count > 1 else value


def joined_shape(shapes: list[Shape]) -> Shape:
    """The shape of tensors joined by rows."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_mismatches(
    wanted: Mapping[str, Shape], found: Mapping[str, Shape], passed_over: Collection[str]
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
