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
from ingot.models.native.attention import AttnFn
from ingot.models.native.config import ACTIVATIONS, DecoderConfig
from ingot.models.native.experts import LayerRouting, Routing, SparseMLP, ToLocal, whole
from ingot.models.native.head import LogitsView, TokenFunction, VocabularyHead, apply_head
from ingot.models.native.noise import EmbeddingNoise
from ingot.models.native.rope import Rope, Rotation, rotate, rotation_of


class AttentionCache(Protocol):
    """Keys and values of earlier tokens."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Store one layer's new k and v `[B, K, T, E]`, and attend with q, as an `AttnFn`."""
        ...


RunLayers = Callable[[Tensor, Sequence[Callable[[Tensor], Tensor]]], Tensor]
"""Applies the layers to a tensor, in order."""


def run_in_order(x: Tensor, layers: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
    """Apply the layers one after the other. x `[B, T, D]`."""
    for layer in layers:
        x = layer(x)
    return x


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019), computed in float32, the product
    with the weight plus `offset` included.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + self.offset if self.offset else self.weight.float()
        return functional.rms_norm(x.float(), self.weight.shape, weight, self.eps).to(x.dtype)


def _norm(config: DecoderConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, config.norm_offset)


class Attention(nn.Module):
    """Grouped-query attention, with rotary positions if the layer has them; queries and keys are
    normalised, per head or over the width of all heads, if the configuration says so. `to_local` is
    replaced where this rank has the sinks of its heads alone.
    """

    to_local: ToLocal

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, rope = layer, config.head_dim, config.ropes[layer]
        self.to_local = whole
        self.interleaved = rope is not None and rope.interleaved
        self.query_scale, self.query_growth = config.query_scale, config.query_growth
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.output_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_attention_heads)) if config.sinks else None
        self.norms_heads = config.qk_norm == "head"
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            widths = (config.head_dim, config.head_dim) if self.norms_heads else (queries, keys)
            self.q_norm, self.k_norm = (_norm(config, width) for width in widths)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: Rotation | None,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None,
    ) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        # The number of heads is read from the tensor: a wrapper may have left this rank a part of
        # them.
        q, k, v = (
            part.view(batch, time, -1, self.head_dim).transpose(1, 2)  # [B, H or K, T, E]
            for part in (q, k, v)
        )
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation, self.interleaved), rotate(k, rotation, self.interleaved)
        if self.query_scale != 1:
            q = q * self.query_scale
        if self.query_growth is not None:
            q = q * _growth(positions, *self.query_growth).to(q.dtype)
        sinks = {} if self.sinks is None else {"sinks": self.to_local(self.sinks)}
        if attn_fn is not None:
            mixed = attn_fn(q, k, v, **sinks)
        else:
            assert cache is not None
            mixed = cache.attend(self.layer, q, k, v, **sinks)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, time, -1))  # [B, T, D]
        return out


def _growth(positions: Tensor, beta: float, original: int) -> Tensor:
    """The factor of queries at `positions` `[B, T]`, `[B, 1, T, 1]`: 1 within the original
    positions of the model, growing with the logarithm beyond (Llama 4, Ministral 3).
    """
    return 1 + beta * (1 + positions[:, None, :, None] // original).log()


class FeedForward(nn.Module):
    """SwiGLU or GeGLU (Shazeer 2020), `width` columns wide."""

    def __init__(self, config: DecoderConfig, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def _mlp(config: DecoderConfig, layer: int) -> nn.Module:
    """The feed-forward of a layer: dense, or a mixture of experts."""
    experts = config.experts
    if experts is None or not config.sparse[layer]:
        return FeedForward(config, config.intermediate_size)
    shared = FeedForward(config, experts.shared) if experts.shared else None
    return SparseMLP(config, experts, shared, layer)


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a residual around it and norms before it,
    after it or both. The norms have the names of the family's files.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.number, self.window, self.rope = layer, config.windows[layer], config.ropes[layer]
        self.residual_scale = config.residual_scale
        self.self_attn = Attention(config, layer)
        self.mlp = _mlp(config, layer)
        self.norms = config.norms
        for name in filter(None, self.norms):
            self.add_module(name, _norm(config, config.hidden_size))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: Rotation | None,
        attn_fn: AttnFn | None,
        cache: AttentionCache | None = None,
        routing: LayerRouting | None = None,
    ) -> Tensor:
        """x `[B, T, D]` -> `[B, T, D]`. `attn_fn` is this layer's attention; None if `cache`
        provides keys, values and mask. `routing` is for the routers of a mixture in training.
        """
        norms = self.norms
        mixed = self.self_attn(
            self._normed(norms.before_attention, x), positions, rotation, attn_fn, cache
        )
        x = self._joined(x, self._normed(norms.after_attention, mixed))
        extra = (routing,) if routing is not None and isinstance(self.mlp, SparseMLP) else ()
        fed = self.mlp(self._normed(norms.before_mlp, x), *extra)
        return self._joined(x, self._normed(norms.after_mlp, fed))

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        """x, or what the norm of this name makes of it."""
        out: Tensor = x if name is None else getattr(self, name)(x)
        return out

    def _joined(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out if self.residual_scale == 1 else x + out * self.residual_scale


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
        self.norm = _norm(config, config.hidden_size)


class Decoder(nn.Module):
    """A causal language model, or one pipeline stage of it.

    Training calls `forward`, which returns the objective's value per token; the logits of all
    tokens never exist at once. It can be built on any device, `meta` included: the constructor
    computes nothing from the parameters.

    `make_attn_fns`, `run_layers` and `vocabulary_head` compute attention, the layers and the head;
    wrappers replace them by versions that communicate with other ranks or recompute activations.
    Before each micro-batch of a mixture in training `routing` is set. `noise`, if there is any, is
    added to embeddings in training.
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
        self.routing: Routing | None = None
        self.noise: EmbeddingNoise | None = None

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
        """Final hidden states `[B, T, D]`, normalised, and scaled as logits are; for a stage that
        is not the last, the hidden states for the next stage.

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
        config = self.config
        rotations: dict[Rope | None, Rotation] = {
            rope: rotation_of(rope, config.head_dim, positions)
            for rope in set(config.ropes)
            if rope is not None
        }
        attn_fns = (
            {} if cache is not None else self.make_attn_fns(positions, segments, config.windows)
        )
        x = self._embed(tokens) if self.stage.first else tokens
        if self.noise is not None and self.training and self.stage.first:
            x = self.noise.add(x, positions, segments)
        routing = self.routing if self.training else None
        layers = cast("Iterable[Block]", self.model.layers.children())
        x = self.run_layers(
            x,
            [
                partial(
                    layer,
                    positions=positions,
                    rotation=rotations.get(layer.rope),
                    attn_fn=attn_fns.get(layer.window),
                    cache=cache,
                    **({} if routing is None else {"routing": routing.of(layer.number)}),
                )
                for layer in layers
            ],
        )
        if not self.stage.last:
            return x
        x = cast("Tensor", self.model.norm(x))
        return x if config.logits_scale == 1 else x * config.logits_scale

    def _embed(self, tokens: Tensor) -> Tensor:
        """`[B, T]` -> `[B, T, D]`."""
        x: Tensor = self.model.embed_tokens(tokens)
        scale = self.config.embedding_scale
        # The factor is rounded to the dtype of the embeddings, as the models were trained.
        return x if scale == 1 else x * torch.full((), scale, dtype=x.dtype, device=x.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> float32 `[..., V]`; for generation, where only a few tokens need logits."""
        return self.vocabulary_head.whole(self._project(self.vocabulary_head.enter(hidden))).float()

    def project(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]`: the head in its compute dtype; V is this rank's slice of the
        vocabulary.
        """
        return self._project(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        return self._capped(self.vocabulary_head.project(hidden, self.head_weight))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _view(self, logits: Tensor) -> LogitsView:
        capped = logits if self.config.softcap is None else self._capped(logits.float())
        return self.vocabulary_head.view(capped)

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
            partial(self.vocabulary_head.project, weight=self.head_weight),
            self.config.vocab_size,
            labels.flatten(),  # [B * T]
            token,
            flat,
            self._view,
            weight,
            many_logits=self.vocabulary_head.many_logits,
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
