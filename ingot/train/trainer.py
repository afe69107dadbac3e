"""`ingot train`: builds everything in order, runs the loop, exports the result, and closes
everything in reverse order.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import ExitStack

import torch

from ingot.base.environment import ranks
from ingot.base.errors import Stopped, WrongInput
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.markers import fingerprint
from ingot.base.progress import duration, say
from ingot.base.reports import VerbOutcome, file_sizes
from ingot.base.runlog import read_lines
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.automatic import Planner
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.data.batches.prompts import check_prompts
from ingot.data.columns.manifest import prepared_for
from ingot.data.packing.tables import read_packed
from ingot.models.device import (
    Compute,
    deterministic_kernels,
    device_name,
    device_record,
    is_fast_in_bf16,
    is_slow_in_bf16,
)
from ingot.models.native.config import DecoderConfig
from ingot.parallel.mesh import Mesh, running_mesh
from ingot.parallel.pipeline import parameter_counts
from ingot.tokenizers.familiar import why_unfamiliar
from ingot.train.assembly import TrainingProcess, make_hooks, make_step_context, open_batches
from ingot.train.automatic_layout import decided, starting_layout
from ingot.train.build import (
    TrainState,
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
from ingot.train.micro_batch.search import with_fitting_micro_batch
from ingot.train.optim.averaging import averaged_steps
from ingot.train.optim.schedules import too_short
from ingot.train.reference import reference_tables
from ingot.train.resume import (
    FIELDS,
    complete,
    exchange_missing,
    fetch_missing,
    find_start,
    open_mirror,
    refuse_others,
)
from ingot.train.rollback import RolledBack, roll_back, with_left_out
from ingot.train.setup import TrainSetup, make_setup
from ingot.train.step import run_steps

LARGE = 20
"""Millions of weights from which on it matters how a step is computed."""
UNLIKE = 0.05
"""Share by which text and places of rows must differ for `train.tokens` to be explained."""


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
                except RolledBack:
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
        if not fresh:
            setup = with_left_out(setup, mesh)
        mesh.from_main(lambda: _check_prompts(setup))
        start = mesh.from_main(lambda: _find_start(process, setup, newest, fresh=fresh))
        average = recipe.train.average
        averaged = 0 if average is None else average.needs_kept
        exchange_missing(process.bucket, start, averaged, mesh)
        first = start.step if start else setup.begin
        if first > setup.last:
            raise WrongInput(
                f"{first:,} steps are done, the recipe asks for {setup.last:,} only; raise"
                " train.steps, or start over with --fresh"
            )
        signals.leave_at_once(start.step if start else None)
        tables = reference_tables(setup, mesh)
        state = build_train_state(setup, start, tables, mesh)
        mesh.from_main(lambda: check_source(setup))
        source = open_batches(setup, state, start, mesh)
        closing.callback(source.close)
        hooks = make_hooks(process, setup, state, source, start, closing)
        context = make_step_context(process, setup, state, source, hooks, first)
        _announce(setup, state, mesh, first, start)
        cause = "resumed" if start else "first step"
        seconds, here = time.monotonic() - began, mesh.ranks
        devices = device_record(mesh.device) | {"world": mesh.world, "per_node": here.local_world}
        events.emit(
            "start",
            step=first,
            seconds=seconds,
            cause=cause,
            last=setup.last,
            devices=devices,
            training=fingerprint(setup.identity),
        )

        loop_began, reached, stopped = time.monotonic(), first, False
        signals.leave_between_steps()
        hooks.do_owed(start)
        if first < setup.last and not hooks.evaluation.is_over:
            try:
                end = run_steps(context, first, setup.last)
                if not end.stopped:  # else the next attempt goes on, and comes to them again
                    hooks.skips.finish()
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
        before_anew=before_anew,
        on_change=lambda found, changed: events.emit("changed", step=found.step, cause=changed),
    )


def _announce(
    setup: TrainSetup,
    train_state: TrainState,
    mesh: Mesh,
    first: int,
    start: CommittedCheckpoint | None,
) -> None:
    size, moved = (count / 1e6 for count in parameter_counts(train_state.model, mesh))
    if mesh.is_main:
        of_these = f", {moved:.2f} M of them trained" if moved < size else ""
        ranks = f"{mesh.world} x " if mesh.world > 1 else ""
        onward = f", {'going on' if start else 'beginning'} after step {first:,}" if first else ""
        say(
            f"train: {setup.recipe.objective.kind}, {size:.1f} M parameters{of_these},"
            f" {setup.last:,} steps of {setup.batch.global_batch} x {setup.recipe.data.seq_len}"
            f" tokens, {setup.compute} on {ranks}{device_name(mesh.device)}{onward}"
        )
        if start is None and setup.origin and setup.begin and setup.data_begin == setup.begin:
            say(
                "train: train.start_from was trained on other data, or in another order; this"
                " begins with its first row"
            )
        rows = len(setup.rows)
        for knob, why in too_short(setup.recipe, rows, setup.begin, setup.last, setup.data_begin):
            say(f"train: warning: {knob}: {why}")
        if text := _text_of_tokens(setup):
            say(f"train: warning: {text}")
        if mixture := _mixture(setup):
            say(f"train: {mixture}")
        if advice := advice_on_compute(setup.recipe, setup.compute, mesh.device, size):
            say(f"train: {advice}")
        folder = None if setup.model_spec.random or first else setup.model_spec.folder
        if setup.recipe.tokenizer.source is not None and folder is not None:
            strange = why_unfamiliar(setup.recipe, setup.tokenizer, folder)
            if strange is not None:
                say(f"train: warning: tokenizer.source: {strange}")
        config = setup.model_spec.config
        knobs = setup.recipe.train.experts
        experts = config.experts if isinstance(config, DecoderConfig) else None
        if setup.model_spec.random and experts and not (knobs.aux_loss or knobs.bias_rate):
            corrected = " or train.experts.bias_rate=0.001" if experts.corrected else ""
            say(
                "train: warning: nothing balances the load of experts, and from random weights few"
                f" of them may come to take all tokens; set train.experts.aux_loss=0.001{corrected}"
            )
        before = start or (None if setup.recipe.train.reset_optimizer else setup.origin)
        for line in setup.learning_rate.told(first, before.commit if before else {}):
            say(f"train: {line}")


def _text_of_tokens(setup: TrainSetup) -> str | None:
    """What `train.tokens` comes to, where rows have places without text, or two sequences each.
    Nothing where the model reads other tokens than the columns have: answers, spans and masks.
    """
    recipe, rows = setup.recipe, setup.rows
    knobs, objective, steps = recipe.train, recipe.objective, setup.last - setup.begin
    is_read_otherwise = objective.samples_answers or recipe.documents == "masked"
    if knobs.tokens is None or is_read_otherwise:
        return None
    a_row = (rows.tokens - rows.left_out) / len(rows) / (1 - objective.forward_only)
    text = a_row * steps * objective.rows_of(knobs.global_batch)
    share = text / (steps * knobs.global_batch * recipe.data.seq_len)
    if abs(share - 1) < UNLIKE:
        return None
    return (
        f"train.tokens {knobs.tokens:,} counts places of rows, which hold about {text:,.0f} tokens"
        f" of text in these {steps:,} steps; for so many of text set it to"
        f" {math.ceil(knobs.tokens / share):,}"
    )


def _mixture(setup: TrainSetup) -> str | None:
    """What weights make of the sources: a share says nothing of a source's size, so that a small
    one may be repeated many times, and a large one not be seen whole.
    """
    recipe = setup.recipe
    passes = setup.order.passes(range(setup.drawn(setup.begin), setup.drawn(setup.last)))
    if len(passes) == 1:
        return None
    sources, total = recipe.data.train, sum(source.weight for source in recipe.data.train)
    return "data.train by weight: " + ", ".join(
        f"{source.source} {source.weight / total:.1%} ({times:.3g} passes)"
        for source, times in zip(sources, passes, strict=True)
    )


def advice_on_compute(
    recipe: Recipe, compute: Compute, device: torch.device, millions: float
) -> str | None:
    """That another `precision.compute` would be several times faster on this processor, or that a
    GPU's layers are not compiled and nobody chose that.
    """
    if compute == "bf16" and is_slow_in_bf16(device):
        return (
            "warning: this processor has no instructions for bf16, so that products in it take many"
            " times as long as in float32; set precision.compute=fp32"
        )
    if millions < LARGE:
        return None
    is_open = recipe.precision.compute == "auto"
    if is_open and compute == "fp32" and is_fast_in_bf16(device):
        return "this processor is much faster in bf16: precision.compute=bf16 trains in it, too"
    is_open = "compile" not in recipe.train.model_fields_set and recipe.parallel.tensor == 1
    if is_open and device.type == "cuda":
        return (
            "the layers are not compiled: on a GPU train.compile=true starts a minute later and"
            " then takes less time and memory"
        )
    return None


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
    losses = [line["train/loss"] for line in read_lines(run.metrics) if "train/loss" in line]
    loss = ""
    if losses:
        loss = ", the last loss not finite" if losses[-1] is None else f", loss {losses[-1]:.3f}"
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
