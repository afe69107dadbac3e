"""`ingot train`: builds everything in its visible order, turns the loop, exports the result.
Closing is the reverse.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ingot.base.environment import ranks
from ingot.base.errors import Stopped, WrongInput
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.markers import fingerprint
from ingot.base.progress import Progress, duration, say
from ingot.base.reports import VerbOutcome, file_sizes
from ingot.base.runlog import FailSafeSink, JsonLines, read_lines
from ingot.checkpoints.mirror import BucketMirror
from ingot.checkpoints.saver import Saver
from ingot.checkpoints.store import Found
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token
from ingot.data.loader import Batch, Loader
from ingot.models.device import device_name, peak_flops
from ingot.models.hf.folder import model_hash
from ingot.models.parameters import is_sharded
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.parallel.pipeline import parameter_counts
from ingot.train.build import Trainee, build_trainee, open_sinks
from ingot.train.evaluation import Tracker, measuring, sample_texts
from ingot.train.finish import export_run, exported_files, take_best
from ingot.train.goodput import Account, Tell, next_attempt, note_lost, since_created, teller
from ingot.train.hooks import CheckpointHook, EvaluateHook, KillHook, LogHook, SampleHook, Workload
from ingot.train.interrupts import Leave, Notice, StopSignals, stacks_on_demand
from ingot.train.micro_batch.search import with_fitting_micro_batch
from ingot.train.optimizers import set_learning_rate
from ingot.train.profile import ProfileHook
from ingot.train.reference import reference_tables
from ingot.train.resume import (
    complete,
    fetch_missing,
    find_start,
    open_mirror,
    refuse_others,
    send_missing,
)
from ingot.train.rollback import (
    RolledBack,
    Skips,
    TooManySkipped,
    left_out,
    roll_back,
    with_left_out,
)
from ingot.train.schedules import learning_rate
from ingot.train.setup import Plan, plan_run
from ingot.train.step import (
    Hook,
    Spikes,
    StepInfo,
    Work,
    global_targets,
    run_loop,
    seed_dropout,
    train_step,
)


def train(recipe: Recipe, *, fresh: bool = False) -> VerbOutcome:
    """Train, or go on training, until the recipe's last step; then export `model/`. Every rank
    calls it.

    Raises:
        WrongInput: the recipe does not fit data, model, tokenizer, ranks, or the checkpoints that
            are there.
        Stopped: a signal came; with a committed checkpoint the same command goes on from there.
    """
    here, run = ranks(), recipe.folder
    heart = HeartbeatWriter(
        run.heartbeats, rank=here.rank, local_rank=here.local_rank, attempt=next_attempt(run.events)
    )
    tell = teller(run.events, heart, silent=not here.is_main)
    began = time.monotonic() - since_created()
    try:
        with ExitStack() as closing:
            signals = closing.enter_context(StopSignals(recipe.checkpoint.grace_s))
            closing.enter_context(
                Notice(recipe.checkpoint.notice if here.local_rank == 0 else None)
            )
            closing.enter_context(stacks_on_demand(run.logs, here.rank))
            if here.is_main and not fresh:
                note_lost(run, tell)
            heart.beat("loading")
            mesh = closing.enter_context(running_mesh(recipe.parallel))
            mirror = open_mirror(recipe, mesh, closing, again=heart.attempt > 1)
            if not fresh:
                fetch_missing(mirror, run.checkpoints, mesh)
            job = Job(with_fitting_micro_batch(recipe, mesh), mesh, heart, signals, tell, mirror)
            while True:
                try:
                    outcome = _attempt(job, began, fresh=fresh)
                    break
                except RolledBack:
                    fresh, began = False, time.monotonic()
                    heart.attempt += 1
                    fetch_missing(mirror, run.checkpoints, mesh)
    except Leave as leave:
        tell("stop", step=leave.committed or 0, cause=signal.Signals(leave.signum).name)
        heart.beat("over")
        raise _stopped(leave.committed, leave.signum) from None
    heart.beat("over")
    return outcome


@dataclass(frozen=True)
class Job:
    """What stays as it is while this process lives, however often training goes back."""

    recipe: Recipe
    mesh: Mesh
    heart: HeartbeatWriter
    signals: StopSignals
    tell: Tell
    mirror: BucketMirror | None

    def asked(self) -> bool:
        """Whether any rank is asked to stop. Collective."""
        self.heart.beat()
        return any(self.mesh.agree(float(self.signals.signum != 0)))


def _attempt(job: Job, began: float, *, fresh: bool) -> VerbOutcome:
    """Train from where the checkpoints say to the end; `began` is monotonic."""
    recipe, mesh, tell = job.recipe, job.mesh, job.tell
    with ExitStack() as closing:
        plan = plan_run(recipe, mesh) if fresh else with_left_out(plan_run(recipe, mesh), mesh)
        start = mesh.from_main(
            lambda: find_start(
                recipe.folder,
                plan.identity,
                fresh=fresh,
                allow=recipe.resume.allow,
                before_anew=lambda: refuse_others(job.mirror),
                tell=lambda found, changed: tell("changed", step=found.step, cause=changed),
            )
        )
        send_missing(job.mirror, start, mesh)
        first = start.step if start else plan.begin
        if first > plan.last:
            raise WrongInput(
                f"{first:,} steps are done, the recipe asks for {plan.last:,} only; raise"
                " train.steps, or start over with --fresh"
            )
        job.signals.leave_at_once(start.step if start else None)
        tables = reference_tables(plan, mesh)
        trainee = build_trainee(plan, start, tables, mesh)
        loader = Loader(plan.rows, plan.order, plan.batch, mesh.data.rank)
        closing.callback(loader.close)
        hooks = _hooks(job, plan, trainee, start, closing)
        _announce(plan, trainee, mesh, first, resumed=start is not None)
        tell(
            "start",
            step=first,
            seconds=time.monotonic() - began,
            cause="resumed" if start else "first step",
        )

        turned, reached, signum = time.monotonic(), first, 0
        job.signals.leave_between_steps()
        hooks.catch_up(start)
        if first < plan.last and not hooks.evaluation.is_over:
            try:
                end = run_loop(
                    first,
                    plan.last,
                    *_turns(job, plan, trainee, loader, hooks, first),
                    hooks.all,
                    judge=hooks.skips.judge,
                )
            except TooManySkipped as bad:
                raise roll_back(bad, plan, hooks.checkpoint, mesh, tell) from None
            reached, signum = end.step, end.signum
        hooks.checkpoint.finish(reached)
        seconds = time.monotonic() - turned
        if signum or job.asked():
            signum = signum or job.signals.signum or signal.SIGTERM
            tell("stop", step=reached, seconds=seconds, cause=signal.Signals(signum).name)
            job.heart.beat("over")
            raise _stopped(reached if reached > plan.begin or start else None, signum)
        tell("finish", step=reached, seconds=seconds)
        job.heart.beat("exporting")
        job.signals.leave_at_once(reached)
        complete(job.mirror, recipe.folder.checkpoints, reached, hooks.evaluation.best_step, mesh)
        chosen = take_best(plan, trainee, hooks.evaluation.best_step, reached, mesh)
        mesh.from_main(lambda: export_run(plan, trainee, chosen))
        return mesh.from_main(
            lambda: _outcome(recipe, first, reached, chosen, seconds)
        )  # nodes may have a disk each


@dataclass(frozen=True)
class Hooks:
    """The side effects of an attempt, and what of them is asked for by name."""

    evaluation: EvaluateHook
    samples: SampleHook
    log: LogHook
    checkpoint: CheckpointHook
    account: Account
    skips: Skips
    spikes: Spikes | None
    all: Sequence[Hook]

    def catch_up(self, start: Found | None) -> None:
        """Do what the attempt before was stopped in, which its checkpoint says."""
        owed = start.commit.get("owed", []) if start else []
        for name, hook in (("validation", self.evaluation), ("samples", self.samples)):
            if start is not None and name in owed:
                hook.at(start.step)
        self.account.begin()


def _hooks(
    job: Job, plan: Plan, trainee: Trainee, start: Found | None, closing: ExitStack
) -> Hooks:
    """What happens after each step, in this order: what is logged, what is measured, the account, a
    checkpoint that knows all of it.
    """
    recipe, run, mesh, first = (
        job.recipe,
        job.recipe.folder,
        job.mesh,
        start.step if start else plan.begin,
    )
    commit: Mapping[str, Any] = start.commit if start else {}
    account, skips = Account(job.heart, job.tell), Skips(recipe.train.skip.in_row, job.tell)
    spikes = (
        None
        if recipe.train.skip.spike is None
        else Spikes(recipe.train.skip.spike, mesh.device, commit.get("spikes"))
    )
    sinks = open_sinks(recipe, run, mesh, first, fingerprint(plan.identity), commit.get("owed", []))
    progress = closing.enter_context(
        Progress("train", plan.last, "steps", done=first, quiet=not mesh.is_main)
    )
    log = LogHook(
        sinks,
        progress,
        recipe.track.every,
        plan.last,
        _workload(plan, mesh),
        mesh,
        gpu=recipe.track.gpu,
        skipped=commit.get("skipped", 0.0),
    )
    evaluation = _evaluation(job, plan, trainee, sinks, account)
    if start is not None:
        evaluation.restore(start.commit["watched"])
    write: Callable[[], list[dict[str, str]]] = lambda: sample_texts(plan, trainee, mesh)  # noqa: E731
    samples = SampleHook(
        write,
        recipe.train.sample_every,
        sinks,
        mesh,
        account,
        job.asked,
        spread=is_sharded(trainee.model),
    )

    def payload(step: int) -> dict[str, Any]:
        owed = [
            name for name, hook in (("validation", evaluation), ("samples", samples)) if hook.owes
        ]
        return {
            "samples": step * plan.batch.global_batch,
            "finished": step >= plan.last or evaluation.is_over,
            "identity": plan.identity,
            "watched": evaluation.state(),
            "skipped": log.skipped,
            "owed": owed,
            **({"spikes": spikes.state()} if spikes else {}),
            "left_out": left_out(plan, recipe),
        }

    saver = Saver(
        run.checkpoints,
        mesh,
        asynchronous=recipe.checkpoint.asynchronous,
        mirror=job.mirror,
        said=job.heart.beat,
    )
    checkpoint = CheckpointHook(
        saver,
        trainee,
        run,
        recipe.checkpoint,
        evaluation,
        payload,
        account,
        first,
        is_main=mesh.is_main,
    )
    kill = [] if recipe.chaos.kill_at is None else [KillHook(recipe.chaos.kill_at)]
    hooks: list[Hook] = [
        log,
        evaluation,
        samples,
        account,
        checkpoint,
        *_tracing(plan, mesh, first),
        *kill,
    ]
    for hook in hooks:
        closing.callback(hook.close)
    return Hooks(evaluation, samples, log, checkpoint, account, skips, spikes, hooks)


def _turns(
    job: Job, plan: Plan, trainee: Trainee, loader: Loader, hooks: Hooks, first: int
) -> tuple[Callable[[int], Work], Callable[[int, Work], StepInfo]]:
    """How a step's work is fetched, and how it is done."""
    mesh, signals, heart = job.mesh, job.signals, job.heart

    def waiting() -> (
        bool
    ):  # who does is alive, and asked to stop needs no data: all ranks are told before the step
        heart.beat()
        return signals.signum != 0

    def fetch(step: int) -> Work:
        began = time.monotonic()
        heart.beat("first step" if step == first else "step", step=step, place=0)
        with hooks.account.spending("waiting"):
            batches = loader.step(step, waiting)
        targets, (asked, failed) = global_targets(
            trainee.objectives.training,
            batches,
            mesh,
            signals.signum != 0,
            hooks.checkpoint.saver.failed,
        )
        if failed:
            hooks.checkpoint.wait()
        if not targets and not asked:
            raise WrongInput(
                f"step {step + 1:,} has not one target in its {plan.batch.global_batch} rows; run"
                " `ingot show mask` on the recipe"
            )
        return Work(batches, targets, (signals.signum or signal.SIGTERM) if asked else 0, began)

    return fetch, lambda step, work: _step(step, work, job, plan, trainee, hooks)


def _step(step: int, work: Work, job: Job, plan: Plan, trainee: Trainee, hooks: Hooks) -> StepInfo:
    """Optimizer step `step` (from 0)."""
    knobs = plan.recipe.train
    lr = learning_rate(knobs.schedule, knobs.optimizer.lr, step, plan.last)
    set_learning_rate(trainee.optimizer, lr)

    def before(index: int, batch: Batch) -> None:
        job.heart.beat(place=index + 1)
        seed_dropout(trainee.model, plan.recipe.seed, step, index, batch, job.mesh)

    outcome = train_step(
        trainee.module,
        trainee.objectives.training,
        work.batches,
        trainee.masters,
        trainee.optimizer,
        targets=work.targets,
        clip_norm=knobs.clip_norm,
        compute=plan.compute,
        mesh=job.mesh,
        before=before,
        spikes=hooks.spikes,
    )
    tokens = knobs.global_batch * plan.tokens_per_sample
    return StepInfo(
        step + 1, knobs.global_batch, tokens, outcome, lr, time.monotonic() - work.began
    )


def _workload(plan: Plan, mesh: Mesh) -> Workload:
    cost = (
        flops_per_token(plan.drawing.config.to_hf(), plan.recipe.data.seq_len)
        if plan.drawing.kind == "decoder"
        else None
    )
    return Workload(cost, peak_flops(mesh.device, plan.compute), plan.compute)


def _tracing(plan: Plan, mesh: Mesh, first: int) -> list[Hook]:
    """The profiler, where it is asked for."""
    knobs = plan.recipe.train.profile
    return (
        []
        if knobs is None
        else [
            ProfileHook(
                knobs, plan.recipe.folder.root / "profile", mesh, done=first, last=plan.last
            )
        ]
    )


def _evaluation(
    job: Job,
    plan: Plan,
    trainee: Trainee,
    sinks: Sequence[JsonLines | FailSafeSink],
    account: Account,
) -> EvaluateHook:
    knobs, best = plan.recipe.train, plan.recipe.checkpoint.best
    stopping = (
        None
        if knobs.early_stop is None
        else Tracker(knobs.early_stop.metric, knobs.early_stop.min_delta)
    )
    patience = 0 if knobs.early_stop is None else knobs.early_stop.patience
    measure = measuring(plan, trainee, job.mesh, job.asked, lambda: job.signals.signum != 0)
    return EvaluateHook(
        measure,
        knobs.evaluate_every,
        stopping,
        patience,
        None if best is None else Tracker(best),
        sinks,
        account,
    )


def _announce(plan: Plan, trainee: Trainee, mesh: Mesh, first: int, *, resumed: bool) -> None:
    size, moved = (count / 1e6 for count in parameter_counts(trainee.model, mesh))
    if mesh.is_main:
        of_these = f", {moved:.2f} M of them trained" if moved < size else ""
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        onward = f", {'going on' if resumed else 'beginning'} after step {first:,}" if first else ""
        say(
            f"train: {plan.recipe.objective.kind}, {size:.1f} M parameters{of_these}, {plan.last:,}"
            f" steps of {plan.batch.global_batch} x {plan.recipe.data.seq_len} tokens,"
            f" {plan.compute} on {ranks}{device_name(mesh.device)}{onward}"
        )


def _stopped(step: int | None, signum: int) -> Stopped:
    """`step` is the checkpoint that stands, None where there is none."""
    name = signal.Signals(signum).name
    if step is None:
        return Stopped(
            f"stopped by {name} before the first step: nothing to save; the same command starts"
            " again",
            signum=signum,
            committed=False,
        )
    return Stopped(
        f"stopped by {name} with checkpoint {step} committed; the same command goes on from there",
        signum=signum,
        committed=True,
    )


def _outcome(recipe: Recipe, first: int, step: int, chosen: int, seconds: float) -> VerbOutcome:
    run = recipe.folder
    losses = [
        line["train/loss"] for line in read_lines(run.metrics) if line.get("train/loss") is not None
    ]
    loss = f", loss {losses[-1]:.3f}" if losses else ""
    best = f", the best at step {chosen:,} exported" if chosen != step else ""
    folders = [run.model, *([run.adapter] if recipe.model.lora is not None else [])]
    files = file_sizes(run.root, [file for folder in folders for file in exported_files(folder)])
    took = (
        f" in {duration(seconds)}"
        if first == 0
        else f", the last {step - first:,} in {duration(seconds)}"
        if step > first
        else ""
    )
    return VerbOutcome(
        f"{step:,} steps{took}{loss}{best}", str(run.model), model_hash(run.model), files
    )
