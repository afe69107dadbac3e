"""The knobs that determine the numerical results of training; a run resumes only if they are
unchanged.

How work is distributed (micro_batch, ranks) and how often things are saved or logged are excluded:
they never change the result.
"""

from __future__ import annotations

import typing
from typing import Any

from ingot.base.errors import differing
from ingot.config.doors import (
    FAMILIES,
    OBJECTIVES,
    OPTIMIZERS,
    REWARDS,
    SCHEDULES,
    TASKS,
    packages_of,
)
from ingot.config.recipe import Recipe
from ingot.config.sections.checkpoint import Changeable
from ingot.config.sections.loop import RouterSettings

TRAINING_KNOBS = (
    "seed",
    "model",
    "data.seq_len",
    "objective",
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.global_batch",
    "train.optimizer",
    "train.schedule",
    "train.clip_norm",
    "train.early_stop",
    "precision.compute",
    "precision.master",
    "precision.reduce",
    "precision.float8",
)
MAY_CHANGE: tuple[Changeable, ...] = typing.get_args(Changeable)
"""Those of them that `resume.allow` may name: results differ from then on, but it is still the same
training.
"""
ORIGIN = ("train.start_from", "train.reset_optimizer", "train.start_step")
"""Where training starts from; included only if set."""


def training_identity(recipe: Recipe) -> dict[str, Any]:
    """Knob -> value, flat, for comparison and for naming changes."""
    chosen = recipe.select(TRAINING_KNOBS)
    del chosen["model"]["unproved"]  # a permission, without effect on results
    if recipe.model.quantize is None:
        del chosen["model"]["quantize"]  # as runs of earlier versions have it
    else:
        del chosen["model"]["quantize"]["merge_into"]  # of the export
    if recipe.model.neftune_alpha is None:
        del chosen["model"]["neftune_alpha"]
    if (lora := chosen["model"]["lora"]) is not None:
        for knob, plain in (("kind", "lora"), ("init", "kaiming"), ("plus_ratio", None)):
            if lora[knob] == plain:
                del lora[knob]  # as runs of earlier versions have it
    if chosen["objective"].get("sampler"):
        chosen["objective"]["sampler"] = "vllm"  # not where it is
    for knob in ("sample_again", "staleness", "sampler"):
        if not chosen["objective"].get(knob, True):
            del chosen["objective"][knob]  # as runs of earlier versions have it
    if chosen["objective"].get("old_logprobs") == "sampler":
        del chosen["objective"]["old_logprobs"], chosen["objective"]["importance_cap"]
    if not chosen["train.optimizer"].get("groups", True):
        del chosen["train.optimizer"]["groups"]  # as runs of earlier versions have it
    chosen["data.pack"] = recipe.pack
    if recipe.data.truncate != "right":
        chosen["data.truncate"] = recipe.data.truncate
    if recipe.data.skip:
        chosen["data.skip"] = [list(span) for span in recipe.data.skip]
    if recipe.data.window is not None:
        chosen["data.window"] = recipe.data.window
    chosen["data.train.weight"] = [source.weight for source in recipe.data.train]
    if recipe.documents == "pair":
        chosen.update(recipe.select(("data.target_len",)))
    chosen.update(
        {knob: value for knob, value in recipe.select(ORIGIN).items() if value not in (None, False)}
    )
    if recipe.train.skip.spike is not None:
        chosen.update(recipe.select(("train.skip.spike",)))
    if (experts := recipe.train.experts) != RouterSettings():
        chosen["train.experts"] = experts.model_dump()
    average = recipe.train.average
    if average is not None and average.kind == "ema":
        chosen["train.average.decay"] = average.decay
        if recipe.train.early_stop is not None:
            chosen["train.average.evaluate"] = average.evaluate
    if (early_stop := recipe.train.early_stop) is not None:
        # Only with early stopping does evaluation affect training.
        chosen.update(recipe.select(("train.evaluate_every", "train.evaluate_rows")))
        stopping = [task for task in recipe.tasks if early_stop.metric.startswith(f"{task.name}/")]
        chosen.update({f"evaluate.{task.name}": task.model_dump() for task in stopping})
        chosen.update(packages_of((TASKS, task.kind) for task in stopping))
    kinds = (
        (OBJECTIVES, recipe.objective.kind),
        (OPTIMIZERS, recipe.train.optimizer.kind),
        (SCHEDULES, recipe.train.schedule.kind),
        (FAMILIES, str(recipe.model.config.get("model_type", ""))),
    )
    rewards = [(REWARDS, reward.kind) for reward in getattr(recipe.objective, "rewards", [])]
    return chosen | packages_of((*kinds, *rewards))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`knob old -> new` for everything that differs, with sections expanded to single knobs."""
    found: list[str] = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += [f"{key}.{change}" for change in changes(old, new)]
        elif old != new:
            found.append(" ".join((key, " -> ".join(differing(old, new)))))
    return found
