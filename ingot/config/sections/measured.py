"""What a recipe's evaluations measure, as far as that is known before anything is measured: their
metrics, and what cannot be asked of the model that is trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from ingot.config.sections.checkpoint import Checkpoint
from ingot.config.sections.evaluation import (
    Baseline,
    ClassificationTask,
    Evaluate,
    LossTask,
    PreferenceTask,
    Task,
    TaskSettings,
)
from ingot.config.sections.loop import seconds_of
from ingot.config.sections.objective import ObjectiveSettings
from ingot.config.sections.reward_task import RewardTask
from ingot.config.sections.training import Train

CompressorName = Literal["gzip", "xz"]


def default_tasks(objective: ObjectiveSettings) -> list[Task]:
    """What is measured on held-out documents unless the recipe says so."""
    if objective.scores_chats:
        return [PreferenceTask(kind="preference")]
    return [
        LossTask(),
        *([ClassificationTask(kind="classification")] if objective.class_names else []),
        *([RewardTask(kind="reward")] if objective.samples_answers else []),
    ]


def is_measured(metric: str, tasks: Sequence[TaskSettings], objective: ObjectiveSettings) -> bool:
    """Whether one of `tasks` measures a metric, as far as that is known beforehand."""
    task, _, rest = metric.partition("/")
    one = next((one for one in tasks if one.name == task), None)
    if one is None or not rest:
        return False
    names = one.metrics_with(objective)
    return not names or rest in names or _is_of_source(rest, one, objective)


def is_tail(
    tail: str,
    tasks: Sequence[TaskSettings],
    objective: ObjectiveSettings,
    sources: Collection[str],
) -> bool:
    """Whether a key that one of `tasks` is known to measure ends in `/TAIL`, as the gate may name
    it: `METRIC/SOURCE`, or a metric that has a slash itself.

    Args:
        sources: how metrics call those of the held-out documents. A tail that begins with the name
            of a task is of one of these, or else a metric of that task, mistyped.
    """
    begins, _, rest = tail.partition("/")
    mistyped = any(one.name == begins for one in tasks) and rest not in sources
    return any(
        any(f"/{name}".endswith(f"/{tail}") for name in one.metrics_with(objective))
        or tail.startswith(one.metric_beginnings)
        or (_is_of_source(tail, one, objective) and not mistyped)
        for one in tasks
    )


def _is_of_source(rest: str, task: TaskSettings, objective: ObjectiveSettings) -> bool:
    """Whether `METRIC/SOURCE` is what a task tells of one of its sources."""
    return any(rest.startswith(f"{name}/") for name in task.source_metrics(objective))


def metrics_of(tasks: Sequence[TaskSettings], objective: ObjectiveSettings) -> list[str]:
    """What `tasks` measure, for people; `NAME/...` where that is not known beforehand."""
    return [
        f"{one.name}/{name}" for one in tasks for name in one.metrics_with(objective) or ("...",)
    ]


def tracked_metrics(train: Train, checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """The knobs that name a metric to track in training, and the metrics."""
    stop = train.early_stop
    named = {
        "train.early_stop.metric": None if stop is None else stop.metric,
        "checkpoint.best": checkpoint.best,
    }
    return [(knob, metric) for knob, metric in named.items() if metric is not None]


def tracked_of_sources(
    train: Train,
    checkpoint: Checkpoint,
    objective: ObjectiveSettings,
    tasks: Sequence[TaskSettings],
) -> list[tuple[str, str]]:
    """Those of `tracked_metrics` that are of one source of the held-out documents."""
    return [
        (knob, metric)
        for knob, metric in tracked_metrics(train, checkpoint)
        for task in tasks
        if metric.startswith(f"{task.name}/")
        and (rest := metric.removeprefix(f"{task.name}/")) not in task.metrics_with(objective)
        and _is_of_source(rest, task, objective)
    ]


def check_tracked(
    train: Train,
    checkpoint: Checkpoint,
    objective: ObjectiveSettings,
    tasks: Sequence[TaskSettings],
) -> None:
    """Raises ValueError unless the metrics for early stopping and for the best checkpoint are
    measured in training, at steps that are the same each time.
    """
    if train.skip.then == "roll_back" and seconds_of(checkpoint.every) is not None:
        raise ValueError(
            f"train.skip.then=roll_back with checkpoint.every={checkpoint.every} would go back by"
            " the clock, to another step each time; set checkpoint.every to steps or epoch"
        )
    watched = [one for one in tasks if one.name in train.evaluate_tasks]
    for knob, metric in tracked_metrics(train, checkpoint):
        if train.evaluate_every is None:
            raise ValueError(f"{knob} needs train.evaluate_every; set it to a number of steps")
        if seconds_of(train.evaluate_every) is not None:
            raise ValueError(
                f"{knob} with train.evaluate_every={train.evaluate_every} would choose by the"
                " clock, another model each time; set evaluate_every to steps or epoch"
            )
        if metric != "loss" and not is_measured(metric, watched, objective):
            known = ", ".join(["loss", *metrics_of(watched, objective)])
            raise ValueError(
                f"{knob} {metric} is not measured while training, which is {known}; choose one of"
                " these, or name its task in train.evaluate_tasks"
            )


def check_prompts(objective: ObjectiveSettings, train: Train, evaluate: Evaluate) -> None:
    """Raises ValueError where a model that writes nothing is asked to; `evaluate.model` is another,
    which may write.
    """
    asked = {
        "train.sample_every": train.sample_every is not None,
        "evaluate.prompts": bool(evaluate.prompts) and evaluate.model is None,
    }
    knobs = [knob for knob, given in asked.items() if given]
    if knobs and not objective.writes:
        raise ValueError(
            f"{' and '.join(knobs)} {'are' if knobs[1:] else 'is'} for models that write, and"
            f" objective.kind {objective.kind} trains one that does not; remove"
            f" {'them' if knobs[1:] else 'it'}"
        )


def compressors_of(baselines: Sequence[Baseline]) -> list[CompressorName]:
    """Those of the baselines that compress texts."""
    return [name for name in ("gzip", "xz") if name in baselines]


def why_not_compressed(baselines: Sequence[Baseline], columns: Sequence[str]) -> str | None:
    """Why baselines cannot be had where documents are held out of these existing `columns`."""
    if not columns or not compressors_of(baselines):
        return None
    return (
        f"evaluate.tasks: {' and '.join(compressors_of(baselines))} compress held-out texts, and"
        f" {columns[0]} holds ids alone; remove them (`bigram` stays), or hold out documents of"
        " other sources by data.validation=[{source: PATH}]"
    )
