"""The running rows of a sequence-to-sequence model of transformers: requests join with their source
read, and leave, between two tokens.

The rows are those of transformers' own cache. Answers end at its last place, so shorter ones are
padded on the left; sources begin at the first, and shorter ones are padded on the right. Both are
masked. Decoders with positions of their own count them by the cache's length, which is that of the
longest answer; here each row gets its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ingot.config.models.types import RELATIVE
from ingot.models.hf.models import Seq2Seq

LEAST_POSITIONS = 64
READS_PADDING = ("m2m_100",)
"""Types that give a token of padding no position, wherever it stands."""
UNMASKED = ("led",)
"""Types whose decoder makes no mask where it reads a single token: it is given one here."""


def prepared(
    model: object,
    input_ids: Tensor,
    logits_processor: object,
    stopping_criteria: object,
    generation_config: object,
    **state: Any,
) -> tuple[Tensor, Any, dict[str, Any]]:
    """A decoding method for `generate` that hands back what it would begin with: ids, what changes
    the logits, and the arguments of the model's first call.
    """
    return input_ids, logits_processor, state


@dataclass
class Seq2SeqRows:
    """Rows of a batch, in evaluation mode.

    cache: transformers' `EncoderDecoderCache`, all of whose layers hold every token. sources: 1 for
    tokens of the sources `[B, S]`. lengths: how many tokens of each answer are in the cache.
    """

    cache: Any
    sources: Tensor
    lengths: list[int]

    def join(self, other: Seq2SeqRows) -> None:
        """Add the rows of `other` behind these."""
        for part, left in ((self.cache.self_attention_cache, True), (self._crossing, False)):
            theirs = other.cache.self_attention_cache if left else other._crossing
            for mine, new in zip(part.layers, theirs.layers, strict=True):
                mine.keys = _stacked(mine.keys, new.keys, left=left)
                mine.values = _stacked(mine.values, new.values, left=left)
        sources = (self.sources[:, None, :, None], other.sources[:, None, :, None])
        self.sources = _stacked(*sources, left=False)[:, 0, :, 0]
        self.lengths += other.lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, at least one, and the places that none of them needs."""
        self.lengths = [self.lengths[row] for row in rows]
        chosen = torch.tensor(rows, device=self.sources.device)
        sources = self.sources[chosen]
        self.sources = sources[:, : int(sources.sum(dim=1).max())]
        for layer in self.cache.self_attention_cache.layers:
            places = slice(layer.keys.shape[2] - max(self.lengths), None)
            layer.keys = layer.keys[chosen, :, places]
            layer.values = layer.values[chosen, :, places]
        for layer in self._crossing.layers:
            places = slice(self.sources.shape[1])
            layer.keys = layer.keys[chosen, :, places]
            layer.values = layer.values[chosen, :, places]

    @property
    def _crossing(self) -> Any:
        return self.cache.cross_attention_cache


@dataclass
class OpenedRows:
    """Rows that have read their sources and the first input of the decoder.

    ids: that input `[B, 1]`. logits: of their first token `[B, V]`. processors: transformers' own,
    which change logits as the model's present `generation_config` says.
    """

    rows: Seq2SeqRows
    ids: Tensor
    logits: Tensor
    processors: Any


class Seq2SeqStep:
    """Computes the logits of the next token of rows."""

    def __init__(self, model: Seq2Seq) -> None:
        self._model = model
        # transformers calls it `cache` since 5.24, and its models say so.
        new = "cache" in inspect.signature(model.inner.forward).parameters
        self._cache = "cache" if new else "past_key_values"
        relative = model.config.model_type in RELATIVE
        self._positions = None if relative else _RowPositions(model)

    def read(self, sources: Sequence[Sequence[int]]) -> OpenedRows:
        """Read sources, and begin an answer to each."""
        inner, pad = self._model.inner, self._model.config.pad
        longest = max(map(len, sources))
        padding = [longest - len(source) for source in sources]
        tokens = [[*source, *[pad] * more] for source, more in zip(sources, padding, strict=True)]
        mask = torch.tensor([[1] * (longest - more) + [0] * more for more in padding])
        mask = mask.to(inner.device)
        ids, processors, state = inner.generate(
            torch.tensor(tokens, device=inner.device), attention_mask=mask, custom_generate=prepared
        )
        out = inner(
            encoder_outputs=state["encoder_outputs"],
            attention_mask=mask,
            decoder_input_ids=ids,
            use_cache=True,
            **{self._cache: state[self._cache]},
        )
        rows = Seq2SeqRows(out[self._cache], mask, [ids.shape[1]] * len(sources))
        return OpenedRows(rows, ids, out.logits[:, -1].float(), processors)

    def advance(self, rows: Seq2SeqRows, tokens: Sequence[int]) -> Tensor:
        """The logits `[B, V]` for the token behind each row's newest, which is in `tokens`."""
        device = rows.sources.device
        length = max(rows.lengths)
        begins = length - torch.tensor(rows.lengths, device=device)
        seen = torch.arange(length + 1, device=device) >= begins[:, None]  # [B, T + 1]
        ids = torch.tensor(tokens, device=device)[:, None]
        # What the encoder said is in the cache; only the shape of its states is still read.
        states = torch.zeros((), device=device).expand(*rows.sources.shape, 1)

        def logits() -> Tensor:
            out = self._model.inner(
                encoder_outputs=(states,),
                attention_mask=rows.sources,
                decoder_input_ids=ids,
                decoder_attention_mask=seen.long(),
                use_cache=True,
                **{self._cache: rows.cache},
            )
            last: Tensor = out.logits[:, -1].float()
            return last

        with ExitStack() as hooks:
            if self._positions is not None:
                hooks.enter_context(self._positions.of(rows.lengths, ids))
            if self._model.config.model_type in UNMASKED:
                hooks.enter_context(_seeing(self._model.inner.get_decoder().layers, seen))
            made = logits()
        rows.lengths = [size + 1 for size in rows.lengths]
        return made


class _RowPositions:
    """Gives the decoder's rows their own positions, in place of the cache's length."""

    def __init__(self, model: Seq2Seq) -> None:
        self._model, self._decoder = model, model.inner.get_decoder()
        self._table: Tensor | None = None

    @contextmanager
    def of(self, positions: Sequence[int], tokens: Tensor) -> Iterator[None]:
        """Meanwhile the decoder's rows stand at `positions` `[B]`; tokens `[B, 1]`."""
        table = self._embedded(max(positions) + 1)
        own = table[torch.tensor(positions, device=table.device)][:, None]  # [B, 1, D]
        kind, pad = self._model.config.model_type, self._model.config.pad
        padding = (tokens == pad)[..., None] if kind in READS_PADDING else None

        def placed(module: nn.Module, given: object, out: Tensor) -> Tensor:
            return own if padding is None else torch.where(padding, out, own)

        with _hooked(self._decoder.embed_positions, placed):
            yield

    def _embedded(self, count: int) -> Tensor:
        """The first positions `[T, D]`, at least `count`: what the decoder itself takes for a text
        of that length. Each type has another way to compute them.
        """
        if self._table is None or len(self._table) < count:
            size = max(LEAST_POSITIONS, 2 ** (count - 1).bit_length())
            size = min(size, max(count, self._model.config.target_positions))
            device = self._model.inner.device
            word = (self._model.config.pad + 1) % self._model.config.vocab_size
            try:
                with _hooked(self._decoder.embed_positions, _stop):
                    self._decoder(torch.full((1, size), word, device=device), use_cache=False)
            except _Embedded as found:
                self._table = found.positions.view(size, -1)
        assert self._table is not None
        return self._table


class _Embedded(Exception):
    """Ends a decoder's pass once its positions are known."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions


def _stop(module: nn.Module, given: object, out: Tensor) -> Tensor:
    raise _Embedded(out)


@contextmanager
def _hooked(module: nn.Module, hook: Callable[[nn.Module, Any, Tensor], Tensor]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _seeing(layers: Iterable[nn.Module], seen: Tensor) -> Iterator[None]:
    """Meanwhile each decoder layer attends to the places of the cache that are `seen` `[B, T]`, by
    the mask that is its second argument.
    """

    def masked(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, mask, *others = given
        assert mask is None, f"{type(module).__name__} has a mask of its own"
        mask = hidden.new_zeros(seen[:, None, None].shape)  # [B, 1, 1, T]
        mask = mask.masked_fill(~seen[:, None, None], torch.finfo(hidden.dtype).min)
        return hidden, mask, *others

    handles = [layer.register_forward_pre_hook(masked) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stacked(one: Tensor, other: Tensor, *, left: bool) -> Tensor:
    """`[B, K, T, E]` and `[C, K, U, E]` -> `[B + C, K, max(T, U), E]`, the shorter ones padded with
    zeros.
    """
    length = max(one.shape[2], other.shape[2])
    padded = []
    for part in (one, other):
        more = length - part.shape[2]
        padded.append(functional.pad(part, (0, 0, more, 0) if left else (0, 0, 0, more)))
    return torch.cat(padded)
