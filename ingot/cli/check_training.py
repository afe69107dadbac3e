"""What can be known of a training before it: the model's configuration, the tokenizer, how ranks
and batch are laid out, further models, and room on the disk. A part of `check.py`; no torch.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput, differing
from ingot.base.hub import fetch_config
from ingot.base.storage import is_remote
from ingot.config.family import sizes
from ingot.config.model_source import (
    KIND_FOR_DOCUMENTS,
    check_lengths,
    check_lora,
    check_model_type,
    model_config,
    named_folder,
    source_config,
    starts_random,
)
from ingot.config.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.sections.training import Model
from ingot.config.shape import batch_plan, check_layout, check_pipeline, parameter_count
from ingot.config.values import Findings
from ingot.tokenizers.chat_templates import find_template, for_recipe
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer

STATE_BYTES = 12
"""Bytes of a checkpoint for each trained parameter with Adam: the weight and two moments."""
ADAPTER, RANDOM = "adapter_config.json", "starts from random weights"


def check_model(recipe: Recipe, found: Findings) -> dict[str, Any] | None:
    """The configuration of the model that is trained; None where it cannot be told."""
    values = found.ask(_model_values, recipe.model, at="model.source")
    if values is None:
        return None
    where, kind = f"model.source {recipe.model.source}", KIND_FOR_DOCUMENTS[recipe.documents]
    if kind != "decoder":
        ask = partial(check_model_type, unproved=recipe.model.unproved)
        found.ask(ask, values, kind, where, at="model.source")
        return values
    positions = found.ask(_positions, values, where)
    if positions is not None:
        found.ask(check_lengths, recipe, positions)
    return None if positions is None else values


def _model_values(model: Model) -> dict[str, Any]:
    """The configuration of a source, and under `RANDOM` whether training starts from nothing."""
    scheme, _, name = model.source.partition(":")
    folder = None
    if scheme == "preset":
        preset(name)
    elif scheme == "hf":
        folder = fetch_config(name, model.revision)
    else:
        folder = named_folder(model.source, "model.source")
    random = starts_random(model, folder)
    check_lora(model, random=random)
    return source_config(model, folder) | {RANDOM: random}


def _positions(config: Mapping[str, Any], where: str) -> int:
    """How many tokens a decoder takes. Raises WrongInput where it is none that ingot knows."""
    try:
        return sizes(config, where).positions
    except (KeyError, TypeError, ValueError) as error:
        raise WrongInput(
            f"{where}: its configuration lacks a size or has one that is no number ({error}); mend"
            " its config.json, or model.config"
        ) from None


def check_tokenizer_fits(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """The tokenizer, against data and model."""
    template = recipe.tokenizer.template
    if template is not None:
        found.ask(find_template, template, at="tokenizer.template")
    vocabulary: int | None = recipe.tokenizer.vocab_size
    if not recipe.trains_tokenizer:
        known = model is not None or recipe.tokenizer.source is not None
        vocabulary = _check_tokenizer(recipe, found) if known else None
    given = recipe.model.config.get("vocab_size") if model else None
    limit = given if model and model[RANDOM] else model and model.get("vocab_size")
    if isinstance(vocabulary, int) and isinstance(limit, int) and vocabulary > limit:
        knob = "tokenizer.vocab_size" if recipe.trains_tokenizer else "the tokenizer"
        found.add(
            f"{knob} has {vocabulary} ids, model.source {recipe.model.source} only {limit}; use the"
            f" model's own tokenizer, or random weights with model.config.vocab_size={vocabulary}"
        )


def _check_tokenizer(recipe: Recipe, found: Findings) -> int | None:
    """How many ids the tokenizer has that is taken as it is; None where that cannot be told."""
    given, knob = recipe.model.source, "model.source"
    if recipe.tokenizer.source is not None:
        given, knob = recipe.tokenizer.source, "tokenizer.source"
    if given.startswith("hf:"):
        found.skip(f"the tokenizer of {given} is read by `ingot prepare`", knob)
        return None

    return found.ask(_ids, recipe, at=knob)


def _ids(recipe: Recipe) -> int:
    """How many ids the tokenizer has; raises where it is none, or has no template for chats."""
    tokenizer = for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe)))
    if recipe.documents in ("chat", "preference"):
        _ = tokenizer.chat_format
    return tokenizer.vocab_size


def check_training(
    recipe: Recipe, model: Mapping[str, Any] | None, found: Findings, *, here: bool
) -> None:
    """Batch, layout, further models, tracking and room on the disk."""
    placed = recipe.at("train").launch
    world = placed.nodes * placed.processes
    batch = found.ask(batch_plan, recipe.train, recipe.parallel, world)
    if KIND_FOR_DOCUMENTS[recipe.documents] == "decoder" and model is not None and batch:
        found.ask(check_layout, recipe.parallel, world, model, recipe.data.seq_len)
    lora = recipe.model.lora
    dropout = lora.dropout if lora else 0.0
    staged = partial(check_pipeline, compiled=recipe.train.compile, dropout=dropout)
    found.ask(staged, recipe.parallel, recipe.memory)
    for knob, source in (
        ("objective.teacher", recipe.objective.teacher_source),
        ("objective.reference", recipe.objective.reference_source),
    ):
        if source is not None:
            found.ask(check_other_model, source, knob, at=knob)
    if lora is not None and lora.adapter and not (Path(lora.adapter) / ADAPTER).is_file():
        found.add(f"model.lora.adapter {lora.adapter} has no {ADAPTER}; give PEFT's folder")
    start = recipe.train.start_from
    if start is not None and not is_remote(start) and not Path(start).is_dir():
        found.add(f"train.start_from {start} does not exist; give a run folder or a checkpoint")
    if here and placed.kind == "local":
        if recipe.track.wandb is not None:
            need(found, "wandb", "track.wandb", "pip install 'ingot[track]'")
        _check_disk(recipe, model, found)


def check_other_model(source: str, knob: str) -> None:
    """Raises WrongInput where a model that training learns from is none, Failed where the hub that
    has it does not answer.
    """
    if source.startswith("hf:"):
        fetch_config(source.removeprefix("hf:"))
    else:
        model_config(named_folder(source, knob))


def _check_disk(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """Whether the checkpoints that are kept, one that is written, and the export have room. Only
    for a training that has not begun.
    """
    folder = recipe.folder.root.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    begun = recipe.folder.checkpoints.exists() and any(recipe.folder.checkpoints.iterdir())
    if model is None or recipe.model.lora or begun or recipe.documents in ("pair", "labelled"):
        return
    config = dict(model)
    if model[RANDOM] and recipe.trains_tokenizer:
        config["vocab_size"] = recipe.model.config.get("vocab_size", recipe.tokenizer.vocab_size)
    weights = parameter_count(config)
    needed = weights * (STATE_BYTES * (recipe.checkpoint.keep + 1) + 4)
    free = shutil.disk_usage(folder).free
    if free < needed:
        has, takes = differing(
            free, needed, lambda size: f"{size / 1e9:.1f} GB", "{:,} bytes".format
        )
        found.add(
            f"output {recipe.output} has {has} free, and {recipe.checkpoint.keep} + 1 checkpoints"
            f" and the export of {weights / 1e6:,.0f} M weights take {takes}; make room, set"
            " output, or lower checkpoint.keep"
        )


def need(found: Findings, module: str, knob: str, get_it: str) -> None:
    """A package that is not installed here is a finding."""
    if importlib.util.find_spec(module) is None:
        found.add(f"{knob} needs {module}, which is not installed; {get_it}")
