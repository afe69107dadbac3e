"""Documents and learning rate of a recipe, and all judgements of a plan in the order in which they
are told.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from ingot.base.errors import Failed, WrongInput
from ingot.config.models.source import trained_kind
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import TWO_ROWS
from ingot.config.sections.training import AdamSettings
from ingot.data.splits import Shares
from ingot.plan.checks.finding import PlanFinding
from ingot.plan.checks.machines import (
    judge_float8,
    judge_length,
    judge_offload,
    judge_pauses,
    judge_place,
    judge_sampling,
    judge_server,
)
from ingot.plan.data_sample import LengthSample
from ingot.plan.place import PlannedPlace
from ingot.plan.run_cost import RunCost
from ingot.plan.storage import ModelSize
from ingot.plan.unknown import Unknown
from ingot.tokenizers.familiar import never_met, why_unfamiliar
from ingot.tokenizers.load import load_tokenizer, models_tokenizer, resolve_tokenizer

MUCH_LOST, MUCH_PADDED = 0.01, 0.5
"""Shares from which on a finding is a warning."""


def judge_unknown(lengths: Unknown) -> PlanFinding:
    """Why nothing is known of the documents: something is wrong, or cannot be looked at here."""
    return PlanFinding("warning" if lengths.wrong else "not checked", "data", lengths.needs)


def judge_data(recipe: Recipe, sample: LengthSample) -> Iterator[PlanFinding]:
    """How documents fit into the rows."""
    name, own = next(iter(sample.columns.items()))
    each = "document" if name in ("tokens", "body") else name
    yield PlanFinding(
        "known",
        "data",
        f"{sample.about}; a {each} has {own.median:,.0f} tokens in the median,"
        f" {own.high:,.0f} at 90 % and {own.longest:,} at most; {own.longer:.1%} are longer"
        f" than {own.limit:,}",
    )
    yield from _judge_held_out(recipe, sample)
    if sample.unreadable > 0.0:
        yield PlanFinding(
            "warning" if sample.unreadable > MUCH_LOST else "known",
            "data.train",
            f"{sample.unreadable:.1%} of the records looked at cannot be read and are left out:"
            f" {sample.why_unreadable}",
        )
    if sample.truncated or (sample.lost_targets or 0.0) > 0.0:
        side = "end"
        if recipe.data.truncate == "left":
            of_prompt = recipe.documents in ("preference", "rated")
            side = "prompt's beginning" if of_prompt else "beginning"
        lost = sample.lost_targets
        message = f"{sample.truncated:.1%} of the documents lose their {side}"
        if lost is not None:
            message += f", and {lost:.1%} of the trained tokens are cut away"
        much = max(sample.truncated if lost is None else lost, 0.0) > MUCH_LOST
        way = "; raise data.seq_len, or drop long documents" if much else ""
        if much and recipe.documents == "pair":
            way = "; raise data.seq_len or data.target_len"
        yield PlanFinding("warning" if much else "known", "data.seq_len", message + way)
    if sample.left_out > 0.0:
        much = sample.left_out > MUCH_LOST
        why = "nothing that is trained remains of them"
        if recipe.data.truncate == "drop":
            why = "they are longer, and data.truncate is drop, or " + why
        message = f"{sample.left_out:.1%} of the documents are left out, since {why}"
        way = "; raise data.seq_len, or look at them with `ingot show mask`" if much else ""
        yield PlanFinding("warning" if much else "known", "data.seq_len", message + way)
    # Rows of prompts that are answered are only as long as both need.
    if sample.padding > 0.0 and sample.left_out < 1.0 and not recipe.objective.samples_answers:
        much = sample.padding > MUCH_PADDED
        message = f"{sample.padding:.1%} of the positions are padding"
        if trained_kind(recipe) != "decoder" or recipe.documents in TWO_ROWS:
            message += " at most: batches are only as long as their longest document"
            much = False
        else:
            message += "; lower data.seq_len, or set data.pack to best_fit" if much else ""
        yield PlanFinding("warning" if much else "known", "data.pack", message)


def _judge_held_out(recipe: Recipe, sample: LengthSample) -> Iterator[PlanFinding]:
    """Whether so few documents are likely to have one that is held out, without which `prepare`
    stops. Which one is told by hashes of identities that only ingested documents have.
    """
    share = Shares.of(recipe.data).validation
    if not sample.whole or share is None:
        return
    none = (1 - share) ** sample.documents
    if none >= 0.5:
        count = f"{sample.documents:,} document{'s' if sample.documents > 1 else ''}"
        yield PlanFinding(
            "warning",
            "data.validation",
            f"{share:g} of {count} is none with a probability of {none:.0%}, and `ingot prepare`"
            " stops then; raise data.validation.fraction, give data.validation sources of its own,"
            " or hold nothing out with data.validation=null",
        )


ABOVE, BELOW = 5.0, 20.0
"""How far a learning rate may lie above and below all published ones."""
REACH, REACH_OF = 10.0, {"pretrain": 4.0, "lora": 1e3, "lora_dpo": 1e3, "classify": 1e3}
"""A published training is compared with models up to this many times larger or smaller."""


@functools.cache
def published_rates() -> dict[str, Any]:
    """The table of published learning rates, with their sources."""
    text = importlib.resources.files("ingot.plan").joinpath("learning_rates.yaml")
    found: dict[str, Any] = yaml.safe_load(text.read_text(encoding="utf-8"))
    return found


def judge_tokenizer(recipe: Recipe, *, random: bool) -> Iterator[PlanFinding]:
    """Whether the weights that training goes on from know the tokenizer's ids."""
    knob = "tokenizer.source"
    if random or recipe.tokenizer.source is None:
        return
    if recipe.trains_tokenizer:
        yield PlanFinding("warning", knob, never_met(recipe))
        return
    try:
        folder = models_tokenizer(recipe, ask=True)
        given = load_tokenizer(resolve_tokenizer(recipe, ask=True))
    except (WrongInput, Failed):
        return  # told with the data
    if strange := why_unfamiliar(recipe, given, folder):
        yield PlanFinding("warning", knob, strange)


def judge_rate(recipe: Recipe, size: ModelSize | None, *, random: bool) -> PlanFinding:
    """The learning rate beside those of published trainings of the same way and a similar size."""
    knob, optimizer = "train.optimizer.lr", recipe.train.optimizer
    if not isinstance(optimizer, AdamSettings):
        return PlanFinding("not checked", knob, f"no published ones are known for {optimizer.kind}")
    if size is None:
        return PlanFinding("not checked", knob, "the model's size is not known")
    way = _way(recipe, random=random)
    table, reach = published_rates(), REACH_OF.get(way, REACH)
    near = [
        (rate, source)
        for weights, rate, source in table.get(way, ())
        if 1 / reach <= size.weights / weights <= reach
    ]
    if not near:
        of = f"{size.weights / 1e6:,.3g} M weights"
        return PlanFinding("not checked", knob, f"no published ones are known for {way} of {of}")
    low, high = min(near), max(near)
    between = f"{low[0]:g}" if low[0] == high[0] else f"{low[0]:g} to {high[0]:g}"
    message = (
        f"{optimizer.lr:g}; published for {way} of about this size: {between}"
        f" ({_sources(source for _, source in near)})"
    )
    if low[0] / BELOW <= optimizer.lr <= high[0] * ABOVE:
        return PlanFinding("known", knob, message)
    side = "above" if optimizer.lr > high[0] else "below"
    return PlanFinding("warning", knob, f"{message}; this one is far {side} them")


def _way(recipe: Recipe, *, random: bool) -> str:
    kind = recipe.objective.kind
    if kind in ("seq2seq", "classify", "mlm"):
        return kind
    if recipe.model.lora is not None:
        return "lora_dpo" if kind == "dpo" else "lora"
    if kind == "pretrain" and not random:
        return "continue"
    return kind


def _sources(names: Iterable[str]) -> str:
    known = published_rates()["sources"]
    return "; ".join(known[name]["title"] for name in dict.fromkeys(names))


def all_judgements(
    recipe: Recipe,
    place: PlannedPlace,
    cost: RunCost,
    sample: LengthSample | Unknown,
    config: Mapping[str, Any] | None,
    size: ModelSize | None,
    *,
    random: bool,
) -> list[PlanFinding]:
    """All of them, warnings first."""
    found: list[PlanFinding] = []
    rows = None
    if isinstance(sample, Unknown):
        found.append(judge_unknown(sample))
    else:
        rows = sample.rows
        found += judge_data(recipe, sample)
    found += judge_length(recipe, cost, rows)
    found += judge_tokenizer(recipe, random=random)
    found.append(judge_rate(recipe, size, random=random))
    found += [*judge_pauses(recipe, cost), *judge_place(recipe, place, cost)]
    found += [*judge_offload(recipe, place), *judge_float8(recipe)]
    found += judge_sampling(recipe, config, size)
    found.append(judge_server(recipe, config, size))
    order = ("warning", "known", "not checked")
    return sorted(found, key=lambda finding: order.index(finding.kind))
