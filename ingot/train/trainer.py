"""`ingot train`: builds everything in order, runs the loop, exports the result, and closes
everything in reverse order.
"""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from functools import partial

from ingot.base.environment import ranks
from ingot.base.errors import Stopped
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.markers import fingerprint
from ingot.base.progress import duration
from ingot.base.reports import VerbOutcome
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.automatic import Planner
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.data.batches.prompts import check_prompts
from ingot.data.columns.manifest import prepared_for
from ingot.data.packing.tables import read_packed
from ingot.models.device import (
    deterministic_kernels,
    device_record,
)
from ingot.parallel.mesh import running_mesh
from ingot.train.announcement import announce
from ingot.train.assembly import (
    Hooks,
    TrainingProcess,
    make_hooks,
    make_step_context,
    open_batches,
)
from ingot.train.automatic_layout import decided, starting_layout
from ingot.train.build import (
    build_train_state,
    check_adapter,
    check_origin,
    check_source,
)
from ingot.train.earlier import finish_moves
from ingot.train.finish import export_run, exported_files, take_best
from ingot.train.goodput import (
    EventSink,
    next_attempt,
    record_lost_time,
    since_created,
)
from ingot.train.hooks import TooManySkipped
from ingot.train.interrupts import LeaveNow, PreemptionNotice, StopSignals, stacks_on_demand
from ingot.train.metrics import LateMetric
from ingot.train.micro_batch.search import with_fitting_micro_batch
from ingot.train.mirroring import (
    complete,
    exchange_missing,
    fetch_missing,
    open_mirror,
    refuse_others,
)
from ingot.train.optim.averaging import averaged_steps
from ingot.train.reference import reference_tables
from ingot.train.resume import FIELDS, check_steps, come_to, find_start
from ingot.train.rollback import RolledBack, roll_back, with_left_out
from ingot.train.rollout.sampling import RewardAbsent
from ingot.train.setup import TrainSetup, make_setup
from ingot.train.step import LoopEnd, StepContext, run_steps


def train(recipe: Recipe, *, fresh: bool = False, planner: Planner | None = None) -> VerbOutcome:
    """Train, or resume training, until the recipe's last step, then export `model/`. Collective.

    Args:
        planner: decides what the recipe leaves to ingot (`parallel: auto`).

    Raises:
        WrongInput: the recipe does not fit data, model, tokenizer, ranks or existing checkpoints.
        Stopped: a signal was received; if a checkpoint was committed, the same command resumes.
    """
    here, run = ranks(), recipe.folder
    attempt = next_attempt(run.events)
    heart = HeartbeatWriter(
        run.heartbeats, rank=here.rank, local_rank=here.local_rank, attempt=attempt
    )
    events = EventSink(run.events, heart, is_main=here.is_main)
    began = time.monotonic() - since_created()
    try:
        with ExitStack() as closing:
            signals = closing.enter_context(StopSignals(recipe.checkpoint.grace_s))
            notice = recipe.checkpoint.notice if here.local_rank == 0 else None
            closing.enter_context(PreemptionNotice(notice))
            closing.enter_context(stacks_on_demand(run.logs, here.rank))
            if here.is_main:
                finish_moves(run)
            if here.is_main and not fresh:
                record_lost_time(run, events)
            heart.beat("loading")
            mesh = closing.enter_context(
                running_mesh(starting_layout(recipe.parallel), start_s=recipe.launch.start_s)
            )
            if recipe.train.deterministic:
                closing.enter_context(deterministic_kernels(mesh.device))
            bucket = open_mirror(recipe, mesh, closing, again=heart.attempt > 1)
            newest = None if fresh else fetch_missing(bucket, run.checkpoints, mesh)
            recipe, mesh = decided(recipe, mesh, planner)
            recipe = with_fitting_micro_batch(recipe, mesh, planner)
            process = TrainingProcess(recipe, mesh, heart, signals, events, bucket)
            while True:
                try:
                    outcome = _train_from_checkpoint(process, began, newest, fresh=fresh)
                    break
                except RolledBack as back:
                    if process.any_rank_asked():  # the next attempt reads the checkpoint again
                        raise LeaveNow(signals.signum or signal.SIGTERM, back.step) from None
                    fresh, began = False, time.monotonic()
                    heart.attempt += 1
                    newest = fetch_missing(bucket, run.checkpoints, mesh)
    except LeaveNow as leave:
        events.emit("stop", step=leave.committed or 0, cause=signal.Signals(leave.signum).name)
        heart.beat("over")
        raise _stopped(leave.committed, leave.signum) from None
    heart.beat("over")
    return outcome


def _train_from_checkpoint(
    process: TrainingProcess, began: float, newest: CommittedCheckpoint | None, *, fresh: bool
) -> VerbOutcome:
    """Train from the newest checkpoint to the end, and export; `began` is monotonic seconds,
    `newest` the newest checkpoint if it was verified.
    """
    recipe, mesh, events, signals = process.recipe, process.mesh, process.events, process.signals
    with ExitStack() as closing:
        setup = make_setup(recipe, mesh, fresh=fresh)
        mesh.from_main(lambda: _check_prompts(setup))
        start = mesh.from_main(partial(_find_start, process, setup, newest, fresh=fresh))
        if not fresh:  # one that was brought back has its own
            setup = with_left_out(setup, mesh)
        average = recipe.train.average
        averaged = 0 if average is None else average.needs_kept
        exchange_missing(process.bucket, start, averaged, mesh)
        first = start.step if start else setup.begin
        check_steps(first, setup.last)
        signals.leave_at_once(start.step if start else None)
        tables = reference_tables(setup, mesh)
        state = build_train_state(setup, start, tables, mesh)
        mesh.from_main(lambda: check_source(setup))
        source = open_batches(setup, state, start, mesh)
        closing.callback(source.close)
        hooks = make_hooks(process, setup, state, source, start, closing)
        context = make_step_context(process, setup, state, source, hooks, first)
        announce(setup, state, mesh, first, start)
        _record_start(process, setup, start, first, time.monotonic() - began)

        loop_began, reached, stopped = time.monotonic(), first, False
        signals.leave_between_steps()
        hooks.do_owed(start)
        if first < setup.last and not hooks.evaluation.is_over:
            try:
                end = _run_steps(context, hooks, first, setup.last)
            except TooManySkipped as bad:
                raise roll_back(bad, setup, hooks.checkpoint, mesh, events, process.heart) from None
            reached, stopped = end.step, end.stopped
        hooks.checkpoint.finish(reached)
        seconds = time.monotonic() - loop_began
        if stopped or process.any_rank_asked():
            signum = signals.signum or signal.SIGTERM
            events.emit("stop", step=reached, seconds=seconds, cause=signal.Signals(signum).name)
            process.heart.beat("over")
            raise _stopped(reached if reached > setup.begin or start else None, signum)
        events.emit("finish", step=reached, seconds=seconds)

        process.heart.beat("exporting")
        signals.leave_at_once(reached)
        best = hooks.evaluation.best_step
        checkpoints = recipe.folder.checkpoints
        read = averaged_steps(recipe.train.average, checkpoints, reached)
        complete(process.bucket, checkpoints, {reached, *read}, best, mesh)
        exported = take_best(setup, state, best, reached, mesh)
        mesh.from_main(lambda: export_run(setup, state, exported))
        # Computed on rank 0 only, since each node may have its own disk.
        return mesh.from_main(lambda: _outcome(recipe, first, reached, exported, seconds))


def _run_steps(context: StepContext, hooks: Hooks, first: int, last: int) -> LoopEnd:
    """Run the steps, and judge the last of them before any checkpoint, also where a signal came:
    none may pass over steps that are too many to skip.
    """
    try:
        end = run_steps(context, first, last)
    except (LateMetric, RewardAbsent) as ended:
        hooks.skips.finish()
        hooks.checkpoint.finish(ended.step)
        raise
    hooks.skips.finish()
    return end


def _record_start(
    process: TrainingProcess,
    setup: TrainSetup,
    start: CommittedCheckpoint | None,
    first: int,
    seconds: float,
) -> None:
    """Record that training is at work, from which step on, where, and which training it is: what it
    costs is counted beside that of others in the same folder.
    """
    mesh = process.mesh
    shared = {"world": mesh.world, "per_node": mesh.ranks.local_world}
    process.events.emit(
        "start",
        step=first,
        seconds=seconds,
        cause="resumed" if start else "first step",
        last=setup.last,
        devices=device_record(mesh.device) | shared,
        training=fingerprint(setup.identity),
    )


def _check_prompts(setup: TrainSetup) -> None:
    """Refuse, before weights are loaded, prompts that a training on rewards cannot answer."""
    recipe = setup.recipe
    if recipe.objective.samples_answers:
        folder, seq_len = recipe.folder.columns, recipe.data.seq_len
        packed = read_packed(folder, prepared_for(recipe), seq_len, recipe.row_plan)
        steps = range(setup.begin, setup.last)
        check_prompts(recipe, setup.rows, packed, setup.tokenizer, setup.order, steps)


def _find_start(
    process: TrainingProcess,
    setup: TrainSetup,
    newest: CommittedCheckpoint | None,
    *,
    fresh: bool,
) -> CommittedCheckpoint | None:
    recipe, events = process.recipe, process.events

    def before_anew() -> None:
        check_origin(setup)
        check_adapter(setup)
        refuse_others(process.bucket)

    return find_start(
        recipe.folder,
        setup.identity,
        fresh=fresh,
        newest=newest,
        allow=recipe.resume.allow,
        reads=(*FIELDS, "rollout") if recipe.objective.samples_answers else FIELDS,
        come_to=partial(come_to, recipe),
        before_anew=before_anew,
        last=setup.last,
        on_change=lambda found, changed: events.emit("changed", step=found.step, cause=changed),
    )


def _stopped(step: int | None, signum: int) -> Stopped:
    """The error that reports a stop; `step` is the newest checkpoint, None if there is none."""
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
    loss = ""
    for line in (line for line in read_lines(run.metrics) if "train/loss" in line):
        value, at = line["train/loss"], line["step"]
        loss = ", the last loss not finite" if value is None else f", loss {value:.3f}"
        loss += f" at step {at:,}" if at != step else ""
    best = f", the best at step {chosen:,} exported" if chosen != step else ""
    folders = [run.model, *([run.adapter] if recipe.model.lora is not None else [])]
    files = {path: size for one in folders for path, size in exported_files(run.root, one).items()}
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
