"""Sums of log-likelihoods over samples that are no stretch of a stream: preferences, pairs,
labelled texts. Dealt over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.data.loader import Batch, fixed_batches
from ingot.data.samples import Samples
from ingot.evaluate.dealing import Floats, together
from ingot.evaluate.subject import Subject
from ingot.models.device import computing_in
from ingot.models.native.head import IGNORE, TokenFunction
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleSums:
    """One of each for each sample, in the order of the rows, all [N]. Of a preference, the chosen
    answer, and the rejected one beside.
    """

    nats: Floats
    """Negative log-likelihood of what is learnt."""
    targets: Floats
    bytes: Floats
    """Of the text that the targets spell; 0 for labels."""
    rejected_nats: Floats
    rejected_targets: Floats

    @property
    def margins(self) -> Floats:
        """By how many nats the chosen answer is likelier than the rejected one."""
        return self.rejected_nats - self.nats


def sample_sums(subject: Subject, rows: Samples, count: int, title: str) -> SampleSums:
    """The sums of the first `count` samples; the same on every rank. Collective.

    Raises:
        WrongInput: a preference has nothing to predict on one of its sides.
    """
    preference, text = (
        subject.recipe.documents == "preference",
        subject.recipe.documents != "labelled",
    )
    table = np.zeros((count, 5), np.float64)
    for batch, values in over_samples(subject, rows, count, title, CrossEntropy().token):
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
                _bytes(batch.labels[first], subject.tokenizer)
                if text
                else torch.zeros(len(live)).double()
            ),
        ]
        columns += (
            [nats[second], targets[second]] if preference else [torch.zeros(len(live)).double()] * 2
        )
        table[batch.rows[live].numpy()] = torch.stack(columns, dim=1)[live].numpy()
    sums = SampleSums(*together(table, subject.mesh).T)
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


def over_samples(
    subject: Subject, rows: Samples, count: int, title: str, token: TokenFunction
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's batches of the first `count` samples, on the host, with the values of `token` for
    each label.
    """
    mesh, micro_batch = subject.mesh, subject.recipe.evaluate.micro_batch
    mine = range(count * mesh.rank // mesh.world, count * (mesh.rank + 1) // mesh.world)
    with subject.progress(title, count, "samples") as progress:
        for number, batch in enumerate(
            subject.pieces(fixed_batches(rows, mine, micro_batch)), start=1
        ):
            there = batch.to(subject.device, non_blocking=True)
            # A row that is one document needs no mask; decided on the host, where the batch still
            # is.
            segments = None if bool((batch.segments == 1).all()) else there.segments
            with torch.no_grad(), computing_in(subject.compute, subject.device):
                values = subject.model(there.tokens, there.positions, segments, there.labels, token)
            yield batch, values
            progress.update(min(number * micro_batch * mesh.world, count))


def _bytes(labels: Tensor, tokenizer: Tokenizer) -> Tensor:
    return torch.tensor(
        [len(tokenizer.decode(row[row != IGNORE].numpy()).encode()) for row in labels],
        dtype=torch.float64,
    )
