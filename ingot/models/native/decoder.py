"""The native decoder family. Parameter names and rotary layout are Hugging Face's, so that loading
and export need almost no conversion.

Knows no parallelism, no environment and no recipe; wrappers are applied from outside.
Shapes: B batch, T time, D model, H query heads, K key/value heads, E head size, F feed-forward, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.models.native import attention
from ingot.models.native.attention import AttnFn, attend
from ingot.models.native.config import DecoderConfig
from ingot.models.native.head import TokenFunction, VocabularyHead, apply_head
from ingot.models.native.rope import angles, inverse_frequencies, rotate


class AttentionCache(Protocol):
    """Keys and values of earlier tokens."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store one layer's new k and v `[B, K, T, E]`; returns the keys and values to attend over,
        `[B, K, S, E]` each, and a bool mask `[B, 1, T, S]`.
        """
        ...


RunLayers = Callable[[Tensor, Sequence[Callable[[Tensor], Tensor]]], Tensor]
"""Applies the layers to a tensor, in order."""


def run_in_order(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Apply the layers one after the other. x `[B, T, D]`."""
    for layer in layers:
        x = layer(x)
    return x


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019), computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(
            x.dtype
        )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; queries and keys are normalised per head if
    the configuration says so (Qwen 3).
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries, keys = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None,
    ) -> Tensor:
        batch, time, _ = x.shape
        # The number of heads is read from the tensor: a wrapper may have left this rank a part of
        # them.
        q, k, v = (
            projection(x).view(batch, time, -1, self.head_dim).transpose(1, 2)  # [B, H or K, T, E]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if attn_fn is not None:
            mixed = attn_fn(q, k, v)
        else:
            assert cache is not None
            mixed = attend(q, *cache.append(self.layer, k, v))
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))  # [B, T, D]
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(
            config.hidden_size, config.intermediate_size, bias=config.mlp_bias
        )
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(
            config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual
    around it.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.window = config.windows[layer]
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """x `[B, T, D]` -> `[B, T, D]`. `attn_fn` is this layer's attention; None if `cache`
        provides keys, values and mask.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attn_fn, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # Not initialised here: on `meta` that would import the compiler (a second at each start),
        # elsewhere the weights would be initialised twice.
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model, or one pipeline stage of it.

    Training calls `forward`, which returns the objective's value per token; the logits of all
    tokens never exist at once. It can be built on any device, `meta` included: the constructor
    computes nothing from the parameters.

    `make_attn_fns`, `run_layers` and `vocabulary_head` compute attention, the layers and the head;
    wrappers replace them by versions that communicate with other ranks or recompute activations.
    A pipeline stage has only its own layers, under their numbers in the whole model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.make_attn_fns: attention.AttnFnFactory = attention.make_attn_fns
        self.run_layers: RunLayers = run_in_order
        self.vocabulary_head = VocabularyHead()
        self.stage = StageEnds()

    @property
    def head_weight(self) -> Tensor:
        """The projection onto the vocabulary, `[V, D]`; the embedding itself if the two are
        tied.
        """
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Final hidden states `[B, T, D]`, normalised; for a stage that is not the last, the hidden
        states for the next stage.

        tokens, positions `[B, T]` int64; a stage that is not the first takes hidden states
        `[B, T, D]` in place of tokens. `segments` `[B, T]` numbers the documents of packed rows,
        which do not attend to each other; None if each row is one document.
        """
        return self._hidden(tokens, positions, segments, cache)

    def _hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        # FSDP gathers and frees weights around the methods called from outside (`hidden`, `logits`,
        # `project`), so `forward` calls this one instead. The frequencies are computed here rather
        # than kept in a buffer: they cost nothing, and a model on `meta` would lose them.
        rope = self.config.rope
        cos, sin = angles(
            positions,
            inverse_frequencies(rope, self.config.head_dim, positions.device),
            rope.amplitude,
        )
        attn_fns = (
            {}
            if cache is not None
            else self.make_attn_fns(positions, segments, self.config.windows)
        )
        x = self.model.embed_tokens(tokens) if self.stage.first else tokens
        layers = cast("Iterable[Block]", self.model.layers.children())
        x = self.run_layers(
            x,
            [
                partial(layer, cos=cos, sin=sin, attn_fn=attn_fns.get(layer.window), cache=cache)
                for layer in layers
            ],
        )
        return self.model.norm(x) if self.stage.last else x

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> float32 `[..., V]`; for generation, where only a few tokens need logits."""
        return self.vocabulary_head.whole(self._project(self.vocabulary_head.enter(hidden))).float()

    def project(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]`: the head in its compute dtype; V is this rank's slice of the
        vocabulary.
        """
        return self._project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.vocabulary_head.weight(self.head_weight))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        labels: Tensor,
        token: TokenFunction,
        extras: Tensor | None = None,
    ) -> Tensor:
        """The objective's value of each token, float32 `[B, T]`; 0 where the label is -100. On a
        stage that is not the last: hidden states `[B, T, D]`.

        `token(view, labels, extras)` is called on chunks of tokens, with `extras` `[B, T, ...]`
        split likewise; see `ingot.models.native.head`.
        """
        hidden = self._hidden(tokens, positions, segments)
        if not self.stage.last:
            return hidden
        flat = None if extras is None else extras.flatten(0, 1)  # [B * T, ...]
        hidden = self.vocabulary_head.enter(hidden)
        weight = self.vocabulary_head.weight(self.head_weight)
        values = apply_head(
            hidden.flatten(0, 1),  # [B * T, D]
            self._project,
            self.config.vocab_size,
            labels.flatten(),  # [B * T]
            token,
            flat,
            self.vocabulary_head.view,
            weight,
        )
        return values.view(
            labels.shape
        ).clone()  # not a view: FSDP's hooks on this tensor's gradient would be lost with one


class StageEnds(NamedTuple):
    """Which ends of the model a pipeline stage holds."""

    first: bool = True
    """Whether this stage has the embedding."""
    last: bool = True
    """Whether this stage has the final norm and the head."""
