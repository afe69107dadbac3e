"""`ingot train`: builds everything in its visible order, turns the loop, exports the result. Closing is the reverse."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ingot.base.errors import Stopped, WrongInput
from ingot.base.events import read_lines, record_event
from ingot.base.fingerprint import fingerprint
from ingot.base.progress import Progress, duration, say
from ingot.base.sinks import Guarded, JsonLines
from ingot.base.steprecord import Outcome, sizes
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token
from ingot.data.loader import Loader
from ingot.data.order import Order
from ingot.models.device import device_name, peak_flops
from ingot.models.folder import model_hash
from ingot.models.placed import is_spread
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.parallel.pipeline import whole_size
from ingot.train.build import Trainee, build_trainee, open_sinks
from ingot.train.dropout import seed_dropout
from ingot.train.finish import export_run, exported_files, take_best
from ingot.train.fitting import with_fitting_micro_batch
from ingot.train.hooks import CheckpointHook, EvaluateHook, LogHook, SampleHook, Tell, Workload
from ingot.train.loop import Hook, StepInfo, Work, run_loop
from ingot.train.measure import measuring, sample_texts
from ingot.train.optim import set_learning_rate
from ingot.train.plan import Plan, plan_run
from ingot.train.profile import ProfileHook
from ingot.train.reference import reference_tables
from ingot.train.resume import find_start
from ingot.train.schedule import learning_rate
from ingot.train.signals import StopSignals
from ingot.train.step import global_targets, train_step
from ingot.train.watch import Tracker


def train(recipe: Recipe, *, fresh: bool = False) -> Outcome:
    """Train, or go on training, until the recipe's last step; then export `model/`. Every rank calls it.

    Raises:
        WrongInput: the recipe does not fit data, model, tokenizer, ranks, or the checkpoints that are there.
        Stopped: a signal came; with a committed checkpoint the same command goes on from there.
    """
    run = recipe.folder
    with ExitStack() as closing:
        signals = closing.enter_context(StopSignals())
        mesh = closing.enter_context(running_mesh(recipe.parallel))
        recipe = with_fitting_micro_batch(recipe, mesh)
        plan = plan_run(recipe, mesh)
        start = mesh.from_main(lambda: find_start(run, plan.identity, fresh=fresh))
        first = start.step if start else plan.begin
        tell = _teller(recipe, mesh)
        tables = reference_tables(plan, mesh)
        trainee = build_trainee(plan, start, tables, mesh)
        loader = Loader(plan.rows, Order(plan.rows.sizes, recipe.seed, plan.rows.weights, recipe.data.skip), plan.batch, mesh.data.rank)
        closing.callback(loader.close)

        sinks = open_sinks(recipe, run, mesh, first, fingerprint(plan.identity))
        progress = closing.enter_context(Progress("train", plan.last, "steps", done=first, quiet=not mesh.is_main))
        log = LogHook(sinks, progress, recipe.track.every, plan.last, _workload(plan, mesh), mesh, gpu=recipe.track.gpu)
        evaluation = _evaluation(plan, trainee, sinks, mesh)
        if start is not None:
            evaluation.restore(start.commit["watched"])
        samples = SampleHook(lambda: sample_texts(plan, trainee, mesh), recipe.train.sample_every, sinks, mesh, spread=is_spread(trainee.model))
        checkpoint = CheckpointHook(trainee, plan, run, evaluation, tell, mesh, first)
        # Evaluation comes before saving, so that a checkpoint knows what was found at its own step.
        hooks: list[Hook] = [evaluation, samples, log, checkpoint, *_tracing(plan, mesh, first)]
        for hook in hooks:
            closing.callback(hook.close)

        def fetch(step: int) -> Work:
            began = time.monotonic()
            batches = loader.step(step)
            targets, asked = global_targets(trainee.objectives.training, batches, mesh, asked=signals.signum != 0)
            if not targets:
                raise WrongInput(f"step {step + 1:,} has not one target in its {plan.batch.global_batch} rows; run `ingot show mask` on the recipe")
            return Work(batches, targets, (signals.signum or signal.SIGTERM) if asked else 0, began)

        def do_step(step: int, work: Work) -> StepInfo:
            return _step(step, work, plan, trainee, mesh)

        _announce(plan, trainee, mesh, first, resumed=start is not None)
        tell("start", step=first, cause="resumed" if start else "first step")
        began, reached, signum = time.monotonic(), first, 0
        if start is None or not start.commit["finished"]:
            end = run_loop(first, plan.last, fetch, do_step, hooks)
            reached, signum = end.step, end.signum
            checkpoint.save(reached)
        seconds = time.monotonic() - began
        if signum:
            tell("stop", step=reached, seconds=seconds, cause=signal.Signals(signum).name)
            raise _stopped(recipe, reached, signum)
        tell("finish", step=reached, seconds=seconds)
        chosen = take_best(plan, trainee, evaluation.best_step, reached, mesh)
        mesh.from_main(lambda: export_run(plan, trainee, chosen))
        return _outcome(recipe, first, reached, chosen, seconds)


def _step(step: int, work: Work, plan: Plan, trainee: Trainee, mesh: Mesh) -> StepInfo:
    """Optimizer step `step` (from 0)."""
    knobs = plan.recipe.train
    lr = learning_rate(knobs.schedule, knobs.optimizer.lr, step, plan.last)
    set_learning_rate(trainee.optimizer, lr)
    outcome = train_step(
        trainee.module, trainee.objectives.training, work.batches, trainee.masters, trainee.optimizer, targets=work.targets, clip_norm=knobs.clip_norm,
        compute=plan.compute, mesh=mesh, before=lambda index, batch: seed_dropout(trainee.model, plan.recipe.seed, step, index, batch, mesh),
    )
    tokens = knobs.global_batch * plan.tokens_per_sample
    return StepInfo(step + 1, knobs.global_batch, tokens, outcome, lr, time.monotonic() - work.began)


def _teller(recipe: Recipe, mesh: Mesh) -> Tell:
    """Events go to the run folder from rank 0, numbered by attempt."""
    path = recipe.folder.events
    attempt = 1 + sum(event["kind"] == "start" for event in read_lines(path))

    def tell(kind: str, *, step: int, seconds: float | None = None, cause: str | None = None) -> None:
        if mesh.is_main:
            record_event(path, kind, attempt=attempt, step=step, seconds=seconds, cause=cause)

    return tell


def _workload(plan: Plan, mesh: Mesh) -> Workload:
    cost = flops_per_token(plan.drawing.config.to_hf(), plan.recipe.data.seq_len) if plan.drawing.kind == "decoder" else None
    return Workload(cost, peak_flops(mesh.device, plan.compute), plan.compute)


def _tracing(plan: Plan, mesh: Mesh, first: int) -> list[Hook]:
    """The profiler, where it is asked for."""
    knobs = plan.recipe.train.profile
    return [] if knobs is None else [ProfileHook(knobs, plan.recipe.folder.root / "profile", mesh, done=first, last=plan.last)]


def _evaluation(plan: Plan, trainee: Trainee, sinks: Sequence[JsonLines | Guarded], mesh: Mesh) -> EvaluateHook:
    knobs, best = plan.recipe.train, plan.recipe.checkpoint.best
    stopping = None if knobs.early_stop is None else Tracker(knobs.early_stop.metric, knobs.early_stop.min_delta)
    patience = 0 if knobs.early_stop is None else knobs.early_stop.patience
    measure = measuring(plan, trainee, mesh)
    return EvaluateHook(measure, knobs.evaluate_every, stopping, patience, None if best is None else Tracker(best), sinks)


def _announce(plan: Plan, trainee: Trainee, mesh: Mesh, first: int, *, resumed: bool) -> None:
    size, moved = (count / 1e6 for count in whole_size(trainee.model, mesh))
    if mesh.is_main:
        of_these = f", {moved:.2f} M of them trained" if moved < size else ""
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        onward = f", {'going on' if resumed else 'beginning'} after step {first:,}" if first else ""
        say(f"train: {plan.recipe.objective.kind}, {size:.1f} M parameters{of_these}, {plan.last:,} steps of {plan.batch.global_batch} x "
            f"{plan.recipe.data.seq_len} tokens, {plan.compute} on {ranks}{device_name(mesh.device)}{onward}")


def _stopped(recipe: Recipe, step: int, signum: int) -> Stopped:
    name = signal.Signals(signum).name
    if step == 0:
        return Stopped(f"stopped by {name} before the first step: nothing to save; the same command starts again", signum=signum, committed=False)
    return Stopped(f"stopped by {name} with checkpoint {step} committed; the same command goes on from there", signum=signum, committed=True)


def _outcome(recipe: Recipe, first: int, step: int, chosen: int, seconds: float) -> Outcome:
    run = recipe.folder
    losses = [line["train/loss"] for line in read_lines(run.metrics) if line.get("train/loss") is not None]
    loss = f", loss {losses[-1]:.3f}" if losses else ""
    best = f", the best at step {chosen:,} exported" if chosen != step else ""
    folders = [run.model, *([run.adapter] if recipe.model.lora is not None else [])]
    files = sizes(run.root, [file for folder in folders for file in exported_files(folder)])
    took = f" in {duration(seconds)}" if first == 0 else f", the last {step - first:,} in {duration(seconds)}" if step > first else ""
    return Outcome(f"{step:,} steps{took}{loss}{best}", str(run.model), model_hash(run.model), files)
