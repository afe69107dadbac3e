"""Log-probabilities of sampled answers as the trainer and the reference have them, and how far the
sampler's are from the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ingot.data.batches.loader import Batch
from ingot.data.batches.rows import IGNORE
from ingot.models.device import Compute, computing_in
from ingot.models.kinds import AnyModel
from ingot.models.native.head import LogitsView
from ingot.objectives.forward import PipelinedBatches, forward, shard_batch
from ingot.objectives.grpo import AnswerValues
from ingot.objectives.protocol import AllSum, Objective
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.rows import row_sharing
from ingot.train.rollout.answers import RolloutAnswers


class RecordedValues:
    """An objective whose values are another's, kept instead of summed."""

    name = "recorded"

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.found: list[tuple[list[int], Tensor]] = []
        """Of each micro-batch the numbers of its rows, and the values of this rank's part."""

    def targets(self, batch: Batch) -> int:
        return self._objective.targets(batch)

    def extras(self, batch: Batch, segments: Tensor | None) -> Tensor | None:
        return self._objective.extras(batch, segments)

    def token(self, view: LogitsView, labels: Tensor, extras: Tensor | None) -> Tensor:
        return self._objective.token(view, labels, extras)

    def reduce(
        self, values: Tensor, batch: Batch, all_sum: AllSum
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.found.append((batch.rows.tolist(), values.float()))
        return values.new_zeros(()), {}


@torch.no_grad()
def with_recomputed(
    answers: RolloutAnswers,
    batches: Sequence[Batch],
    module: nn.Module,
    objective: Objective,
    compute: Compute,
    mesh: Mesh,
) -> RolloutAnswers:
    """The answers with the trainer's log-probabilities for the present weights as the old ones,
    where `batches` have them: the same forward pass as in training. Collective.
    """
    recorder, sharing, was_training = RecordedValues(objective), row_sharing(mesh), module.training
    module.eval()
    if isinstance(module, Pipeline):
        work = PipelinedBatches(recorder, batches, compute, mesh.device, sharing)
        module.run(work, backward=False)
    else:
        for batch in batches:
            forward(module, recorder, batch, compute, mesh.device, sharing)
    module.train(was_training)
    labels = {tuple(batch.rows.tolist()): batch.labels for batch in batches}
    # Ranks that share rows find the same numbers: sums of equal ones are exact in float64.
    found = torch.zeros(2, *answers.logprobs.shape, dtype=torch.float64)
    for rows, part in recorder.found:
        asked = labels[tuple(rows)]
        whole = (part if sharing is None else sharing.whole(part, asked.shape[1])).cpu()
        for number, values, wanted in zip(rows, whole, asked, strict=True):
            if number >= 0:
                told = values[wanted != IGNORE].double()
                found[0, number, : len(told)] = told
                found[1, number, : len(told)] = 1
    total, times = mesh.all_sum(found).numpy()
    old = np.where(times > 0, total / np.maximum(times, 1), answers.logprobs)
    return replace(answers, old=old.astype(np.float32))


@torch.no_grad()
def refer(
    batch: Batch, reference: AnyModel, objective: Objective, compute: Compute, mesh: Mesh
) -> None:
    """Fill in the log-probabilities of the reference. Collective over the ranks that share the rows
    or the reference.
    """
    sharing = row_sharing(mesh)
    there = shard_batch(batch, sharing).to(mesh.device)
    assert batch.values is not None
    with computing_in(compute, mesh.device):
        found = reference(
            there.tokens,
            there.positions,
            None,
            there.labels,
            objective.token,
            there.values,
        )
    if sharing is not None:
        found = sharing.whole(found, batch.tokens.shape[1])
    batch.values[..., AnswerValues._fields.index("reference")] = found.cpu()


def mismatch(answers: RolloutAnswers, kept: npt.NDArray[np.int64], cap: float) -> dict[str, float]:
    """How far the sampler is from the trainer, over the tokens of the answers `kept`.

    sampler/ratio: the mean of p_old / p_sampled. sampler/ratio_error: that of |ratio - 1|, and
    sampler/ratio_error_max its largest value. sampler/truncated: the share of tokens whose ratio
    exceeds `cap`. sampler/kl: an estimate of KL(sampler || trainer), never negative.
    """
    behind = np.arange(answers.ids.shape[1]) < answers.lengths[kept, None]
    if not behind.any():
        return {}
    change = (answers.old[kept].astype(np.float64) - answers.logprobs[kept])[behind]
    ratio = np.exp(change)
    return {
        "sampler/ratio": float(ratio.mean()),
        "sampler/ratio_error": float(np.abs(ratio - 1).mean()),
        "sampler/ratio_error_max": float(np.abs(ratio - 1).max()),
        "sampler/truncated": float((ratio > cap).mean()),
        "sampler/kl": float((np.expm1(change) - change).mean()),
    }
