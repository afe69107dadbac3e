"""The decoding step of the native decoder, recorded: on a GPU a token of a small batch takes as
long as Python needs to launch its kernels, unless they are launched all at once.

A step is recorded for sizes: of rows, and of the tokens that they may see, both a little more than
are needed. Before it is used, what it gives is compared with what the same step gave unrecorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.base.errors import one_line
from ingot.base.progress import say
from ingot.models.generation.cache import KVCache
from ingot.models.generation.windows import StepWindow
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Experts

ROWS, TOKENS = 8, 256
"""From these numbers on sizes are multiples of them."""
Record = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Some work on tensors -> a call that does the same work again on the same tensors, as
`GraphRecorder`.
"""
ROUNDING = 16
"""Units in the last place of the largest logit, in the type of the weights, that a recorded step
may differ by: libraries may choose another kernel while they are recorded.
"""


class _Size(NamedTuple):
    rows: int
    length: int


@dataclass(frozen=True)
class _Step:
    inputs: Tensor
    """Tokens, positions and rows, `[3, B]`."""
    play: Callable[[], Tensor]


def can_be_recorded(model: Decoder) -> bool:
    """Whether a step of this model launches the same kernels whatever its tokens are."""
    return all(part.launches_alike for part in model.modules() if isinstance(part, Experts))


class RecordedSteps:
    """Steps of one token of the first rows of `cache`, made for recorded steps, by `model`."""

    def __init__(self, model: Decoder, cache: KVCache, record: Record) -> None:
        self._model, self._cache, self._record = model, cache, record
        self._steps: dict[_Size, _Step] = {}
        self._changes = cache.changes
        self._works = True

    def logits(self, tokens: Sequence[int], starts: Sequence[int]) -> Tensor | None:
        """Logits `[B, V]` behind a token of each of the first rows, at these positions; None where
        steps cannot be recorded, which is said once, and under autocast, whose copies of weights
        are gone before the step is played again.
        """
        if not self._works or torch.is_autocast_enabled(self._model.head_weight.device.type):
            return None
        size = self._size(len(tokens), max(starts) + 1)
        self._cache.reserve(*size)
        if self._changes != self._cache.changes:
            self._forget()
        spare = size.rows - len(tokens)
        rows = [*range(len(tokens)), *[self._cache.spare_row] * spare]
        inputs = torch.tensor([[*tokens, *[0] * spare], [*starts, *[0] * spare], rows])
        step = self._steps.get(size)
        if step is None:
            return self._first(size, inputs, len(tokens))
        step.inputs.copy_(inputs)
        return step.play()[: len(tokens)]

    def _forget(self) -> None:
        self._steps.clear()
        self._changes = self._cache.changes

    def _size(self, rows: int, length: int) -> _Size:
        power = 1 << (rows - 1).bit_length()
        rows = power if power < ROWS else _multiple(rows, ROWS)
        # From 1,024 tokens on at most half as many again are read as there are.
        length = _multiple(length, max(TOKENS, (1 << (length - 1).bit_length()) // 4))
        return _Size(min(rows, self._cache.max_rows), min(length, self._cache.max_length))

    def _first(self, size: _Size, inputs: Tensor, count: int) -> Tensor:
        """The logits of the first step of a size, which is recorded on the way."""
        given = inputs.to(self._model.head_weight.device)

        def work() -> Tensor:
            tokens, positions, rows = given
            window = StepWindow(self._cache, rows, positions[:, None], size.length)
            hidden = self._model.hidden(tokens[:, None], positions[:, None], cache=window)
            return self._model.logits(hidden[:, 0])

        expected = work()[:count]
        if self._changes != self._cache.changes:
            self._forget()  # the cache has grown for it
        if not bool(expected.isfinite().all()):
            return expected  # of a request that ends so; a later step can be compared
        try:
            play = self._record(work)
            found = play()[:count]
        except RuntimeError as error:
            return self._given_up(one_line(error, 200), expected)
        eps = torch.finfo(self._model.head_weight.dtype).eps
        apart = float(ROUNDING * eps * expected.abs().max())
        if not torch.allclose(found, expected, rtol=0.0, atol=apart, equal_nan=True):
            return self._given_up("it gives other numbers than the same kernels alone", expected)
        self._steps[size] = _Step(given, play)
        return expected

    def _given_up(self, reason: str, logits: Tensor) -> Tensor:
        self._works = False
        self._forget()
        say(
            f"decoding cannot be recorded as a CUDA graph ({reason}); it goes on kernel by kernel,"
            " more slowly for few requests; serve.eager=true does so from the start"
        )
        return logits


def _multiple(size: int, of: int) -> int:
    """The least multiple of `of` that is at least `size`."""
    return -(-size // of) * of
