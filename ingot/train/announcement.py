"""What a training says as it starts: what is trained, and what its user may not have meant."""

from __future__ import annotations

import math

import torch

from ingot.base.progress import say
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.recipe import Recipe
from ingot.models.device import (
    Compute,
    device_name,
    is_fast_in_bf16,
    is_slow_in_bf16,
    unused_accelerator,
)
from ingot.models.native.config import DecoderConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import parameter_counts
from ingot.tokenizers.familiar import why_unfamiliar
from ingot.train.build import TrainState
from ingot.train.optim.schedules import too_short
from ingot.train.setup import TrainSetup

LARGE = 20
"""Millions of weights from which on it matters how a step is computed."""
UNLIKE = 0.05
"""Share by which text and places of rows must differ for `train.tokens` to be explained."""


def announce(
    setup: TrainSetup,
    train_state: TrainState,
    mesh: Mesh,
    first: int,
    start: CommittedCheckpoint | None,
) -> None:
    """Say on rank 0 what is about to be trained, after `first` steps, and warn of what its user may
    not have meant. Collective.
    """
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
        if unused := unused_accelerator():
            say(f"train: {unused}")
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
