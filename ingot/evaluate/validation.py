"""What training evaluates as it runs: the objective on validation rows, and some of the recipe's
tasks; and whether that tells the metrics it tracks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import LossTask
from ingot.config.sections.measured import tracked_metrics, tracked_of_sources
from ingot.data.batches.loader import Batch, fixed_batches
from ingot.data.batches.rows import IGNORE, Rows
from ingot.data.batches.samples import Samples, alike_ratings
from ingot.data.columns.manifest import PreparedData
from ingot.evaluate.sources import source_names, source_of_rows
from ingot.evaluate.subject import EvalModel, EvaluationInterrupted
from ingot.evaluate.tasks import measure_all, open_task
from ingot.models.device import Compute
from ingot.objectives.forward import PipelinedBatches, first_pass, forward
from ingot.objectives.protocol import Objective, TwoPassObjective
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.rows import row_sharing

MICRO_BATCHES_PER_STAGE = 2
"""Micro-batches per pipeline rank that go through the pipeline together; buffers for all of them
are kept.
"""


def validation_losses(
    model: nn.Module,
    objective: Objective,
    rows: Rows | Samples,
    count: int,
    micro_batch: int,
    compute: Compute,
    mesh: Mesh,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """`loss` and the objective's further metrics, each a mean over the targets of the first `count`
    rows. Collective, the same on every rank.

    Raises:
        WrongInput: the rows have no targets, or ranks have different metrics.
        EvaluationInterrupted: `should_stop` returned True, on every rank alike.
    """
    count = min(count, len(rows))
    data, sharing = mesh.data, row_sharing(mesh)
    mine = list(range(count * data.rank // data.world, count * (data.rank + 1) // data.world))
    device, targets = mesh.device, 0.0
    sums: dict[str, float] = defaultdict(float)
    with torch.no_grad():
        # All ranks run equally many forward passes: sharded weights are gathered collectively in
        # each of them, and a pipeline needs several micro-batches.
        size = MICRO_BATCHES_PER_STAGE * mesh.pipeline.world if isinstance(model, Pipeline) else 1
        passes = math.ceil(math.ceil(count / data.world) / (micro_batch * size))

        def all_batches() -> Iterator[Batch]:
            """Of as many batches as all ranks have; the last ones of some have no targets."""
            yield from fixed_batches(rows, mine, micro_batch)
            yield from itertools.repeat(_batch_without_targets(rows, micro_batch))

        batches = all_batches()
        if isinstance(objective, TwoPassObjective):
            before = itertools.islice(all_batches(), passes)
            total = first_pass(model, objective, before, compute, device, sharing)
            # Every row is a target, and `mesh.losses` adds up those of whole rows.
            objective.finish_first_pass(mesh.losses.all_sum(total) / count)
            batches = map(objective.second_rows, batches)
        for _ in range(passes):
            if should_stop():
                raise EvaluationInterrupted
            group = list(itertools.islice(batches, size))
            if isinstance(model, Pipeline):
                work = PipelinedBatches(objective, group, compute, device, sharing)
                model.run(work, backward=False)
                total, metrics = work.sums()
            else:
                total, metrics = forward(model, objective, group[0], compute, device, sharing)
            if "loss" in metrics:
                raise WrongInput("the objective has a metric loss, as its own is named; rename it")
            for name, value in {"loss": total, **metrics}.items():
                sums[name] += float(value)
            # Ranks that share rows (context) or layers (pipeline) share the target count too.
            targets += sum(objective.targets(batch) for batch in group) / (
                mesh.context.world * mesh.pipeline.world
            )
    return _means(sums, targets, mesh)


def _means(sums: Mapping[str, float], targets: float, mesh: Mesh) -> dict[str, float]:
    """The sums of all ranks over all their targets. Collective."""
    names = sorted(sums)
    if not mesh.losses.is_same(names):
        raise WrongInput(
            f"ranks have different metrics of the validation rows, {', '.join(names)} on rank"
            f" {mesh.rank}; the objective's reduce must give each with every micro-batch, 0 where"
            " there is nothing"
        )
    *found, whole = mesh.losses.agree(*(sums[name] for name in names), targets)
    if not whole:
        raise WrongInput(
            "the validation rows have not one target; set data.validation to more documents"
        )
    return {name: value / whole for name, value in zip(names, found, strict=True)}


def _batch_without_targets(rows: Rows | Samples, micro_batch: int) -> Batch:
    """A batch of the usual shape without targets."""
    batch = next(fixed_batches(rows, [0], micro_batch))
    return replace(
        batch, labels=torch.full_like(batch.labels, IGNORE), rows=torch.full_like(batch.rows, -1)
    )


MetricValues = dict[str, tuple[float, Literal["lower", "higher"]]]
"""Metric key -> value, and which direction is better."""


class TaskEvaluator:
    """Measures the tasks `names` on a model in training.

    Tasks on the validation documents use the first `train.evaluate_rows` of them, always the same;
    other tasks have their own limits.

    Raises:
        WrongInput: as `open_task` does: everything that can be refused is refused here, before the
            first step.
    """

    def __init__(self, subject: EvalModel, names: Sequence[str]) -> None:
        self._subject = subject
        self._tracked = tracked_metrics(subject.recipe.train, subject.recipe.checkpoint)
        tasks = [task for task in subject.recipe.tasks if task.name in names]
        self._opened = {
            task.name: open_task(task, subject.info, subject.recipe.train.evaluate_rows)
            for task in tasks
        }

    def __call__(self) -> MetricValues:
        """Measure the model as it is now; it must be in evaluation mode. Collective: every rank
        calls it, all get the same result.

        Raises:
            WrongInput: a tracked metric is missing, and the task says why.
        """
        found: MetricValues = {}
        for measured in measure_all(self._opened, self._subject).values():
            for knob, tracked in self._tracked:
                if (why := measured.missing.get(tracked)) is not None:
                    raise WrongInput(f"{knob} {tracked} is not measured: {why}")
            for key, metric in measured.metrics.items():
                found[key] = metric.value, metric.direction
        return found


def check_tracked(recipe: Recipe, prepared: PreparedData, held_out: Rows | Samples) -> None:
    """Raises WrongInput if a tracked metric will not be measured on the held-out rows."""
    _check_sources(recipe, prepared, len(held_out))
    if isinstance(held_out, Samples) and held_out.kind == "rated":
        _check_ratings(recipe, prepared, held_out)


def _check_sources(recipe: Recipe, prepared: PreparedData, rows: int) -> None:
    """Raises WrongInput if a metric of one source is tracked, which evaluations in training would
    not measure: sources are told apart where there are several, and all `rows` are used.
    """
    train, held_out = recipe.train, prepared.splits["validation"]
    named = zip(source_names(held_out), held_out, strict=True)
    sources = [name for name, source in named if source.documents]
    alone = len(held_out) == 1
    for knob, metric in tracked_of_sources(
        train, recipe.checkpoint, recipe.objective, recipe.tasks
    ):
        if alone or metric.rpartition("/")[2] not in sources:
            raise WrongInput(
                f"{knob} {metric} is not measured: held-out documents are of"
                f" {', '.join(sources)}{' alone' if len(sources) == 1 else ''}; set it to a metric"
                f" of {'them' if alone else 'one of these, or of all'}"
            )
        if train.evaluate_rows < rows:
            raise WrongInput(
                f"{knob} {metric} is measured on all {rows} held-out rows alone, and"
                f" train.evaluate_rows is {train.evaluate_rows}; set it to {rows} or more, or"
                f" {knob} to a metric of all sources"
            )


def _check_ratings(recipe: Recipe, prepared: PreparedData, rows: Samples) -> None:
    """Raises WrongInput if a loss is tracked that rated answers do not tell, which are alike."""
    losses = [task.name for task in recipe.tasks if isinstance(task, LossTask)]
    sources = source_names(prepared.splits["validation"])
    count = min(len(rows), recipe.train.evaluate_rows)
    ratings, of = rows.ratings(range(count), count), source_of_rows(rows, count)
    for knob, metric in tracked_metrics(recipe.train, recipe.checkpoint):
        task, _, rest = metric.partition("/")
        name, _, source = rest.partition("/")
        if task not in losses:
            continue
        whose, alike = "", alike_ratings(ratings, len(rows))
        if source:
            whose, alike = f"of {source} ", alike_ratings(ratings[of == sources.index(source)])
        if alike is not None and name in alike.untold:
            raise WrongInput(f"{knob} {metric} is not measured: {whose}{alike.why}")
