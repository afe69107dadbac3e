"""transformers' sequence-to-sequence models, encoders and masked language models behind the
interface of decoders. Supports one process or data parallelism only.

Shapes: B batch, S source, T target, D model, V vocabulary, C classes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ingot.config.models.types import (
    ENDS_AT_EOS,
    FROM_THE_RIGHT,
    LIKE_BART,
    POSITIONED,
    RELATIVE,
    WRAPS,
)
from ingot.models.hf.config import HFConfig
from ingot.models.native.head import IGNORE, LogitsView, TokenFunction, apply_head


class Seq2Seq(nn.Module):
    """An encoder reads the source, a decoder writes the target."""

    def __init__(self, config: HFConfig, inner: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.inner: Any = inner

    def hidden(self, tokens: Tensor, segments: Tensor | None, labels: Tensor) -> Tensor:
        """The decoder's final hidden states `[B, T, D]`, input to `project`. The decoder reads
        `labels` shifted right after its start token.
        """
        mask = _mask(tokens, segments)
        tokens = tokens.masked_fill(mask == 0, self.config.pad)
        shifted = self.decoder_input(labels)
        if self.config.model_type in LIKE_BART:
            out: Tensor = self.inner.base_model(
                tokens, attention_mask=mask, decoder_input_ids=shifted, use_cache=False
            ).last_hidden_state
            return out
        if self.config.model_type not in RELATIVE:
            # What this type computes between its last layer and its logits is unknown, so return
            # the logits.
            logits: Tensor = self.inner(
                tokens, attention_mask=mask, decoder_input_ids=shifted, use_cache=False
            ).logits
            return logits
        source = self.inner.encoder(tokens, attention_mask=mask).last_hidden_state
        out = self.inner.decoder(
            shifted, encoder_hidden_states=source, encoder_attention_mask=mask, use_cache=False
        ).last_hidden_state
        scaled = getattr(
            self.inner.config, "scale_decoder_outputs", self.config.model_type == "umt5"
        )
        return out * self.inner.model_dim**-0.5 if scaled else out

    def decoder_input(self, labels: Tensor) -> Tensor:
        """The decoder's input for `labels` `[B, T]`: labels shifted right by one after the start
        token, or, for types that wrap targets, after the target's own last token.
        """
        start = labels.new_full((len(labels), 1), self.inner.config.decoder_start_token_id)
        if self.config.model_type in WRAPS:
            written = labels >= 0
            last = labels.gather(1, (written.sum(dim=1, keepdim=True) - 1).clamp_min(0))
            start = torch.where(written[:, :1], last, start)
        shifted = torch.cat((start, labels[:, :-1]), dim=1)
        return shifted.masked_fill(shifted < 0, self.config.pad)

    def project(self, hidden: Tensor) -> Tensor:
        """`[..., D]` -> `[..., V]`."""
        if not self.config.projects:
            return hidden
        logits: Tensor = self.inner.lm_head(hidden)
        bias = getattr(self.inner, "final_logits_bias", None)
        return logits if bias is None else logits + bias[0]

    @property
    def head_weight(self) -> Tensor | None:
        """The projection onto the vocabulary `[V, D]`; None if logits are more than a product."""
        head: Any = self.inner.lm_head if self.config.projects else None
        is_biased = getattr(self.inner, "final_logits_bias", None) is not None
        plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
        return head.weight if plain and not is_biased else None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        labels: Tensor,
        token: TokenFunction,
        extras: Tensor | None = None,
    ) -> Tensor:
        """The objective's value for each target token, float32 `[B, T]`; 0 where the label is -100.

        tokens, positions `[B, S]` int64: the source; positions are ignored, as the model counts its
        own. `segments` `[B, S]` is 0 on padding, None if there is none. labels `[B, T]`: the
        target, not shifted.
        """
        hidden = self.hidden(tokens, segments, labels)
        flat = None if extras is None else extras.flatten(0, 1)
        values = apply_head(
            hidden.flatten(0, 1),
            self.project,
            self.inner.lm_head.out_features if self.config.projects else hidden.shape[-1],
            labels.flatten(),
            token,
            flat,
            weight=self.head_weight,
        )
        return values.view(
            labels.shape
        ).clone()  # not a view, or hooks on this tensor's gradient would be lost


class TextReader(nn.Module):
    """What reads texts and writes none: a classifier or a masked language model."""

    drawn: tuple[str, ...] = ()
    """The modules of `inner` that its folder lacked: their weights are random until trained."""

    def __init__(self, config: HFConfig, inner: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.inner: Any = inner

    def hidden(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The last layer's states `[B, S, D]`, and 1 for those of tokens `[B, S]`; their order is
        that of the texts, but padding may stand before them.
        """
        inputs = self._inputs(tokens, positions, segments)
        hidden: Tensor = self.inner.base_model(**inputs).last_hidden_state
        return hidden, inputs["attention_mask"]

    def _inputs(self, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> dict[str, Any]:
        """What transformers' model of this kind reads."""
        mask, kind = _mask(tokens, segments), self.config.model_type
        tokens = tokens.masked_fill(mask == 0, self.config.pad)
        if self.config.reads_last_place:
            return {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        counted = positions + self.config.first_position
        if kind in ENDS_AT_EOS and segments is not None:
            empty = (segments == 0).all(dim=1)
            tokens[:, 0] = torch.where(empty, self.inner.config.eos_token_id, tokens[:, 0])
        if kind in FROM_THE_RIGHT:
            width = tokens.shape[1]
            places = torch.arange(width, device=tokens.device) + mask.sum(dim=1, keepdim=True)
            tokens, mask = (part.gather(1, places % width) for part in (tokens, mask))
        if self.config.side_by_side and segments is not None:
            # [B, 1, S, S]: padding sees padding, so that no softmax is over nothing.
            mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        inputs = {"input_ids": tokens, "attention_mask": mask}
        return {**inputs, "position_ids": counted} if kind in POSITIONED else inputs

    def _outputs(self, tokens: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """What the model's own head gives, float32."""
        logits: Tensor = self.inner(**self._inputs(tokens, positions, segments)).logits
        return logits.float()


class Encoder(TextReader):
    """A classifier of texts. The classes take the place of the objective's vocabulary."""

    def logits(self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
        """Float32 `[B, C]`; for rows without any token they are finite but meaningless."""
        if self.config.reads_last_place:
            hidden, mask = self.hidden(tokens, positions, segments)
            ends = (mask.sum(dim=1) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
            scores: Tensor = self.inner.score(hidden.gather(1, ends)[:, 0])
            return scores.float()
        return self._outputs(tokens, positions, segments)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        labels: Tensor,
        token: TokenFunction,
        extras: Tensor | None = None,
    ) -> Tensor:
        """The objective's value for each text, float32 `[B]`; 0 where the label is -100.

        tokens, positions `[B, S]` int64, positions from 0. `segments` `[B, S]` is 0 on padding,
        None if there is none. labels `[B]`: classes; or `[B, S]`, of which a text without any other
        than -100 has no value.
        """
        if labels.ndim == 2:
            labels = torch.where((labels != IGNORE).any(dim=1), 0, IGNORE)
        values = token(
            LogitsView(self.logits(tokens, positions, segments)), labels.clamp_min(0), extras
        )
        return torch.where(labels != IGNORE, values, 0.0)


class MaskedLM(TextReader):
    """A masked language model: at each token, what stands there given the tokens on both sides."""

    def logits(self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None) -> Tensor:
        """Float32 `[B, S, V]`, of every token."""
        return self._outputs(tokens, positions, segments)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        labels: Tensor,
        token: TokenFunction,
        extras: Tensor | None = None,
    ) -> Tensor:
        """The objective's value for each token, float32 `[B, S]`; 0 where the label is -100.

        tokens, positions `[B, S]` int64, positions from 0. `segments` `[B, S]` is 0 on padding,
        None if there is none. labels `[B, S]`: the token that stands there, not shifted. The head
        is computed of labelled tokens alone, a sixth of them.
        """
        flat = labels.flatten()
        asked = self._asked(flat)
        logits = self.logits_at(tokens, positions, segments, asked)
        values = apply_head(
            logits,
            lambda chosen: chosen,
            logits.shape[-1],
            flat[asked],
            token,
            None if extras is None else extras.flatten(0, 1)[asked],
        )
        return values.new_zeros(flat.shape).index_put((asked,), values).view(labels.shape)

    @property
    def projection(self) -> Any:
        """The layer that ends in the vocabulary."""
        return self.inner.get_output_embeddings()

    def logits_at(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None, asked: Tensor
    ) -> Tensor:
        """Logits `[N, V]` at the places `asked` `[N]` of the flattened batch."""
        hook = self.inner.base_model.register_forward_hook(partial(_only, asked))
        try:
            logits: Tensor = self.inner(**self._inputs(tokens, positions, segments)).logits[0]
        finally:
            hook.remove()
        return logits

    def _asked(self, labels: Tensor) -> Tensor:
        """The places of the labels `[N]` that are not -100. In a plan, where these are unknown, as
        many as are usual; of a batch without any the first place, since each weight needs a
        gradient, which other ranks wait for.
        """
        if isinstance(labels, FakeTensor):
            return torch.arange(
                math.ceil(len(labels) * self.config.asked_share), device=labels.device
            )
        found = (labels != IGNORE).nonzero()[:, 0]
        return found if len(found) else found.new_zeros(1)


def _only(asked: Tensor, module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook that leaves of the last layer's states `[B, S, D]` those at `asked`, `[1, N, D]`."""
    output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[asked][None]
    return output


HFModel = Seq2Seq | Encoder | MaskedLM


def _mask(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """Attention mask `[B, S]`. In a row without tokens the first place is unmasked, since a softmax
    over nothing gives NaN values and gradients.
    """
    if segments is None:
        return torch.ones_like(tokens)
    seen = segments != 0
    seen[:, 0] |= ~seen.any(dim=1)
    return seen.long()
