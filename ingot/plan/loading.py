"""The time in which a rank makes the rows of its next step while it computes one. No torch.

Each rank has one thread for it. It reads prepared columns, which lie in the system's cache of files
unless they are larger than the memory of the node, and packs and collates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.shape import batch_plan
from ingot.data.columns.column import token_dtype
from ingot.plan.checks.finding import PlanFinding
from ingot.plan.data_sample import LengthSample
from ingot.plan.devices.coefficients import Coefficients, Curve
from ingot.plan.place import PlannedPlace
from ingot.plan.ranges import Range
from ingot.plan.seconds import StepSeconds
from ingot.plan.storage import BUCKET_BYTES_S, DISK_BYTES_S, tokens_of_row
from ingot.plan.unknown import Unknown

DOCUMENT = "loading document"
"""The curve of what each further document in a row takes."""
GUESSED_ROWS = Curve.line(
    Range(5e-6, 20e-6, 200e-6, "guessed"), Range(20e6, 100e6, 400e6, "guessed")
)
GUESSED_DOCUMENT = Curve.line(Range(0.5e-6, 1e-6, 10e-6, "guessed"), Range.exactly(1e18, "guessed"))
"""Where no calibration tells: a row and a rate of tokens, and a further document in the row. What
one core of a desktop does in a second, and a third of it.
"""
FULL = 0.5
"""Columns that are larger than this share of a node's memory are read from its disk."""


def loading_curve(recipe: Recipe) -> str:
    """The name of the curve of these rows: seconds of one against its tokens."""
    if recipe.documents in ("text", "chat"):
        return f"loading {recipe.documents}"
    return "loading samples"


def loading_seconds(
    recipe: Recipe,
    place: PlannedPlace,
    coefficients: Coefficients,
    sample: LengthSample | Unknown,
) -> Range:
    """Seconds in which a rank's thread makes its rows of one step; none where answers are sampled
    in their place.
    """
    if recipe.objective.samples_answers:
        return Range.exactly(0.0, "measured")
    try:
        rows = batch_plan(recipe.train, recipe.parallel, place.world).per_rank
    except WrongInput:  # which the checks report
        rows = recipe.train.global_batch
    curves = coefficients.curves
    row = curves.get(loading_curve(recipe), GUESSED_ROWS).seconds(tokens_of_row(recipe))
    further = curves.get(DOCUMENT, GUESSED_DOCUMENT).seconds(0)
    making = (row + further * _further_documents(recipe, sample)) * float(rows)
    return making + _reading(recipe, place, sample, rows)


def _further_documents(recipe: Recipe, sample: LengthSample | Unknown) -> Range:
    """Documents in a row beside the first."""
    if recipe.pack == "none":
        return Range.exactly(0.0, "measured")
    if isinstance(sample, Unknown):
        return Range(0.0, 2.0, recipe.data.seq_len / 16, "guessed")
    mean = max(1.0, sample.columns["tokens"].mean)
    return Range.exactly(max(0.0, recipe.data.seq_len / mean - 1.0), "measured")


def _reading(
    recipe: Recipe, place: PlannedPlace, sample: LengthSample | Unknown, rows: int
) -> Range:
    """From the disk, where the columns do not stay in memory; from a bucket, where `data.window`
    has each node fetch all of the window.
    """
    if isinstance(sample, Unknown):
        return Range.exactly(0.0, "measured")
    item = token_dtype(sample.vocab_size).itemsize + (recipe.documents != "text")
    token = tokens_of_row(recipe) / (2 if recipe.documents in TWO_ROWS else 1) * item
    if recipe.data.window is not None and place.rented:
        return token * recipe.train.global_batch / BUCKET_BYTES_S
    whole = math.inf if sample.tokens is None else sample.tokens.likely * item
    if place.host_bytes is None or sample.tokens is None or whole <= FULL * place.host_bytes:
        return Range.exactly(0.0, "measured")
    return token * float(rows * place.processes) / DISK_BYTES_S


def judge_loading(step: StepSeconds | Unknown) -> Iterator[PlanFinding]:
    """Whether steps wait for their rows."""
    if isinstance(step, Unknown) or step.loading.high < step.total.low:
        return
    if step.loading.likely < step.total.likely:
        message = "making the rows of a step may take as long as computing it"
        yield PlanFinding("known", "data", message)
        return
    message = (
        f"steps wait for their rows, which one thread of each rank makes in"
        f" {step.loading.text()} s; longer documents in a row, or more ranks, divide that work"
    )
    yield PlanFinding("warning", "data", message)
