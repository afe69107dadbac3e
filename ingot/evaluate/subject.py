"""The model under evaluation with all that measuring it needs, and the result of a task. The same
for a model from a folder and for one in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import Progress
from ingot.base.reports import Metric
from ingot.config.models.source import ModelKind
from ingot.config.recipe import Recipe
from ingot.models.device import Compute
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.tokenizer import Tokenizer

Item = TypeVar("Item")


class EvaluationInterrupted(Exception):
    """The evaluation was stopped, on every rank, because one of them was asked to."""


class NotJudged(Failed):
    """What judges the model's answers failed, such as a server that is down, so that there is no
    figure. The model is not to blame: a training keeps it before it ends.
    """


@dataclass(frozen=True)
class EvalModelInfo:
    """What is known of a model before its weights are loaded: enough to refuse tasks that cannot be
    measured.
    """

    recipe: Recipe
    kind: ModelKind
    tokenizer: Tokenizer
    positions: int
    """The number of tokens that the model can read at once."""
    where: str
    """What to call it in messages."""

    def require_kind(self, what: str, *kinds: ModelKind) -> None:
        """Raises WrongInput if the model is of none of `kinds`; `what` names the task in the
        message.
        """
        if self.kind not in kinds:
            raise WrongInput(
                f"{what} is for models of kind {' or '.join(kinds)}, {self.where} is of kind"
                f" {self.kind}; remove it, or give another model"
            )

    def check_room(self, knob: str, place: str, prompt: int, answer: int) -> None:
        """Raises WrongInput if a prompt and an answer of so many tokens do not fit: a decoder holds
        both together, a model with an encoder each separately. `place` names the prompt.
        """
        if (prompt + answer if self.kind == "decoder" else max(prompt, answer)) > self.positions:
            raise WrongInput(
                f"{knob}: {place} has {prompt:,} tokens, which with max_tokens {answer} exceeds the"
                f" {self.positions:,} positions of {self.where}; leave it out, or lower max_tokens"
            )


@dataclass(frozen=True)
class EvalModel:
    """A model with all that measuring it needs. `model` is in evaluation mode and stays so."""

    recipe: Recipe
    model: AnyModel
    kind: ModelKind
    tokenizer: Tokenizer
    eos: frozenset[int]
    """Tokens that end a generated text."""
    compute: Compute
    mesh: Mesh
    """The ranks among which items are distributed."""
    where: str
    """What to call it in messages."""
    quiet: bool = False
    """Show no progress of its own."""
    should_stop: Callable[[], bool] | None = None
    """Called before each piece of work; True stops the evaluation. None: never stop. If all ranks
    work in lockstep, it must answer the same on all of them.
    """
    job: Mesh | None = None
    """All ranks that measure, where they are more than those of `mesh`: each part of them then does
    all items.
    """
    in_step: bool = False
    """Whether all of them do the same at once, as each forward pass of one needs the others."""

    @property
    def everyone(self) -> Mesh:
        """All ranks that measure: what costs something, or may differ from one time to the next,
        is done once among them.
        """
        return self.job or self.mesh

    def all_say(self, yes: bool) -> bool:
        """Whether every rank that works in step with this one says yes; if there are none, this
        rank's own answer.
        """
        return not any(self.everyone.agree(float(not yes))) if self.in_step else yes

    @property
    def info(self) -> EvalModelInfo:
        return EvalModelInfo(
            self.recipe,
            self.kind,
            self.tokenizer,
            int(self.model.config.max_position_embeddings),
            self.where,
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def decoder(self) -> Decoder:
        """The model as a decoder, which it must be."""
        assert isinstance(self.model, Decoder)
        return self.model

    def not_finite(self, task: str) -> Failed:
        """The error of a task where the model gives numbers that are not finite."""
        return Failed(
            f"{task}: {self.where} gives numbers that are not finite; train it again with a lower"
            " train.optimizer.lr"
        )

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """Iterate over `items` until this rank is asked to stop; at the end all ranks agree on
        whether any of them was.

        Raises:
            EvaluationInterrupted: some rank was asked to stop; raised on all ranks, so that none
                waits for another's results.
        """
        if self.should_stop is None:
            yield from items
            return
        cut = False
        for item in items:
            if cut := self.should_stop():
                break
            yield item
        if any(self.everyone.agree(float(cut))):
            raise EvaluationInterrupted

    def progress(self, title: str, total: int, unit: str) -> Progress:
        """A progress display, shown by rank 0 only, since the ranks' shares are about equal."""
        return Progress(title, total, unit, quiet=self.quiet or not self.mesh.is_main)


@dataclass(frozen=True)
class TaskResult:
    """The result of a task."""

    metrics: dict[str, Metric]
    """By key, `TASK/metric`."""
    examples: list[dict[str, Any]]
    """One per item, in order: the item and the model's result."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """`TASK/metric/NAME`: the value of a simple baseline on the same items; for information, never
    for the gate.
    """
    missing: Mapping[str, str] = field(default_factory=dict)
    """`TASK/metric`: why these items do not tell it."""


class OpenTask(Protocol):
    """A task whose items have been read and checked; it can be measured any number of times."""

    def measure(self, subject: EvalModel) -> TaskResult:
        """Collective: every rank calls it, all get the same result."""
        ...
