"""The knobs that determine the numerical results of training; a run resumes only if they are
unchanged.

How work is distributed (micro_batch, ranks) and how often things are saved or logged are excluded:
they never change the result.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput, differing
from ingot.base.listing import find_files, is_hidden
from ingot.base.markers import fingerprint
from ingot.base.masking import knobs_hidden
from ingot.base.runfolder import model_folder
from ingot.base.storage import is_remote, sampled_sha256, sha256_file
from ingot.config.doors import (
    FAMILIES,
    OBJECTIVES,
    OPTIMIZERS,
    REWARDS,
    SCHEDULES,
    TASKS,
    packages_of,
)
from ingot.config.models.content import recorded_content
from ingot.config.models.source import (
    named_folder,
    source_config,
    source_folder,
    starts_random,
)
from ingot.config.recipe import Recipe
from ingot.config.sections.checkpoint import Changeable
from ingot.config.sections.data import SourceSettings
from ingot.config.sections.evaluation import TaskSettings
from ingot.config.sections.rewards import RewardSettings

TRAINING_KNOBS = (
    "seed",
    "model",
    "data.seq_len",
    "data.truncate",
    "data.skip",
    "data.window",
    "objective",
    "train.steps",
    "train.epochs",
    "train.tokens",
    "train.global_batch",
    "train.optimizer",
    "train.schedule",
    "train.clip_norm",
    "train.skip.spike",
    "train.experts",
    "train.early_stop",
    "train.start_from",
    "train.reset_optimizer",
    "train.start_step",
    "precision.compute",
    "precision.master",
    "precision.reduce",
    "precision.float8",
)
MAY_CHANGE: tuple[Changeable, ...] = typing.get_args(Changeable)
"""Those of them that `resume.allow` may name: results differ from then on, but it is still the same
training.
"""
STOPPING = (
    *("train.evaluate_every", "train.evaluate_rows", "train.average.evaluate", "evaluate."),
    "held_out",
)
"""How those begin that are included only with `train.early_stop`, and come and go with it."""
WEIGHTS_OF = "the weights of "
"""Before the knob that names them, in the keys of `weights_identity`."""
REWARDS_AS = "objective.rewards: what stands in "
"""Before the path of a file, in those of `rewards_identity`."""


def training_identity(recipe: Recipe) -> dict[str, Any]:
    """Knob -> value, flat, for comparison and for naming changes."""
    chosen = recipe.select(TRAINING_KNOBS)
    del chosen["model"]["unproved"]  # a permission, without effect on results
    if recipe.model.quantize is not None:
        del chosen["model"]["quantize"]["merge_into"]  # of the export
    if chosen["objective"].get("sampler"):
        chosen["objective"]["sampler"] = "vllm"  # not where it is
    train = recipe.train
    if train.start_step == 0 and (train.start_from is None or train.reset_optimizer):
        chosen["train.start_step"] = None  # where it begins anyway
    chosen["data.pack"] = recipe.pack
    chosen["data.train.weight"] = [source.weight for source in recipe.data.train]
    if recipe.documents == "pair":
        chosen.update(recipe.select(("data.target_len",)))
    average = train.average
    if average is not None and average.kind == "ema":
        chosen["train.average.decay"] = average.decay
        if train.early_stop is not None:
            chosen["train.average.evaluate"] = average.evaluate
    if (early_stop := train.early_stop) is not None:
        # Only with early stopping does evaluation affect training.
        chosen.update(recipe.select(("train.evaluate_every", "train.evaluate_rows")))
        chosen.update(_task_of(recipe, early_stop.metric))
    kinds = (
        (OBJECTIVES, recipe.objective.kind),
        (OPTIMIZERS, recipe.train.optimizer.kind),
        (SCHEDULES, recipe.train.schedule.kind),
        (FAMILIES, str(recipe.model.config.get("model_type", ""))),
    )
    rewards = [(REWARDS, reward.kind) for reward in getattr(recipe.objective, "rewards", [])]
    identity: dict[str, Any] = knobs_hidden(chosen | packages_of((*kinds, *rewards)))
    return identity


def measured_with(recipe: Recipe, metric: str, held_out: str | None) -> dict[str, Any]:
    """What a value of `metric` that is measured while training depends on beside the weights, flat.
    Values compare only where it is equal. `held_out`: the fingerprint of the rows held out.
    """
    average = recipe.train.average
    knobs = recipe.select(("train.evaluate_rows",)) | _task_of(recipe, metric)
    knobs["train.average.evaluate"] = average is not None and average.evaluate
    if reads_held_out(recipe, metric):
        knobs["held_out"] = held_out
    found: dict[str, Any] = knobs_hidden(knobs | items_identity(recipe, metric))
    return found


def reads_held_out(recipe: Recipe, metric: str) -> bool:
    """Whether a metric is measured on the held-out documents, rather than on items of its own."""
    tasks = tasks_of(recipe, metric)
    return not tasks or any(task.needs_held_out for task in tasks)


def stops_by_held_out(recipe: Recipe) -> bool:
    """Whether the held-out documents can end the training."""
    stop = recipe.train.early_stop
    return stop is not None and recipe.data.holds_out and reads_held_out(recipe, stop.metric)


def tasks_of(recipe: Recipe, metric: str) -> list[TaskSettings]:
    """The task whose metric that is; none for a metric of the objective."""
    return [task for task in recipe.tasks if metric.startswith(f"{task.name}/")]


def _task_of(recipe: Recipe, metric: str) -> dict[str, Any]:
    """The knobs of the task whose metric that is."""
    tasks = tasks_of(recipe, metric)
    knobs = {f"evaluate.{task.name}": task.model_dump(mode="json") for task in tasks}
    return knobs | packages_of((TASKS, task.kind) for task in tasks)


def items_identity(recipe: Recipe, metric: str) -> dict[str, str]:
    """Fingerprints of the local files with the items of the task whose metric that is, and of what
    judges them, by their paths: other items under the same name are another measure. What is hidden
    in a folder is none of them.
    """
    found = dict[str, str]()
    for task in tasks_of(recipe, metric):
        local = [one for one in task.sources if not SourceSettings(source=one).scheme]
        files = [(file, one) for one in local if not is_remote(one) for file in find_files(one)]
        for file, one in files:
            if "__pycache__" not in Path(file).parts and not is_hidden(file, one):
                found[f"evaluate.{task.name}: what stands in {file}"] = sha256_file(file)
        named = f"evaluate.{task.name}.rewards: what stands in "
        found |= rewards_identity(getattr(task, "rewards", []), named)
    return found


def weights_identity(recipe: Recipe) -> dict[str, str]:
    """Fingerprints of the weights that training starts or learns from, by the knob that names them:
    a model that was trained again under the same path makes another training. So do the files that
    its rewards name.

    Raises:
        WrongInput: there is no such folder or hub model.
    """
    folders = _folders_of_weights(recipe)
    weights = {f"{WEIGHTS_OF}{knob}": weights_fingerprint(path) for knob, path in folders.items()}
    return weights | rewards_identity(getattr(recipe.objective, "rewards", []))


def check_others_weights(recipe: Recipe) -> None:
    """Raises WrongInput if training would start or learn from what it exports itself: each would
    make the next one another training, for ever.
    """
    run, lora = recipe.folder, recipe.model.lora
    adapter = {"model.lora.adapter": None if lora is None else lora.adapter}
    exported = {folder.resolve() for folder in (run.root, run.model, run.adapter)}
    named = {"model.source": recipe.model.source, **_learnt_from(recipe), **adapter}
    for knob, source in named.items():
        if source is not None and Path(source).resolve() in exported:
            raise WrongInput(
                f"{knob} {source} is what this run exports; give the recipe another `name`"
            )


def _learnt_from(recipe: Recipe) -> dict[str, str | None]:
    """The other models that training reads, by the knob that names them."""
    objective = recipe.objective
    return {
        "objective.teacher": objective.teacher_source,
        "objective.reference": objective.reference_source,
    }


def _folders_of_weights(recipe: Recipe) -> dict[str, Path]:
    lora = recipe.model.lora
    folders: dict[str, Path] = {}
    start = source_folder(recipe.model)
    if start is not None and not starts_random(recipe.model, start):
        folders["model.source"] = start
    for knob, source in _learnt_from(recipe).items():
        if source is not None:
            folders[knob] = named_folder(source, knob)
    if lora is not None and lora.adapter is not None:
        folders["model.lora.adapter"] = Path(lora.adapter)
    return folders


def content_identity(recipe: Recipe) -> dict[str, Any]:
    """The identity of a training, of the weights that it starts or learns from, and of the
    configuration by which weights are drawn.

    The same model under another path makes the same training where the record of its export proves
    it. Fingerprints do not: they are made of samples, in which a few small tensors may be missed.
    """
    knobs = training_identity(recipe)
    for knob, folder in _folders_of_weights(recipe).items():
        section, *inner, name = knob.split(".")
        place = knobs[section]
        for each in inner:
            place = place[each]
        recorded = recorded_content(folder)
        if recorded is not None and not place[name].startswith("hf:"):
            place[name] = recorded
    start = source_folder(recipe.model)
    if start is not None and starts_random(recipe.model, start):
        knobs["model"]["config"] = source_config(recipe.model, start)
    stop = recipe.train.early_stop
    measured = {} if stop is None else items_identity(recipe, stop.metric)
    return knobs | weights_identity(recipe) | measured


def rewards_identity(rewards: Sequence[RewardSettings], named: str = REWARDS_AS) -> dict[str, str]:
    """Fingerprints of the files and models that rewards name, by their paths after `named`: a
    function that was edited under the same name is another reward.
    """
    found = dict[str, str]()
    for name in (name for reward in rewards for name in reward.files):
        path = Path(name)
        if path.is_file():
            found[f"{named}{name}"] = sha256_file(path)
        elif path.is_dir():
            found[f"{named}{name}"] = weights_fingerprint(model_folder(path))
    return found


def weights_fingerprint(folder: Path) -> str:
    """A fingerprint of a model folder's weights and configuration, of which it reads samples."""
    names = ("*.safetensors", "config.json", "adapter_config.json")
    files = sorted(file for name in names for file in folder.glob(name))
    return fingerprint({file.name: sampled_sha256(file) for file in files})


CALLED = {
    "data": "the prepared data",
    "held_out": "the held-out data",
    "tokenizer": "the tokenizer",
}
"""What is in an identity without being a knob, in words."""
SOURCE_WEIGHTS = "data.train.weight"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, for people: `knob old -> new` as a recipe would have them, sections expanded to
    single knobs, and sources that were added or removed by their names.
    """
    found: list[str] = []
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        given = [value for value in (old, new) if value is not None]
        if all(isinstance(value, Mapping) for value in given) and (
            len(given) == 2 or _are_sources(given[0])
        ):
            found += [f"{key}.{change}" for change in changes(old or {}, new or {})]
        else:
            found.append(_change(key, old, new))
    return found


def _are_sources(section: Mapping[str, Any]) -> bool:
    return bool(section) and all(_is_source(one) for one in section.values())


def _is_source(value: Any) -> bool:
    return isinstance(value, Mapping) and "source" in value


def _change(key: str, old: Any, new: Any) -> str:
    if old is None and _is_source(new):
        return f"{key} {new['source']} added"
    if new is None and _is_source(old):
        return f"{key} {old['source']} removed"
    if key == SOURCE_WEIGHTS and old and new and len(old) != len(new):
        return f"data.train {len(old)} -> {len(new)} sources"
    return f"{CALLED.get(key, key)} {' -> '.join(differing(old, new, _written))}"


def _written(value: Any) -> str:
    """A value as a recipe has it."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_written, value))}]"
    return str(value)
