"""The answers of a rollout, the same on every rank, and the micro-batches made of them.

What is divided by, which groups are dropped and what a token weighs follow from all answers
together: how they are dealt over ranks and micro-batches changes no number.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.loader import Batch
from ingot.data.batches.prompts import Prompt
from ingot.data.batches.rows import IGNORE
from ingot.data.batches.samples import padded
from ingot.objectives.grpo import AnswerValues, group_advantages
from ingot.parallel.mesh import Mesh

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RolloutAnswers:
    """N = P x G answers of at most L tokens with R rewards, groups one after another. No token is
    read from padding: `lengths` says how many there are.
    """

    prompts: npt.NDArray[np.int64]
    """The row of each prompt, [P]."""
    ids: npt.NDArray[np.int64]
    """[N, L]."""
    lengths: npt.NDArray[np.int64]
    """[N]."""
    logprobs: npt.NDArray[np.float32]
    """Of each token under the policy that it was sampled from, as the sampler had it, [N, L]."""
    old: npt.NDArray[np.float32]
    """What the ratio is measured from: `logprobs`, or what the trainer computed instead, [N, L]."""
    finished: npt.NDArray[np.bool_]
    """Whether an answer ended by itself, [N]."""
    rewards: npt.NDArray[np.float64]
    """The weighted sums, [N]."""
    each: npt.NDArray[np.float64]
    """The single rewards, NaN where one failed, [N, R]."""

    def pack(self) -> str:
        """As text, for a checkpoint's marker."""
        stream = io.BytesIO()
        np.savez_compressed(stream, **{one.name: getattr(self, one.name) for one in fields(self)})
        return base64.b64encode(stream.getvalue()).decode()

    @classmethod
    def unpack(cls, text: str) -> RolloutAnswers:
        """What `pack` wrote."""
        with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as found:
            return cls(**{one.name: found[one.name] for one in fields(cls)})

    def groups(self, numbers: npt.NDArray[np.int64]) -> RolloutAnswers:
        """Some groups, by their numbers."""
        size = len(self.lengths) // len(self.prompts)
        rows = (numbers[:, None] * size + np.arange(size)).reshape(-1)
        return RolloutAnswers(
            **{
                one.name: getattr(self, one.name)[numbers if one.name == "prompts" else rows]
                for one in fields(self)
            }
        )

    @property
    def equal(self) -> npt.NDArray[np.bool_]:
        """Which groups have equal rewards, [P]."""
        rewards = torch.from_numpy(self.rewards).view(len(self.prompts), -1)
        return group_advantages(rewards).equal.numpy()

    def everywhere(self, mesh: Mesh) -> RolloutAnswers:
        """The answers of all ranks, of which each has those of `share_of`; `prompts` are those of
        all of them already. Collective.
        """
        if mesh.world == 1:
            return self
        count = round(mesh.agree(float(len(self.lengths)))[0])

        def joined(own: Array) -> Array:
            whole = np.zeros((count, *own.shape[1:]), own.dtype)
            whole[share_of(count, mesh)] = own
            wide = torch.from_numpy(whole.astype(np.uint8) if own.dtype == np.bool_ else whole)
            return mesh.all_sum(wide).numpy().astype(own.dtype)

        every: dict[str, Any] = {
            one.name: joined(getattr(self, one.name))
            for one in fields(self)
            if one.name != "prompts"
        }
        return RolloutAnswers(prompts=self.prompts, **every)


def joined_answers(sets: Sequence[RolloutAnswers]) -> RolloutAnswers:
    """Several rollouts as one."""
    return RolloutAnswers(
        **{
            one.name: np.concatenate([getattr(each, one.name) for each in sets])
            for one in fields(RolloutAnswers)
        }
    )


def unequal_first(answers: RolloutAnswers, count: int) -> RolloutAnswers:
    """The first `count` groups of unequal rewards, filled up with the first of the others."""
    order = np.argsort(answers.equal, kind="stable")
    return answers.groups(np.sort(order[:count]))


def share_of(count: int, mesh: Mesh) -> slice:
    """The part of `count` things in a row that falls to this rank."""
    return slice(count * mesh.rank // mesh.world, count * (mesh.rank + 1) // mesh.world)


class AnswerShares(NamedTuple):
    """What all answers of a step decide together."""

    advantages: npt.NDArray[np.float64]
    """[N]."""
    weights: npt.NDArray[np.float64]
    """Of each token of an answer in the loss, [N]; 0 takes the answer out."""
    kept: npt.NDArray[np.int64]
    """The answers that are trained on, longest first."""
    divisor: int
    """What the loss is divided by."""


def shares_of(answers: RolloutAnswers, settings: GRPOSettings) -> AnswerShares:
    """Advantages, weights and divisor of a step. Without a penalty for leaving the reference,
    groups of equal rewards are left out of the computation, and count in the divisor all the same.
    """
    count = len(answers.lengths)
    found = group_advantages(
        torch.from_numpy(answers.rewards).view(-1, settings.group),
        by_deviation=settings.scale == "deviation",
    )
    weights = np.ones(count)
    if settings.overlong == "mask":
        weights[~answers.finished] = 0.0
    if settings.normalise == "fixed":
        divisor = count * settings.max_answer_tokens
    elif settings.normalise == "tokens":
        divisor = int(answers.lengths[weights > 0].sum())
    else:
        divisor, weights = count, weights / answers.lengths
    teaches = np.repeat(~found.equal.numpy() | (settings.kl > 0), settings.group) & (weights > 0)
    kept = np.flatnonzero(teaches)
    kept = kept[np.argsort(-answers.lengths[kept], kind="stable")]
    advantages = found.values.reshape(-1).numpy()
    return AnswerShares(advantages, weights, kept, max(1, divisor))


def make_batches(
    answers: RolloutAnswers,
    settings: GRPOSettings,
    read: Callable[[Sequence[int]], list[Prompt]],
    seq_len: int,
    micro_batch: int,
    mesh: Mesh,
) -> list[Batch]:
    """This rank's micro-batches of the answers that are trained on, equally many on every rank.

    Rows are as long as their answers need, but for a pipeline, whose stages are made for one shape
    and number of micro-batches. Padding lies behind the answers, where causal attention never
    looks, and has no labels.
    """
    shares, data = shares_of(answers, settings), mesh.data
    mine = shares.kept[data.rank :: data.world]
    staged = mesh.pipeline.world > 1
    trained = len(answers.lengths) if staged else len(shares.kept)
    passes = max(1, math.ceil(math.ceil(trained / data.world) / micro_batch))
    tokens = int(answers.lengths[shares.kept].sum())
    share = shares.divisor / tokens if tokens else 0.0
    prompts = read([int(answers.prompts[number // settings.group]) for number in mine])
    batches: list[Batch] = []
    for index in range(passes):
        some = slice(index * micro_batch, (index + 1) * micro_batch)
        made = _batch(
            answers, shares, share, mine[some], prompts[some], seq_len, micro_batch, wide=staged
        )
        # One batch states the divisor of the whole step, on all ranks that share its rows.
        made = replace(made, count=shares.divisor if data.is_main and index == 0 else 0)
        batches.append(made)
    return batches


def _batch(
    answers: RolloutAnswers,
    shares: AnswerShares,
    share: float,
    numbers: npt.NDArray[np.int64],
    prompts: Sequence[Prompt],
    seq_len: int,
    count: int,
    *,
    wide: bool,
) -> Batch:
    """One micro-batch of `count` rows, the last ones padding; `wide` ones of `seq_len` tokens."""
    lengths = answers.lengths[numbers]
    rows = [
        np.concatenate((prompt.ids, answers.ids[number, :length]))
        for number, length, prompt in zip(numbers, lengths, prompts, strict=True)
    ]
    tokens, _ = padded(rows, count, seq_len, 0)
    if wide:
        tokens = np.pad(tokens, ((0, 0), (0, seq_len - tokens.shape[1])))
    labels = np.full_like(tokens, IGNORE)
    values = np.zeros((*tokens.shape, len(AnswerValues._fields)), np.float32)
    for row, (number, length, prompt) in enumerate(zip(numbers, lengths, prompts, strict=True)):
        # The token before each of the answer's predicts it.
        at = slice(len(prompt.ids) - 1, len(prompt.ids) - 1 + length)
        labels[row, at] = answers.ids[number, :length]
        values[row, at] = np.stack(
            np.broadcast_arrays(
                shares.advantages[number],
                answers.logprobs[number, :length],
                answers.old[number, :length],
                0.0,
                shares.weights[number],
                share,
            ),
            axis=-1,
        )
    sizes = np.zeros((count, 1), np.int64)
    sizes[: len(rows), 0] = [len(row) for row in rows]
    names = np.full(count, -1)
    names[: len(numbers)] = numbers
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()),
        torch.from_numpy((np.arange(tokens.shape[1]) < sizes).astype(np.int64)),
        torch.from_numpy(names.astype(np.int64)),
        values=torch.from_numpy(values),
        causal=True,
    )
