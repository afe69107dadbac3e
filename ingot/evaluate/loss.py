"""The loss of a model on rows and on samples: sums over tokens, distributed over ranks, with the
same result on any number of ranks.

Used by `ingot evaluate` and, while training, by `ingot train`. Changes neither the model nor its
mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.evaluate.distribute import Floats, sum_over_ranks
from ingot.evaluate.subject import EvalModel
from ingot.models.device import Compute, computing_in
from ingot.models.kinds import AnyModel
from ingot.models.native.head import IGNORE, TokenFunction
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class SegmentLosses:
    """Sums over segments in the order of rows; a segment is the part of one row that belongs to one
    document. All [N].
    """

    nll: npt.NDArray[np.float64]
    """Negative log-likelihood of its targets in nats."""
    targets: npt.NDArray[np.int64]
    """The number of its tokens that predict a token of the same document."""
    tokens: npt.NDArray[np.int64]
    ends_document: npt.NDArray[np.bool_]
    """Whether the document ends with it, rather than continuing in the next row."""

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """The index of each segment's document, from 0."""
        return np.cumsum(self.ends_document) - self.ends_document

    def whole(self) -> SegmentLosses:
        """Without the segments of a last document that continues beyond the scored rows."""
        count = int(np.flatnonzero(self.ends_document)[-1]) + 1 if self.ends_document.any() else 0
        return SegmentLosses(
            *(getattr(self, field.name)[:count] for field in fields(SegmentLosses))
        )


def row_losses(
    model: AnyModel, batches: Iterable[Batch], compute: Compute = "fp32"
) -> SegmentLosses:
    """The loss of all tokens of `batches`, summed over segments, without padding (segment 0)."""
    device = next(model.parameters()).device
    parts: list[SegmentLosses] = []
    before: tuple[Tensor, Batch] | None = None
    with torch.no_grad(), computing_in(compute, device):
        for batch in batches:
            # A row that is one document needs no mask; decided on the host, where the batch still
            # is.
            packed = bool((batch.segments != batch.segments[:, :1]).any())
            on_device = batch.to(device, non_blocking=True)
            values = model(
                on_device.tokens,
                on_device.positions,
                on_device.segments if packed else None,
                on_device.labels,
                CrossEntropy().token,
            )
            if before is not None:
                parts.append(_segment_losses(*before))
            # Read back one batch late, while the device computes the next one.
            before = values, batch
    if before is not None:
        parts.append(_segment_losses(*before))
    return _joined(parts)


def _segment_losses(values: Tensor, batch: Batch) -> SegmentLosses:
    time = batch.tokens.shape[1]
    segments, labels = batch.segments.numpy().ravel(), batch.labels.numpy().ravel()
    begins = np.diff(segments, prepend=-1) != 0
    begins[::time] = True
    starts = np.flatnonzero(begins)
    tokens = np.diff(starts, append=len(segments))
    nll = np.add.reduceat(values.cpu().double().numpy().ravel(), starts)
    targets = np.add.reduceat((labels != IGNORE).astype(np.int64), starts)
    live = segments[starts] > 0
    # A document's last token has no label: the next token belongs to another document.
    ends = labels[starts + tokens - 1] == IGNORE
    return SegmentLosses(nll[live], targets[live], tokens[live], ends[live])


def _joined(parts: list[SegmentLosses]) -> SegmentLosses:
    if not parts:
        none = np.zeros(0, np.int64)
        return SegmentLosses(none.astype(np.float64), none, none, none.astype(np.bool_))
    return SegmentLosses(
        *(
            np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(SegmentLosses)
        )
    )


def score_rows(
    model: AnyModel,
    rows: Rows,
    count: int,
    micro_batch: int,
    compute: Compute,
    mesh: Mesh,
    on_progress: Callable[[int], None] = lambda rows: None,
    until_stopped: Callable[[Iterable[Batch]], Iterable[Batch]] = lambda batches: batches,
) -> SegmentLosses:
    """The loss of the first `count` rows: each rank scores its share and returns its own segments.

    `on_progress` is called with the number of rows done; `until_stopped` may end the iteration
    between batches.
    """
    indices = range(count * mesh.rank // mesh.world, count * (mesh.rank + 1) // mesh.world)

    def reported_batches() -> Iterable[Batch]:
        for number, batch in enumerate(
            until_stopped(fixed_batches(rows, indices, micro_batch)), start=1
        ):
            yield batch
            on_progress(min(number * micro_batch, len(indices)))

    return row_losses(model, reported_batches(), compute)


def gather_segments(mine: SegmentLosses, mesh: Mesh) -> SegmentLosses:
    """The segments of all ranks in the order of rows, on every rank."""
    if mesh.world == 1:
        return mine
    counts = [int(count) for (count,) in mesh.gather([float(len(mine.nll))])]
    everyone = torch.zeros(len(fields(SegmentLosses)), sum(counts), dtype=torch.float64)
    begin = sum(counts[: mesh.rank])
    for number, field in enumerate(fields(SegmentLosses)):
        everyone[number, begin : begin + len(mine.nll)] = torch.from_numpy(
            getattr(mine, field.name).astype(np.float64)
        )
    nll, targets, tokens, ends = mesh.all_sum(everyone).numpy()
    return SegmentLosses(nll, targets.astype(np.int64), tokens.astype(np.int64), ends > 0)


@dataclass(frozen=True)
class SampleLosses:
    """Sums for each sample in the order of the rows, all [N]. For a preference, those of the chosen
    answer, with the rejected one beside it.
    """

    nats: Floats
    """Negative log-likelihood of the targets."""
    targets: Floats
    bytes: Floats
    """The size of the decoded targets; 0 for class labels and masked tokens."""
    rejected_nats: Floats
    rejected_targets: Floats
    ratings: Floats
    """Of rated answers 1 for good ones; 0 for all else."""

    @property
    def margins(self) -> Floats:
        """By how many nats the chosen answer is more likely than the rejected one."""
        return self.rejected_nats - self.nats


def sample_losses(subject: EvalModel, rows: Samples, count: int, title: str) -> SampleLosses:
    """The sums of the first `count` samples; the same on every rank. Collective.

    Raises:
        WrongInput: one side of a preference has no targets.
    """
    preference = subject.recipe.documents == "preference"
    text = subject.recipe.documents not in ("labelled", "masked")
    table = np.zeros((count, 6), np.float64)
    for batch, values in score_samples(subject, rows, count, title, CrossEntropy().token):
        live = batch.rows >= 0
        nats = values.reshape(len(batch.labels), -1).cpu().double().sum(dim=1)
        targets = (batch.labels.reshape(len(batch.labels), -1) != IGNORE).sum(dim=1).double()
        first, second = (
            (slice(0, None, 2), slice(1, None, 2)) if preference else (slice(None), slice(0, 0))
        )
        columns = [
            nats[first],
            targets[first],
            (
                _target_bytes(batch.labels[first], subject.tokenizer)
                if text
                else torch.zeros(len(live)).double()
            ),
        ]
        columns += (
            [nats[second], targets[second]] if preference else [torch.zeros(len(live)).double()] * 2
        )
        columns += [batch.ratings if len(batch.ratings) else torch.zeros(len(live))]
        table[batch.rows[live].numpy()] = torch.stack(columns, dim=1)[live].numpy()
    sums = SampleLosses(*sum_over_ranks(table, subject.mesh).T)
    empty = (
        np.flatnonzero((sums.targets == 0) | (sums.rejected_targets == 0))
        if preference
        else np.zeros(0)
    )
    if len(empty):
        raise WrongInput(
            f"{len(empty):,} of {count:,} held-out preferences have an answer without a token"
            f" within data.seq_len={subject.recipe.data.seq_len}, first number {int(empty[0])};"
            " raise data.seq_len or leave them out"
        )
    return sums


def score_samples(
    subject: EvalModel, rows: Samples, count: int, title: str, token: TokenFunction
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's batches of the first `count` samples, on the host, with the value of `token` for
    each label.
    """
    mesh, micro_batch = subject.mesh, subject.recipe.evaluate.micro_batch
    mine = range(count * mesh.rank // mesh.world, count * (mesh.rank + 1) // mesh.world)
    batches: Iterable[Batch] = fixed_batches(rows, mine, micro_batch)
    if rows.kind == "rated":
        batches = (batch.side(0) for batch in batches)
    with subject.progress(title, count, "samples") as progress:
        for number, batch in enumerate(subject.until_stopped(batches), start=1):
            on_device = batch.to(subject.device, non_blocking=True)
            # A row that is one document needs no mask; decided on the host, where the batch still
            # is.
            segments = None if bool((batch.segments == 1).all()) else on_device.segments
            with torch.no_grad(), computing_in(subject.compute, subject.device):
                values = subject.model(
                    on_device.tokens, on_device.positions, segments, on_device.labels, token
                )
            yield batch, values
            progress.update(min(number * micro_batch * mesh.world, count))


def _target_bytes(labels: Tensor, tokenizer: Tokenizer) -> Tensor:
    return torch.tensor(
        [len(tokenizer.decode(row[row != IGNORE].numpy()).encode()) for row in labels],
        dtype=torch.float64,
    )
