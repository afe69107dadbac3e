"""What is evaluated, and what measuring it gives. The same for a model from a folder and for one in
the midst of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.base.reports import Metric
from ingot.config.recipe import Recipe
from ingot.models.device import Compute
from ingot.models.kinds import AnyModel, ModelKind
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.tokenizer import Tokenizer

Item = TypeVar("Item")


class EvaluationInterrupted(Exception):
    """Measuring was broken off, on every rank: one of them was asked to stop."""


@dataclass(frozen=True)
class EvalModelInfo:
    """What is known of a model before its weights are there: enough to refuse what cannot be
    measured.
    """

    recipe: Recipe
    kind: ModelKind
    tokenizer: Tokenizer
    positions: int
    """Tokens that the model can read at once."""
    where: str
    """What to call it in messages."""

    def require_kind(self, what: str, *kinds: ModelKind) -> None:
        """Raises WrongInput when `what` is for other kinds of models."""
        if self.kind not in kinds:
            raise WrongInput(
                f"{what} is for models of kind {' or '.join(kinds)}, {self.where} is of kind"
                f" {self.kind}; remove it, or give another model"
            )


@dataclass(frozen=True)
class EvalModel:
    """A model with all that measuring it needs. `model` is in evaluation mode, and is left as it
    is.
    """

    recipe: Recipe
    model: AnyModel
    kind: ModelKind
    tokenizer: Tokenizer
    eos: frozenset[int]
    """Tokens that end what it writes."""
    compute: Compute
    mesh: Mesh
    where: str
    """What to call it in messages."""
    quiet: bool = False
    """Show no progress: something else does."""
    should_stop: Callable[[], bool] | None = None
    """Whether to break off, asked before each piece of work; None: never. Where all ranks do the
    same work in lockstep, all must hear the same.
    """

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
        """The model, where it must be a decoder."""
        assert isinstance(self.model, Decoder)
        return self.model

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, as long as nobody is asked to stop. Every rank goes through its own to their
        end, where all of them meet.

        Raises:
            Interrupted: some rank was asked; on all of them, so that none waits for the others'
                results.
        """
        if self.should_stop is None:
            yield from items
            return
        cut = False
        for item in items:
            if cut := self.should_stop():
                break
            yield item
        if any(self.mesh.agree(float(cut))):
            raise EvaluationInterrupted

    def progress(self, title: str, total: int, unit: str) -> Progress:
        """Told by rank 0 for all, since shares are about equal."""
        return Progress(title, total, unit, quiet=self.quiet or not self.mesh.is_main)


@dataclass(frozen=True)
class TaskResult:
    """What a task found."""

    metrics: dict[str, Metric]
    """By key, `TASK/metric`."""
    examples: list[dict[str, Any]]
    """One for each item, in the order of the items: what it was, what came of it."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """`TASK/metric/NAME`: what something simple reaches on the same items; to look at, never to
    gate on.
    """


class OpenTask(Protocol):
    """A task whose items have been read and checked; it may be measured again and again."""

    def measure(self, subject: EvalModel) -> TaskResult:
        """Collective: every rank calls it, and all get the same."""
        ...
