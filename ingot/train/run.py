"""`ingot train`: builds everything in its visible order, turns the loop, exports the result. Closing is the reverse."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from ingot.base.errors import Stopped
from ingot.base.events import read_lines, record_event
from ingot.base.fingerprint import fingerprint
from ingot.base.progress import Progress, duration, say
from ingot.base.steprecord import Outcome, sizes
from ingot.checkpoints.export import export_model, source_generation
from ingot.config.recipe import Recipe
from ingot.config.shape import flops_per_token, parameter_count
from ingot.data.loader import Loader
from ingot.data.order import Order
from ingot.evaluate.loss import mean_loss
from ingot.models.device import device_name, peak_flops
from ingot.models.folder import LINEAGE, model_hash, weight_files
from ingot.parallel.apply import evaluating
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.train.build import Plan, Trainee, build_trainee, lineage, open_sinks, plan_run
from ingot.train.hooks import CheckpointHook, EvaluateHook, LogHook, Tell, Workload
from ingot.train.loop import Hook, StepInfo, Work, run_loop
from ingot.train.optim import set_learning_rate
from ingot.train.resume import find_start
from ingot.train.schedule import learning_rate
from ingot.train.signals import StopSignals
from ingot.train.step import train_step


def train(recipe: Recipe, *, fresh: bool = False) -> Outcome:
    """Train, or go on training, until the recipe's last step; then export `model/`. Every rank calls it.

    Raises:
        WrongInput: the recipe does not fit data, model, tokenizer, ranks, or the checkpoints that are there.
        Stopped: a signal came; with a committed checkpoint the same command goes on from there.
    """
    run = recipe.folder
    with ExitStack() as closing:
        signals = closing.enter_context(StopSignals())
        mesh = closing.enter_context(running_mesh())
        plan = plan_run(recipe, mesh)
        start = mesh.from_main(lambda: find_start(run, plan.identity, fresh=fresh))
        first = start.step if start else 0
        tell = _teller(recipe, mesh)
        trainee = build_trainee(plan, start, mesh)
        loader = Loader(plan.rows, Order(plan.rows.sizes, recipe.seed, plan.rows.weights, recipe.data.skip), plan.batch, mesh.rank)
        closing.callback(loader.close)

        sinks = open_sinks(recipe, run, mesh, first, fingerprint(plan.identity))
        progress = closing.enter_context(Progress("train", plan.last, "steps", done=first, quiet=not mesh.is_main))
        log = LogHook(sinks, progress, recipe.track.every, plan.last, _workload(plan, mesh), mesh, gpu=recipe.track.gpu)
        evaluation = EvaluateHook(_measure(plan, trainee, mesh), recipe.train.evaluate_every, recipe.train.early_stop, sinks)
        if start is not None:
            evaluation.restore(start.commit["early_stop"])
        checkpoint = CheckpointHook(trainee, plan, run, evaluation, tell, mesh, first)
        # Evaluation comes before saving, so that a checkpoint knows what was found at its own step.
        hooks: list[Hook] = [evaluation, log, checkpoint]
        for hook in hooks:
            closing.callback(hook.close)

        def fetch(step: int) -> Work:
            began = time.monotonic()
            batches = loader.step(step)
            targets, asked = mesh.agree(sum(trainee.objective.targets(batch) for batch in batches), float(signals.signum != 0))
            return Work(batches, int(targets), (signals.signum or signal.SIGTERM) if asked else 0, began)

        def do_step(step: int, work: Work) -> StepInfo:
            return _step(step, work, plan, trainee, mesh)

        _announce(plan, mesh, first)
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
        mesh.from_main(lambda: _export(plan, trainee, reached))
        return _outcome(recipe, first, reached, seconds)


def _step(step: int, work: Work, plan: Plan, trainee: Trainee, mesh: Mesh) -> StepInfo:
    """Optimizer step `step` (from 0)."""
    knobs = plan.recipe.train
    lr = learning_rate(knobs.schedule, knobs.optimizer.lr, step, plan.last)
    set_learning_rate(trainee.optimizer, lr)
    outcome = train_step(
        trainee.module, trainee.objective, work.batches, trainee.optimizer,
        targets=work.targets, clip_norm=knobs.clip_norm, compute=plan.compute, mesh=mesh,
    )
    tokens = knobs.global_batch * plan.recipe.data.seq_len
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
    cost = flops_per_token(plan.drawing.config.to_hf(), plan.recipe.data.seq_len)
    return Workload(cost, peak_flops(mesh.device, plan.compute), plan.compute)


def _measure(plan: Plan, trainee: Trainee, mesh: Mesh) -> Callable[[], float]:
    """The validation loss, as a function of nothing."""

    def measure() -> float:
        with evaluating(trainee.model):
            return mean_loss(trainee.model, plan.held_out, plan.recipe.train.evaluate_rows, plan.batch.micro_batch, plan.compute, mesh)

    return measure


def _announce(plan: Plan, mesh: Mesh, first: int) -> None:
    if mesh.is_main:
        size = parameter_count(plan.drawing.config.to_hf()) / 1e6
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        onward = f", going on after step {first:,}" if first else ""
        say(f"train: {size:.1f} M parameters, {plan.last:,} steps of {plan.batch.global_batch} x {plan.recipe.data.seq_len} tokens, "
            f"{plan.compute} on {ranks}{device_name(mesh.device)}{onward}")


def _stopped(recipe: Recipe, step: int, signum: int) -> Stopped:
    name = signal.Signals(signum).name
    if step == 0:
        return Stopped(f"stopped by {name} before the first step: nothing to save; the same command starts again", signum=signum, committed=False)
    return Stopped(f"stopped by {name} with checkpoint {step} committed; the same command goes on from there", signum=signum, committed=True)


def _export(plan: Plan, trainee: Trainee, step: int) -> None:
    generation = source_generation(plan.drawing.folder)
    target, kind = plan.recipe.folder.model, plan.recipe.precision.export
    export_model(trainee.model, plan.tokenizer, target, export_type=kind, lineage=lineage(plan, step), generation=generation)


def _outcome(recipe: Recipe, first: int, step: int, seconds: float) -> Outcome:
    run = recipe.folder
    losses = [line["train/loss"] for line in read_lines(run.metrics) if line.get("train/loss") is not None]
    loss = f", loss {losses[-1]:.3f}" if losses else ""
    files = sizes(run.root, [*weight_files(run.model), run.model / LINEAGE])
    took = f" in {duration(seconds)}" if first == 0 else f", the last {step - first:,} in {duration(seconds)}" if step > first else ""
    return Outcome(f"{step:,} steps{took}{loss}", str(run.model), model_hash(run.model), files)
