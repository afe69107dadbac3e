"""Assembles what surrounds the optimizer steps of an attempt: the hooks in order, the metric sinks
and the context that all steps share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.markers import fingerprint
from ingot.base.masking import masked
from ingot.base.progress import Progress, say
from ingot.base.runlog import (
    FailSafeSink,
    JsonLines,
    MetricSink,
    Resumed,
    TensorBoard,
    WeightsAndBiases,
)
from ingot.base.trackers import MLflow, Trackio
from ingot.checkpoints.mirror import BucketMirror
from ingot.checkpoints.saver import Saver
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.documents import dump
from ingot.config.load import recipe_values
from ingot.config.recipe import Recipe
from ingot.config.sections.loop import Every
from ingot.data.batches.loader import BatchSource, Loader
from ingot.models.parameters import is_sharded
from ingot.parallel.mesh import Mesh
from ingot.train.build import TrainState
from ingot.train.checkpointing import CheckpointHook
from ingot.train.evaluation import EvaluateHook, SampleHook, make_measure, sample_texts
from ingot.train.goodput import EventSink, TimeAccount
from ingot.train.hooks import EarlyEndHook, KillHook, LogHook, SkipHook, TrainingControl, Workload
from ingot.train.interrupts import StopSignals
from ingot.train.metrics import MetricNames
from ingot.train.optim.schedules import Recurrence
from ingot.train.profile import profile_hooks
from ingot.train.reference import open_reference
from ingot.train.rollback import left_out
from ingot.train.rollout.rollout import Rollout, RolloutHook
from ingot.train.setup import TrainSetup
from ingot.train.step import DropoutSeeds, Hook, SpikeDetector, StepContext


@dataclass(frozen=True)
class TrainingProcess:
    """What lives as long as this process, across roll-backs to earlier checkpoints."""

    recipe: Recipe
    mesh: Mesh
    heart: HeartbeatWriter
    signals: StopSignals
    events: EventSink
    bucket: BucketMirror | None

    def any_rank_asked(self) -> bool:
        """Whether any rank has received a request to stop. Collective."""
        self.heart.beat()
        return any(self.mesh.agree(float(self.signals.signum != 0)))


@dataclass(frozen=True)
class Hooks:
    """The hooks of an attempt; those used individually also have a field of their own."""

    evaluation: EvaluateHook
    samples: SampleHook
    checkpoint: CheckpointHook
    account: TimeAccount
    spikes: SpikeDetector | None
    metrics: MetricNames
    skips: SkipHook
    all: Sequence[Hook]

    def do_owed(self, start: CommittedCheckpoint | None) -> None:
        """Run the evaluation and samples that a signal cut off at the end of the previous attempt;
        its checkpoint lists them under `owed`.
        """
        owed = start.commit["owed"] if start else []
        for name, hook in (("validation", self.evaluation), ("samples", self.samples)):
            if start is not None and name in owed:
                hook.at(start.step)
        self.account.begin()


@dataclass(frozen=True)
class CommitFields:
    """The fields of `COMMIT.json` beside the tensors, so that a resumed training makes the same
    decisions.
    """

    recipe: Recipe
    """As given by the user: ranges in its `data.skip` were not added by a roll-back."""
    setup: TrainSetup
    log: LogHook
    evaluation: EvaluateHook
    samples: SampleHook
    skips: SkipHook
    spikes: SpikeDetector | None
    metrics: MetricNames
    run_id: str
    source: BatchSource

    def __call__(self, step: int) -> dict[str, Any]:
        """The fields of `COMMIT.json` after `step`."""
        return {
            "samples": step * self.setup.batch.global_batch,
            "learning_rate": self.setup.learning_rate(max(0, step - 1)),
            "begun": self.setup.begun,
            "run_id": self.run_id,
            "skipped": self.log.skipped,
            "skipped_in_row": self.skips.row,
            **({"spikes": self.spikes.state()} if self.spikes else {}),
            "metrics": self.metrics.names,
            **({"rollout": self.source.state(step)} if isinstance(self.source, Rollout) else {}),
            **self.decided(step),
        }

    def decided(self, step: int) -> dict[str, Any]:
        """Those that change without a step: what was owed is measured, the recipe may have changed,
        a roll-back has left something out.
        """
        measured = (("validation", self.evaluation), ("samples", self.samples))
        return {
            "finished": step >= self.setup.last or self.evaluation.is_over,
            "identity": self.setup.identity,
            "watched": self.evaluation.state(),
            "owed": [name for name, hook in measured if hook.owes],
            "left_out": left_out(self.setup, self.recipe),
        }


def open_batches(
    setup: TrainSetup, state: TrainState, start: CommittedCheckpoint | None, mesh: Mesh
) -> BatchSource:
    """Where this rank's batches come from: the prepared rows, or answers to them. Collective."""
    objective = setup.recipe.objective
    if not objective.samples_answers:
        return Loader(setup.rows, setup.order, setup.batch, mesh.data.rank)
    reference = open_reference(setup, mesh) if objective.reads_reference else None
    saved = start.commit["rollout"] if start else {}
    return Rollout(setup, state, reference, saved, mesh)


def make_hooks(
    process: TrainingProcess,
    setup: TrainSetup,
    state: TrainState,
    source: BatchSource,
    start: CommittedCheckpoint | None,
    closing: ExitStack,
) -> Hooks:
    """The hooks that run after each step, in this order: skipped steps, logging, evaluation and
    samples, time accounting, the checkpoint (which records all of these), the profiler. Where
    evaluation ends training, logging comes after it once more.
    """
    recipe, mesh, knobs = process.recipe, process.mesh, process.recipe.train
    first, commit = (start.step, start.commit) if start else (setup.begin, {})
    account = TimeAccount(process.heart, process.events)
    spike, spikes = knobs.skip.spike, None
    if spike is not None:
        spikes = SpikeDetector(spike, mesh.device, commit.get("spikes"))
    run_id = tracked_id(recipe, setup, start)
    sinks = open_sinks(recipe, mesh, run_id, Resumed(first, tuple(commit.get("owed", ()))))
    progress = closing.enter_context(
        Progress("train", setup.last, "steps", done=first, quiet=not mesh.is_main)
    )
    log = _log_hook(setup, source, sinks, progress, account, commit.get("skipped", 0.0), mesh)
    evaluation = _evaluation_hook(process, setup, state, sinks, account, start)
    if isinstance(source, Rollout):
        evaluation.waits = source.lacks_reward
    samples = SampleHook(
        lambda: sample_texts(setup, state, mesh),
        knobs.sample_every if recipe.evaluate.prompts else None,
        sinks,
        mesh,
        account,
        process.any_rank_asked,
        spread=is_sharded(state.model),
    )
    skips = SkipHook(knobs.skip.in_row, process.events, commit.get("skipped_in_row", 0))
    metrics = MetricNames(known_metrics(setup.identity, commit))
    fields = CommitFields(
        recipe, setup, log, evaluation, samples, skips, spikes, metrics, run_id, source
    )
    checkpoint = _checkpoint_hook(process, state, fields, account, first, start)
    rollouts = (
        [RolloutHook(source, sinks, recipe.track.every, setup.last, first)]
        if isinstance(source, Rollout)
        else []
    )
    logs = [log.at_end, *(one.at_end for one in rollouts)]
    hooks: list[Hook] = [
        skips,
        log,
        *rollouts,
        *([evaluation] if knobs.evaluate_every is not None else []),
        *([EarlyEndHook(evaluation, logs)] if knobs.early_stop else []),
        *([samples] if knobs.sample_every is not None else []),
        account,
        checkpoint,
        *profile_hooks(setup, mesh, first),
        *([] if recipe.chaos.kill_at is None else [KillHook(recipe.chaos.kill_at)]),
    ]
    for hook in hooks:
        closing.callback(hook.close)
    return Hooks(evaluation, samples, checkpoint, account, spikes, metrics, skips, hooks)


def known_metrics(identity: Mapping[str, Any], commit: Mapping[str, Any]) -> Collection[str]:
    """The metrics of the attempts before; none if another code of a package has trained since then,
    whose objective may have others.
    """
    before, now = (
        {key: code for key, code in one.items() if key.startswith("package.")}
        for one in (commit.get("identity", {}), identity)
    )
    return commit.get("metrics", ()) if before == now else ()


def _log_hook(
    setup: TrainSetup,
    source: BatchSource,
    sinks: Sequence[MetricSink],
    progress: Progress,
    account: TimeAccount,
    skipped: float,
    mesh: Mesh,
) -> LogHook:
    return LogHook(
        sinks,
        progress,
        setup.recipe.track.every,
        setup.last,
        Workload.of(setup, mesh),
        mesh,
        gpu=setup.recipe.track.gpu,
        clock=account.in_steps,
        skipped_before=skipped,
        remarks=source.remarks if isinstance(source, Rollout) else dict,
    )


def _evaluation_hook(
    process: TrainingProcess,
    setup: TrainSetup,
    state: TrainState,
    sinks: Sequence[MetricSink],
    account: TimeAccount,
    start: CommittedCheckpoint | None,
) -> EvaluateHook:
    """The hook of evaluations, with what the attempts before have measured."""
    mesh, signals = process.mesh, process.signals
    measure = make_measure(setup, state, mesh, process.any_rank_asked, lambda: signals.signum != 0)
    every = _recurrence(setup, setup.recipe.train.evaluate_every)
    evaluation = EvaluateHook.of(setup, every, measure, sinks, account)
    if start is not None:
        for line in evaluation.restore(start.step, start.commit["watched"]):
            if mesh.is_main:
                say(f"train: {line}")
    return evaluation


def _recurrence(setup: TrainSetup, every: Every | None) -> Recurrence:
    return Recurrence.of(setup.recipe, every, len(setup.rows), begin=setup.data_begin)


def _checkpoint_hook(
    process: TrainingProcess,
    state: TrainState,
    fields: CommitFields,
    account: TimeAccount,
    first: int,
    start: CommittedCheckpoint | None,
) -> CheckpointHook:
    recipe, mesh = process.recipe, process.mesh
    saver = Saver(
        recipe.folder.checkpoints,
        mesh,
        asynchronous=recipe.checkpoint.asynchronous,
        mirror=process.bucket,
        on_wait=process.heart.beat,
    )
    return CheckpointHook(
        saver,
        state,
        recipe,
        _recurrence(fields.setup, recipe.checkpoint.every),
        fields.evaluation,
        fields,
        fields.decided,
        fields.skips.finish,
        account,
        first,
        fields.setup.last,
        start=start,
        is_main=mesh.is_main,
    )


def make_step_context(
    process: TrainingProcess,
    setup: TrainSetup,
    state: TrainState,
    loader: BatchSource,
    hooks: Hooks,
    first: int,
) -> StepContext:
    """The context that all steps share."""
    knobs, mesh = setup.recipe.train, process.mesh
    dropout = DropoutSeeds(state.model, setup.recipe.seed, mesh)
    control = TrainingControl(
        loader,
        dropout,
        process.heart,
        process.signals,
        hooks.account,
        hooks.checkpoint,
        (hooks.evaluation.every, hooks.checkpoint.every),
        first,
        is_main=mesh.is_main,
    )
    return StepContext(
        state.module,
        state.objectives.training,
        state.masters,
        state.optimizer,
        mesh,
        control,
        compute=setup.compute,
        clip_norm=knobs.clip_norm,
        learning_rate=setup.learning_rate,
        spikes=hooks.spikes,
        balance=state.balance,
        hooks=hooks.all,
        samples=knobs.global_batch,
        metrics=hooks.metrics,
    )


def tracked_id(recipe: Recipe, setup: TrainSetup, start: CommittedCheckpoint | None) -> str:
    """The id of the run at a tracker: the recipe's; else that of the resumed checkpoint, even if
    `resume.allow` let the recipe change since; else one that is the same at every start of this
    run.
    """
    if recipe.track.wandb is not None and recipe.track.wandb.id is not None:
        return recipe.track.wandb.id
    if start is not None:
        return str(start.commit["run_id"])
    return fingerprint({"identity": setup.identity, "run": [recipe.name, recipe.output]})


def open_sinks(recipe: Recipe, mesh: Mesh, run_id: str, resumed: Resumed) -> list[MetricSink]:
    """The metric sinks of rank 0; other ranks have none."""
    if not mesh.is_main:
        return []
    run = recipe.folder
    sinks: list[MetricSink] = [JsonLines(run.metrics, resumed)]
    if recipe.track.tensorboard:
        sinks.append(FailSafeSink("TensorBoard", lambda: TensorBoard(run.tensorboard, resumed)))
    values = masked(recipe_values(recipe))
    knobs = {"recipe": dump(values)}
    if (wandb := recipe.track.wandb) is not None:
        place = {"entity": wandb.entity, "tags": wandb.tags or None}
        sinks.append(
            FailSafeSink(
                "W&B",
                lambda: WeightsAndBiases(
                    run.root, wandb.project, wandb.name or recipe.name, run_id, knobs, place
                ),
            )
        )
    if (mlflow := recipe.track.mlflow) is not None:
        called = (mlflow.uri, mlflow.experiment, mlflow.name or recipe.name, run_id)
        sinks.append(FailSafeSink("MLflow", lambda: MLflow(*called, values, mlflow.tags, resumed)))
    if (trackio := recipe.track.trackio) is not None:
        name, about = trackio.name or recipe.name, {"tags": trackio.tags, **knobs}
        where = {"space_id": trackio.space, "group": trackio.group}
        sinks.append(
            FailSafeSink(
                "Trackio", lambda: Trackio(trackio.project, name, run_id, about, where, resumed)
            )
        )
    return sinks
