"""Evaluation during training (the objective on held-out rows, tasks, sample texts), the best result
so far, and early stopping.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.runlog import MetricSink
from ingot.config.identity import changes, measured_with
from ingot.evaluate.generation import complete_prompts
from ingot.evaluate.subject import EvalModel, EvaluationInterrupted, NotJudged
from ingot.evaluate.validation import MetricValues, TaskEvaluator, validation_losses
from ingot.models.parameters import is_sharded
from ingot.parallel.apply import evaluating
from ingot.parallel.mesh import Mesh
from ingot.parallel.shard import is_fsdp
from ingot.tokenizers.chats.encode import stop_tokens
from ingot.train.build import TrainState
from ingot.train.goodput import TimeAccount
from ingot.train.optim.averaging import average_in_place
from ingot.train.optim.schedules import Recurrence
from ingot.train.setup import TrainSetup
from ingot.train.step import StepInfo

SECONDS = "seconds"
"""How long an evaluation took, beside what it measured."""


@dataclass(frozen=True)
class Measured:
    """A metric measured during training, and which direction is better."""

    value: float
    direction: Literal["lower", "higher"] = "lower"


class BestTracker:
    """Tracks one metric: its best value, the step of that, and the number of measurements in a row
    without improvement.
    """

    def __init__(
        self, metric: str, min_delta: float = 0.0, measured_with: Mapping[str, Any] | None = None
    ) -> None:
        self.metric, self.min_delta = metric, min_delta
        self.measured_with = dict(measured_with or {})
        """What values depend on beside the weights (`ingot.config.identity.measured_with`)."""
        self.best: float | None = None
        self.best_step: int | None = None
        self.worse_in_row = 0

    def check(self, measured: Mapping[str, Measured]) -> None:
        """Raises WrongInput if the tracked metric was not measured."""
        if self.metric not in measured:
            raise WrongInput(
                f"the metric {self.metric} is not measured while training; choose one of"
                f" {', '.join(sorted(measured))}"
            )

    def see(self, step: int, measured: Mapping[str, Measured]) -> bool:
        """Record the metrics measured at a step; returns whether the tracked one improved by more
        than `min_delta`.

        Raises:
            WrongInput: the tracked metric was not measured.
        """
        self.check(measured)
        found = measured[self.metric]
        gain = (
            math.inf
            if self.best is None
            else (self.best - found.value) * (1 if found.direction == "lower" else -1)
        )
        improved = math.isfinite(found.value) and gain > self.min_delta
        self.worse_in_row = 0 if improved else self.worse_in_row + 1
        if math.isfinite(found.value) and gain > 0:
            self.best = found.value
            self.best_step = step
        return improved

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs to decide the same way."""
        return {
            "metric": self.metric,
            "measured_with": self.measured_with,
            "best": self.best,
            "best_step": self.best_step,
            "worse_in_row": self.worse_in_row,
        }

    def differs(self, state: Mapping[str, Any] | None) -> str | None:
        """Why the values of a saved state do not compare with those measured from now on, in words;
        None where they do.
        """
        if state is None:
            return "nothing was tracked then"
        if state["metric"] != self.metric:
            return f"{state['metric']} was tracked then"
        return "; ".join(changes(state["measured_with"], self.measured_with)) or None

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]
        self.best_step = state["best_step"]
        self.worse_in_row = state["worse_in_row"]


def subject_of(setup: TrainSetup, train_state: TrainState, mesh: Mesh) -> EvalModel:
    """The model in training, in the form that evaluation takes."""
    eos = frozenset(stop_tokens(setup.tokenizer))
    item_ranks = _item_ranks(train_state, mesh)
    return EvalModel(
        setup.recipe,
        train_state.model,
        setup.model_spec.kind,
        setup.tokenizer,
        eos,
        setup.compute,
        item_ranks,
        "the model in training",
        quiet=True,
        job=mesh,
        in_step=is_sharded(train_state.model),
    )


def _item_ranks(train_state: TrainState, mesh: Mesh) -> Mesh:
    """The ranks among which items are distributed. A sharded model is gathered by collectives in
    each forward pass, so every rank must run equally many: each then processes all items.
    """
    return Mesh(Ranks(), mesh.device) if is_fsdp(train_state.model) else mesh.data


def make_measure(
    setup: TrainSetup,
    train_state: TrainState,
    mesh: Mesh,
    all_asked: Callable[[], bool],
    asked: Callable[[], bool],
) -> Callable[[], dict[str, Measured] | None]:
    """A function that runs an evaluation during training and returns its metrics; None if it was
    interrupted. The function is collective, and gives the same on all ranks.

    `all_asked` is collective and gives the same answer on all ranks; `asked` knows only this rank,
    and is used where items are distributed among all ranks, which then do not run in lockstep.

    Raises:
        WrongInput: a task of `train.evaluate_tasks` cannot be run; raised before training starts.
    """
    knobs, micro_batch = setup.recipe.train, setup.batch.micro_batch
    subject = subject_of(setup, train_state, mesh)
    in_step = subject.mesh.world < mesh.world  # ranks that share weights, in shards or matrices
    watch = TaskEvaluator(
        replace(subject, should_stop=all_asked if in_step else asked), knobs.evaluate_tasks
    )
    held_out = train_state.objectives.held_out

    def weights() -> AbstractContextManager[None]:
        if knobs.average is None or not knobs.average.evaluate:
            return contextlib.nullcontext()
        return average_in_place(train_state.masters, train_state.optimizer)

    def measure() -> dict[str, Measured] | None:
        try:
            with weights(), evaluating(train_state.model):
                found: dict[str, float] = {}
                if setup.recipe.data.holds_out:
                    found = validation_losses(
                        train_state.model,
                        held_out,
                        setup.held_out,
                        knobs.evaluate_rows,
                        micro_batch,
                        setup.compute,
                        mesh,
                        all_asked,
                    )
                tasks = watch()
        except EvaluationInterrupted:
            return None
        # Of ranks that have each done all items, one may have rounded otherwise, and stop alone.
        return mesh.from_main(lambda: measured_of(found, tasks))

    return measure


def measured_of(objective: Mapping[str, float], tasks: MetricValues) -> dict[str, Measured]:
    """What the objective and the tasks have measured, by the name that follows `validation/`.

    Raises:
        WrongInput: two of them have one name, or one has that of the time an evaluation takes.
    """
    if SECONDS in objective:
        raise WrongInput(
            f"the objective's metric {SECONDS} would be logged as validation/{SECONDS}, which is"
            " ingot's own; give it another name in the objective's reduce"
        )
    if taken := sorted(tasks.keys() & {*objective, SECONDS}):
        whose = "ingot's own" if taken[0] == SECONDS else "the objective's"
        raise WrongInput(
            f"a task of train.evaluate_tasks has a metric {taken[0]}, which is {whose}; a task's"
            " metrics are to be called NAME/..., as it is itself, so give it another `name`"
        )
    of_objective = {
        name: Measured(value, "lower" if name == "loss" else "higher")
        for name, value in objective.items()
    }
    of_tasks = {key: Measured(value, direction) for key, (value, direction) in tasks.items()}
    return of_objective | of_tasks


def sample_texts(setup: TrainSetup, train_state: TrainState, mesh: Mesh) -> list[dict[str, str]]:
    """Completions of `evaluate.prompts` by the current model."""
    with evaluating(train_state.model):
        return complete_prompts(subject_of(setup, train_state, mesh), setup.recipe.evaluate.prompts)


@dataclass
class EvaluateHook:
    """Evaluates at the recurrence `every`, and ends training when `stopping` has seen no
    improvement `patience` times in a row. While steps are being skipped an evaluation waits, but
    for that of the step `last`: what is found best is saved, and training may have to roll back to
    the state before the skipped steps.

    `measure` returns None if it was interrupted. No evaluation ends training while `waits` is true.
    """

    measure: Callable[[], Mapping[str, Measured] | None]
    every: Recurrence
    stopping: BestTracker | None
    patience: int
    best: BestTracker | None
    sinks: Sequence[MetricSink]
    account: TimeAccount
    last: int
    waits: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.owes, self._due = False, False
        self.refused: WrongInput | NotJudged | None = None
        """Why the newest evaluation could not be taken; raised by the checkpoint hook, so that the
        steps up to it are not lost.
        """

    @classmethod
    def of(
        cls,
        setup: TrainSetup,
        every: Recurrence,
        measure: Callable[[], Mapping[str, Measured] | None],
        sinks: Sequence[MetricSink],
        account: TimeAccount,
    ) -> EvaluateHook:
        """The hook that the recipe asks for."""
        recipe = setup.recipe
        stop, best = recipe.train.early_stop, recipe.checkpoint.best
        rows = setup.held_out.fingerprint if recipe.data.holds_out else None

        def tracker(metric: str, min_delta: float = 0.0) -> BestTracker:
            return BestTracker(metric, min_delta, measured_with(recipe, metric, rows))

        stopping = None if stop is None else tracker(stop.metric, stop.min_delta)
        patience = 0 if stop is None else stop.patience
        tracked = None if best is None else tracker(best)
        return cls(measure, every, stopping, patience, tracked, sinks, account, setup.last)

    def after_step(self, info: StepInfo) -> bool:
        self._due = self._due or self.every.is_due(info.step)
        if not self._due or (info.step < self.last and float(info.outcome.skipped)):
            return False
        self._due = False
        try:
            self.at(info.step)
        except (WrongInput, NotJudged) as error:
            self.refused, self.owes = error, True
        self.every.restart()
        return self.is_over

    def at(self, step: int) -> None:
        """Evaluate the current model, that of `step`; `owes` says whether it was interrupted."""
        started = time.monotonic()
        with self.account.spending("evaluating", "evaluating"):
            measured = self.measure()
        self.owes = measured is None
        if measured is None:
            return
        trackers = [tracker for tracker in (self.stopping, self.best) if tracker is not None]
        for tracker in trackers:  # all of them before any counts what will be measured once more
            tracker.check(measured)
        for sink in self.sinks:
            numbers: dict[str, float | str] = {
                f"validation/{key}": found.value for key, found in measured.items()
            }
            sink.write(step, {**numbers, f"validation/{SECONDS}": time.monotonic() - started})
        for tracker in trackers:
            tracker.see(step, measured)
        if self.stopping is not None and self.waits():  # then a later evaluation has to end it
            self.stopping.worse_in_row = min(self.stopping.worse_in_row, self.patience - 1)

    @property
    def is_over(self) -> bool:
        return self.stopping is not None and self.stopping.worse_in_row >= self.patience

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far; None unless the recipe tracks the best
        checkpoint.
        """
        return None if self.best is None else self.best.best_step

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to stop at the same step and keep the same checkpoint."""
        trackers = {
            name: tracker.state()
            for name, tracker in (("early_stop", self.stopping), ("best", self.best))
            if tracker is not None
        }
        return {"due": self._due, **trackers}

    def restore(self, step: int, state: Mapping[str, Any]) -> list[str]:
        """Go on with the state saved at `step`; returns, in words, what of it does not count:
        values that were measured otherwise say nothing of which weights are better. Where nothing
        is left to measure, the best of those that compare with one another stays the best.
        """
        self._due, told = state["due"], []
        for knob, tracker in (("train.early_stop", self.stopping), ("checkpoint.best", self.best)):
            if tracker is None:
                continue
            saved = state.get(knob.rpartition(".")[2])
            differs, over = tracker.differs(saved), step >= self.last or self.is_over
            if saved is not None and (
                differs is None or (over and saved["metric"] == tracker.metric)
            ):
                tracker.restore(saved)
            else:
                told.append(
                    f"{knob} {tracker.metric}: evaluations up to step {step:,} do not count"
                    f" ({differs}){', so the last step is exported' if over else ''}"
                )
        return told

    def close(self) -> None:
        pass


@dataclass
class SampleHook:
    """Writes completions of the recipe's prompts as text every `every` steps.

    `complete_prompts` is called on rank 0 only, or where the model is `spread` on all ranks in
    lockstep. It is skipped if `asked` says that training is to stop.
    """

    complete_prompts: Callable[[], list[dict[str, str]]]
    every: int | None
    sinks: Sequence[MetricSink]
    mesh: Mesh
    account: TimeAccount
    asked: Callable[[], bool]
    _: KW_ONLY
    spread: bool = False

    def __post_init__(self) -> None:
        self.owes = False

    def after_step(self, info: StepInfo) -> bool:
        if self.every is not None and info.step % self.every == 0:
            self.at(info.step)
        return False

    def at(self, step: int) -> None:
        """Write completions by the current model, that of `step`; `owes` if a stop was
        requested.
        """
        self.owes = self.asked()
        if self.owes:
            return
        with self.account.spending("evaluating", "evaluating"):
            complete = self.complete_prompts
            samples = complete() if self.spread else self.mesh.from_main(complete)
        for sink in self.sinks:
            sink.write(
                step,
                {
                    f"samples/{number}": f"{one['prompt']} -> {one['completion']}"
                    for number, one in enumerate(samples)
                },
            )

    def close(self) -> None:
        pass
