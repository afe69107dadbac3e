"""What llama.cpp calls our model types, and what it can and cannot express of them: a model that it
would compute otherwise is refused. After the tensors and keys that llama.cpp's own loaders ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.config.models.family import FULL, SLIDING
from ingot.models.hf.tensor_names import EMBEDDING, HEAD
from ingot.models.native.config import DecoderConfig
from ingot.models.native.rope import Rope, inverse_frequencies

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp. `adjacent`: it rotates adjacent channels of a head with each
    other, so that rows of queries and keys are stored in that order. `scalings`: the kinds of
    rotary scaling that it computes as we do. `own_head`: it does not fall back to the embedding for
    a missing head. `refuses` says why a configuration of the type is another model there, or None;
    `keys` are metadata beside those that all have.
    """

    name: str
    adjacent: bool = False
    scalings: tuple[str, ...] = ("default", "linear")
    biases: bool = False
    norm_offset: bool = False
    windowed: bool = False
    own_head: bool = False
    scaled: bool = False
    refuses: Callable[[DecoderConfig], str | None] = lambda config: None
    keys: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}


def _whole_heads(config: DecoderConfig) -> str | None:
    if config.head_dim * config.num_attention_heads == config.hidden_size:
        return None
    return (
        f"its heads have {config.num_attention_heads} x {config.head_dim} channels, which"
        f" llama.cpp takes to be the width {config.hidden_size}"
    )


def _gemma3(config: DecoderConfig) -> str | None:
    every_sixth = tuple((layer + 1) % 6 == 0 for layer in range(config.num_hidden_layers))
    if tuple(window is None for window in config.windows) != every_sixth:
        return "llama.cpp takes every sixth layer, and no other, to be without a window"
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    known = math.sqrt(config.head_dim * heads / config.hidden_size) if layers == 62 else 1.0
    if not math.isclose(config.query_scale, known):
        return "llama.cpp computes another query_pre_attn_scalar from its sizes"
    return None


def _gemma3_keys(config: DecoderConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"rope.freq_base_swa": _rope(config, SLIDING).theta}
    window = next((window for window in config.windows if window is not None), None)
    if window is not None:
        found["attention.sliding_window"] = window
    if config.softcap is not None:
        found["final_logit_softcapping"] = float(config.softcap)
    return found


def _smollm3(config: DecoderConfig) -> str | None:
    rotated = tuple((layer + 1) % 4 != 0 for layer in range(config.num_hidden_layers))
    if tuple(rope is not None for rope in config.ropes) != rotated:
        return "llama.cpp takes every fourth layer, and no other, to be without rotary positions"
    return _whole_heads(config)


def _granite_keys(config: DecoderConfig) -> dict[str, Any]:
    return {
        "attention.scale": config.query_scale / math.sqrt(config.head_dim),
        "embedding_scale": float(config.embedding_scale),
        "residual_scale": float(config.residual_scale),
        "logit_scale": 1 / config.logits_scale,
    }


_LLAMA = Architecture("llama", adjacent=True, scalings=("default", "linear", "llama3"))
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": Architecture("qwen2", biases=True, refuses=_whole_heads),
    "qwen3": Architecture("qwen3"),
    "gemma3_text": Architecture(
        "gemma3", norm_offset=True, windowed=True, refuses=_gemma3, keys=_gemma3_keys
    ),
    "olmo2": Architecture("olmo2", own_head=True, refuses=_whole_heads),
    "phi3": Architecture("phi3", scalings=("default",), refuses=_whole_heads),
    "granite": Architecture(
        "granite", adjacent=True, scaled=True, refuses=_whole_heads, keys=_granite_keys
    ),
    "smollm3": Architecture("smollm3", adjacent=True, refuses=_smollm3),
}
"""By `model_type`."""


def architecture_of(config: DecoderConfig, where: str) -> Architecture:
    """The architecture for a model.

    Raises:
        WrongInput: llama.cpp has none for its type that is proved here, or would compute something
            else.
    """
    kind = str(config.source.get("model_type") or "llama")
    found = ARCHITECTURES.get(kind)
    if found is None:
        raise WrongInput(
            f"{where}: model_type `{kind}` cannot be written as GGUF, only"
            f" {', '.join(ARCHITECTURES)}; export it with --format hf"
        )
    usual = (config.embedding_scale, config.residual_scale, config.logits_scale)
    if not found.scaled and not found.norm_offset and (*usual, config.query_scale) != (1, 1, 1, 1):
        reason: str | None = "its scales are not those of the architecture"
    elif config.query_growth is not None or config.experts is not None:
        reason = "experts and queries that grow are not written"
    elif config.output_bias or config.mlp_bias or config.qkv_bias != found.biases:
        reason = "llama.cpp has other biases there"
    elif wrong := {rope.kind for rope in config.ropes if rope} - set(found.scalings):
        reason = f"rotary scaling `{wrong.pop()}` is not one of {', '.join(found.scalings)}"
    else:
        reason = found.refuses(config)
    if reason is not None:
        raise WrongInput(
            f"{where}: llama.cpp's `{found.name}` is another model ({reason}); export it with"
            " --format hf"
        )
    return found


def metadata(config: DecoderConfig, found: Architecture, where: str) -> dict[str, Any]:
    """Sizes and constants by their keys, without the architecture's name before them."""
    rope, context = _rope(config, FULL), config.max_position_embeddings
    widths = [window for window in config.windows if window is not None]
    if widths and not found.windowed and min(widths) < context:
        context = min(widths)
        say(
            f"{where}: llama.cpp's `{found.name}` has no sliding window; its context is limited to"
            f" the window's {context} tokens, within which the models are equal"
        )
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(config.head_dim * rope.share),
        "rope.freq_base": float(rope.theta),
    }
    if rope.kind == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope.factor)}
    return values | found.keys(config)


def rope_factors(config: DecoderConfig) -> Tensor | None:
    """What llama.cpp divides the frequency of each channel pair by, float32 `[R/2]`, where the
    scaling is Llama 3.1's.
    """
    rope = _rope(config, FULL)
    if rope.kind != "llama3":
        return None
    plain = Rope(theta=rope.theta, share=rope.share)
    frequencies = inverse_frequencies(plain, config.head_dim)
    return frequencies / inverse_frequencies(rope, config.head_dim)


def _rope(config: DecoderConfig, kind: str) -> Rope:
    """The rotary positions of layers of a kind; those of another kind where there is none."""
    of_kind = [
        rope
        for rope, window in zip(config.ropes, config.windows, strict=True)
        if rope is not None and (window is None) == (kind == FULL)
    ]
    return (of_kind or [rope for rope in config.ropes if rope is not None])[0]


def stored(name: str, tensor: Tensor, config: DecoderConfig, found: Architecture) -> Tensor:
    """A tensor of Hugging Face's files as GGUF has it, float32."""
    tensor = tensor.detach().to("cpu", torch.float32)
    if found.norm_offset and name.endswith("norm.weight"):
        return tensor + config.norm_offset
    if found.adjacent and name.endswith(("q_proj.weight", "k_proj.weight")):
        # The halves of a head, [H, 2, E/2, D], become pairs, [H, E/2, 2, D].
        halves = tensor.reshape(-1, 2, config.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def as_halves(name: str, tensor: Tensor, config: DecoderConfig, found: Architecture) -> Tensor:
    """A tensor read from GGUF with its rows in the order of Hugging Face's files again."""
    if found.adjacent and name.endswith(("q_proj.weight", "k_proj.weight")):
        pairs = tensor.reshape(-1, config.head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor


def names_of(shapes: Mapping[str, tuple[int, ...]], found: Architecture) -> dict[str, str]:
    """Of each tensor to write, the tensor of the model that it is: itself, but for the head of an
    architecture that needs one of its own where the model's is tied to the embedding.
    """
    names = {name: name for name in shapes}
    if found.own_head and HEAD not in names:
        names[HEAD] = EMBEDDING
    return names
