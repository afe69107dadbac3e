"""What is measured while training runs (the objective on held-out rows, tasks, sample texts), which
measurement was the best so far, and whether it is time to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.runlog import FailSafeSink, JsonLines
from ingot.config.recipe import Recipe
from ingot.evaluate.generation import complete_prompts
from ingot.evaluate.subject import EvalModel, EvaluationInterrupted
from ingot.evaluate.validation import TaskEvaluator, validation_losses
from ingot.parallel.apply import evaluating
from ingot.parallel.mesh import Mesh
from ingot.parallel.shard import is_fsdp
from ingot.tokenizers.chat import stop_tokens
from ingot.train.build import TrainState
from ingot.train.goodput import TimeAccount
from ingot.train.recurrence import Recurrence
from ingot.train.setup import TrainSetup
from ingot.train.step import StepInfo


@dataclass(frozen=True)
class Measured:
    """A number that was measured while training, and which way is better."""

    value: float
    direction: Literal["lower", "higher"] = "lower"


class BestTracker:
    """Follows one metric: its best value, the step of that, and how many measurements in a row were
    no better.
    """

    def __init__(self, metric: str, min_delta: float = 0.0) -> None:
        self.metric, self.min_delta = metric, min_delta
        self.best: float | None = None
        self.best_step: int | None = None
        self.worse_in_row = 0

    def see(self, step: int, measured: Mapping[str, Measured]) -> bool:
        """Take in what was measured at a step; True where it is an improvement.

        Raises:
            WrongInput: the metric is not among what was measured.
        """
        if self.metric not in measured:
            raise WrongInput(
                f"the metric {self.metric} is not measured while training; known are"
                f" {', '.join(sorted(measured))}"
            )
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
        """What a resumed run must know to decide alike."""
        return {
            "metric": self.metric,
            "best": self.best,
            "best_step": self.best_step,
            "worse_in_row": self.worse_in_row,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step, self.worse_in_row = (
            state["best"],
            state.get("best_step"),
            state["worse_in_row"],
        )


def subject_of(plan: TrainSetup, trainee: TrainState, mesh: Mesh) -> EvalModel:
    """The model in training as evaluation sees it."""
    eos = frozenset(stop_tokens(plan.tokenizer))
    dealt = _dealt_over(trainee, mesh)
    return EvalModel(
        plan.recipe,
        trainee.model,
        plan.model_spec.kind,
        plan.tokenizer,
        eos,
        plan.compute,
        dealt,
        "the model in training",
        quiet=True,
    )


def _dealt_over(trainee: TrainState, mesh: Mesh) -> Mesh:
    """The ranks that items are dealt over. Where weights are gathered for each use, all ranks must
    use them equally often, so each does all.
    """
    return Mesh(Ranks(), mesh.device) if is_fsdp(trainee.model) else mesh.data


def measuring(
    plan: TrainSetup,
    trainee: TrainState,
    mesh: Mesh,
    all_asked: Callable[[], bool],
    asked: Callable[[], bool],
) -> Callable[[], dict[str, Measured] | None]:
    """What every evaluation while training measures, as a function of nothing; every rank calls it.
    None where it was broken off.

    `all_asked` is collective and says the same on all ranks, `asked` knows of this one alone: where
    items are dealt, ranks do not go in step.

    Raises:
        WrongInput: a task among `train.evaluate_tasks` cannot be done; before anything is trained.
    """
    knobs, micro_batch = plan.recipe.train, plan.batch.micro_batch
    subject = subject_of(plan, trainee, mesh)
    in_step = subject.mesh.world < mesh.data.world
    watch = TaskEvaluator(
        replace(subject, should_stop=all_asked if in_step else asked), knobs.evaluate_tasks
    )
    held_out = trainee.objectives.held_out

    def measure() -> dict[str, Measured] | None:
        try:
            with evaluating(trainee.model):
                found: dict[str, float] = {}
                if plan.recipe.data.holds_out:
                    found = validation_losses(
                        trainee.model,
                        held_out,
                        plan.held_out,
                        knobs.evaluate_rows,
                        micro_batch,
                        plan.compute,
                        mesh,
                        all_asked,
                    )
                tasks = watch()
        except EvaluationInterrupted:
            return None
        of_objective = {
            name: Measured(value, "lower" if name == "loss" else "higher")
            for name, value in found.items()
        }
        return of_objective | {
            key: Measured(value, direction) for key, (value, direction) in tasks.items()
        }

    return measure


def sample_texts(plan: TrainSetup, trainee: TrainState, mesh: Mesh) -> list[dict[str, str]]:
    """Completions of `evaluate.prompts` by the model as it is now."""
    with evaluating(trainee.model):
        return complete_prompts(subject_of(plan, trainee, mesh), plan.recipe.evaluate.prompts)


class EvaluateHook:
    """Measures on held-out data as often as `every` says, and ends training when `stopping` has
    seen no improvement for `patience` times.

    `measure` gives None where it was broken off.
    """

    def __init__(
        self,
        measure: Callable[[], Mapping[str, Measured] | None],
        every: Recurrence,
        stopping: BestTracker | None,
        patience: int,
        best: BestTracker | None,
        sinks: Sequence[JsonLines | FailSafeSink],
        account: TimeAccount,
    ) -> None:
        (
            self.measure,
            self.every,
            self.stopping,
            self.patience,
            self.best,
            self.sinks,
            self.account,
        ) = (measure, every, stopping, patience, best, sinks, account)
        self.owes = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        every: Recurrence,
        measure: Callable[[], Mapping[str, Measured] | None],
        sinks: Sequence[JsonLines | FailSafeSink],
        account: TimeAccount,
    ) -> EvaluateHook:
        """The hook as the recipe asks for it."""
        stop, best = recipe.train.early_stop, recipe.checkpoint.best
        stopping = None if stop is None else BestTracker(stop.metric, stop.min_delta)
        patience = 0 if stop is None else stop.patience
        tracked = None if best is None else BestTracker(best)
        return cls(measure, every, stopping, patience, tracked, sinks, account)

    def after_step(self, info: StepInfo) -> bool:
        if not self.every.is_due(info.step):
            return False
        self.at(info.step)
        self.every.begin_anew()
        return self.is_over

    def at(self, step: int) -> None:
        """Measure the model as it is after `step`."""
        started = time.monotonic()
        with self.account.spending("evaluating", "evaluating"):
            measured = self.measure()
        self.owes = measured is None
        if measured is None:
            return
        for sink in self.sinks:
            numbers: dict[str, float | str] = {
                f"validation/{key}": found.value for key, found in measured.items()
            }
            sink.write(step, {**numbers, "validation/seconds": time.monotonic() - started})
        for tracker in (self.stopping, self.best):
            if tracker is not None:
                tracker.see(step, measured)

    @property
    def is_over(self) -> bool:
        return self.stopping is not None and self.stopping.worse_in_row >= self.patience

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation so far, where the best checkpoint is asked for."""
        return None if self.best is None else self.best.best_step

    def state(self) -> dict[str, Any]:
        """What a resumed run must know to stop at the same step and to keep the same checkpoint."""
        return {
            name: tracker.state()
            for name, tracker in (("early_stop", self.stopping), ("best", self.best))
            if tracker is not None
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, tracker in (("early_stop", self.stopping), ("best", self.best)):
            if tracker is not None and name in state and state[name]["metric"] == tracker.metric:
                tracker.restore(state[name])

    def close(self) -> None:
        pass


class SampleHook:
    """Writes what the model makes of the recipe's prompts, as text, every `every` steps.

    `complete_prompts` is called on rank 0 alone, but where the model is spread over ranks: there on
    all of them, in lockstep. It is not begun where `asked` says that training is to stop.
    """

    def __init__(
        self,
        complete_prompts: Callable[[], list[dict[str, str]]],
        every: int | None,
        sinks: Sequence[JsonLines | FailSafeSink],
        mesh: Mesh,
        account: TimeAccount,
        asked: Callable[[], bool],
        *,
        spread: bool = False,
    ) -> None:
        self.complete, self.every, self.sinks, self.mesh, self.account, self.asked, self.spread = (
            complete_prompts,
            every,
            sinks,
            mesh,
            account,
            asked,
            spread,
        )
        self.owes = False

    def after_step(self, info: StepInfo) -> bool:
        if self.every is not None and info.step % self.every == 0:
            self.at(info.step)
        return False

    def at(self, step: int) -> None:
        """Write what the model makes of the prompts as it is after `step`."""
        self.owes = self.asked()
        if self.owes:
            return
        with self.account.spending("evaluating", "evaluating"):
            samples = self.complete() if self.spread else self.mesh.from_main(self.complete)
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
