"""Logits on held-out records, as training computes them (packed rows) and as transformers does (one
record at a time), and how far they differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ingot.config.models.source import ModelKind
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import IGNORE, Rows, Samples
from ingot.models.kinds import AnyModel
from ingot.models.native.head import LogitsView
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.verify.export.transformers import TransformersModel

TOKENS = 256
"""Rows are used until they have so many tokens, and about so many logits are compared."""
MAX_ROWS = 64
MICRO_BATCH = 4

LOGIT_TOLERANCE = 1e-4
"""Largest difference of a logit between two implementations with the same float32 weights, as a
share of the largest logit. Another order of summation stays a hundred times below it; another
rotary base, epsilon or mask exceeds it.
"""
LOGPROB_TOLERANCE = 1e-4
"""Additional tolerance of a log-probability in nats, for the sum over the vocabulary and for the
server's rounding of numbers.
"""
ROUNDING = {"bf16": 2.0**-8, "fp32": 2.0**-24}
"""Largest relative change of a weight when it is rounded to an export type."""
MEAN_ROUNDING = 0.4
"""The root mean square of those changes, as a share of the largest."""
MERGED_FP32 = 1e-5
"""Relative difference in norm between an adapter folded into its weights and one beside them, both
in float32.
"""
ROUNDINGS_PER_PRODUCT = 6
"""Roundings in one matrix product where weights, inputs and outputs are bf16, in both of two
computations.
"""


def logit_bound(size: float) -> float:
    """The largest allowed difference of logits of magnitude up to `size`."""
    return LOGIT_TOLERANCE * size


def merged_bound(export_type: str, products: int) -> float:
    """The relative change in norm of logits that is allowed when an adapter is folded into weights
    which are then rounded, compared with weights and adapter apart.

    Each of the n products that a token passes is off by 0.4 of the rounding on average; the errors
    are independent, so they add up to sqrt(n) times that. Twice as much is allowed, for the
    operations in between.
    """
    return MERGED_FP32 + 2 * MEAN_ROUNDING * ROUNDING[export_type] * math.sqrt(products)


def computed_bound(products: int, size: float) -> float:
    """The same for log-probabilities, in nats, of two computations in bf16 of logits whose root
    mean square is `size`.
    """
    return merged_bound("bf16", ROUNDINGS_PER_PRODUCT * products) * max(1.0, size)


@dataclass(frozen=True)
class HeldOutRecord:
    """One input of transformers: a document of a row, one side of a preference, a pair, a text to
    classify, or one with masks.
    """

    row: int
    begin: int
    """The position of its first token in the row."""
    tokens: list[int]
    targets: list[int]
    kept: list[int]
    """The positions whose logits are compared: in `targets` if there are any; only 0 for a text to
    classify.
    """


@dataclass(frozen=True)
class HeldOutRows:
    """The first held-out rows in training's batches, the positions that are compared, and the same
    as single records in the same order.
    """

    batches: list[Batch]
    keep: list[Tensor]
    """For each batch, shaped like its labels: bool."""
    records: list[HeldOutRecord]

    @property
    def count(self) -> int:
        return sum(len(record.kept) for record in self.records)

    def place(self, index: int, tokenizer: Tokenizer) -> str:
        """Describe where compared position number `index` is."""
        for record in self.records:
            if index < len(record.kept):
                at = record.kept[index]
                token = (record.targets or record.tokens)[at]
                return (
                    f"row {record.row}, position {record.begin + at}, token"
                    f" {tokenizer.token(token)!r}"
                )
            index -= len(record.kept)
        raise IndexError(index)


def held_out(rows: Rows | Samples, kind: ModelKind) -> HeldOutRows:
    """The first rows with about `TOKENS` tokens, at least one row."""
    counts: list[int] = []
    for batch in fixed_batches(rows, range(min(len(rows), MAX_ROWS)), 1):
        counts.append(int(_has_logits(batch, kind).sum()))
        if sum(counts) >= TOKENS:
            break
    step = max(1, sum(counts) // TOKENS)
    batches = list(fixed_batches(rows, range(len(counts)), MICRO_BATCH))
    keep = [_compared_positions(_has_logits(batch, kind), step) for batch in batches]
    records = [
        record
        for batch, mask in zip(batches, keep, strict=True)
        for record in _records(batch, mask, kind)
    ]
    return HeldOutRows(batches, keep, records)


def _has_logits(batch: Batch, kind: ModelKind) -> Tensor:
    """A mask of what has logits to compare: positions, shaped like the labels; of texts to classify
    or to score one a row.
    """
    if kind == "decoder":
        return batch.segments != 0
    known = batch.labels != IGNORE
    return known.any(dim=1) if kind == "encoder" and known.ndim == 2 else known


def _compared_positions(live: Tensor, step: int) -> Tensor:
    """Every `step`-th position, so that the end of a long row is compared too."""
    if live.ndim == 1:
        return live
    return live & (torch.arange(live.shape[1]) % step == step - 1)


def _records(batch: Batch, keep: Tensor, kind: ModelKind) -> list[HeldOutRecord]:
    found = []
    per_row = batch.tokens.shape[0] // batch.rows.shape[0]
    for row, (tokens, segments) in enumerate(zip(batch.tokens, batch.segments, strict=True)):
        number = int(batch.rows[row // per_row])
        for segment in sorted(set(segments.tolist()) - {0}):
            places = (segments == segment).nonzero()[:, 0]
            ids, targets = tokens[places].tolist(), list[int]()
            if kind == "decoder":
                kept = keep[row, places].nonzero()[:, 0].tolist()
            elif kind == "seq2seq":
                targets = batch.labels[row][batch.labels[row] != IGNORE].tolist()
                kept = keep[row].nonzero()[:, 0].tolist()
            elif kind == "masked":
                kept = keep[row, places].nonzero()[:, 0].tolist()
            else:
                kept = [0] if keep[row] else []
            found.append(HeldOutRecord(number, int(places[0]), ids, targets, kept))
    return found


class _LogitCollector:
    """A per-token function that keeps the logits of the tokens selected by `extras`."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        assert extras is not None
        self.parts.append(view.logits()[extras])
        return torch.zeros(labels.shape, device=labels.device)


@torch.no_grad()
def training_logits(model: AnyModel, held: HeldOutRows) -> Tensor:
    """The logits `[N, V]` (float32) of the compared positions, computed as in training, with
    several documents in a row.
    """
    collected = _LogitCollector()
    for batch, keep in zip(held.batches, held.keep, strict=True):
        plain = bool((batch.segments == batch.segments[:, :1]).all())
        labels = batch.labels
        if labels.shape == keep.shape:
            # The head may leave out tokens without a label.
            labels = labels.masked_fill(keep & (labels == IGNORE), 0)
        model(
            batch.tokens,
            batch.positions,
            None if plain else batch.segments,
            labels,
            collected.token,
            keep,
        )
    return torch.cat(collected.parts)


def transformers_logits(model: TransformersModel, held: HeldOutRows) -> Tensor:
    """The logits of the same positions by transformers, one record at a time."""
    return torch.cat(
        [
            model.logits(record.tokens, record.targets)[record.kept]
            for record in held.records
            if record.kept
        ]
    )


@dataclass(frozen=True)
class LogitDifference:
    """The difference of two sets of logits `[N, V]`."""

    largest: float
    at: int
    """The index of the position where it is largest."""
    size: float
    """The largest logit of the second."""
    relative: float
    """The norm of the difference relative to the norm of the second."""


def logit_difference(one: Tensor, other: Tensor) -> LogitDifference:
    """Compare two sets of logits; NaN counts as an infinite difference."""
    gap = (one - other).abs().nan_to_num(nan=math.inf)
    per_token = gap.amax(dim=1)
    at = int(per_token.argmax())
    relative = float(gap.double().norm() / other.double().norm().clamp_min(1e-30))
    return LogitDifference(float(per_token[at]), at, float(other.abs().max()), relative)


def prompt_prefixes(held: HeldOutRows, count: int, longest: int) -> list[Sequence[int]]:
    """The first halves of some held-out documents, as prompts; at most `longest` tokens each."""
    long_enough = [record.tokens for record in held.records if len(record.tokens) > 1] or [
        record.tokens for record in held.records
    ]
    return [tokens[: max(1, min(len(tokens) // 2, longest))] for tokens in long_enough[:count]]
