"""Checks a training before it starts: the model's configuration, the tokenizer, the layout of ranks
and batch, other models, and disk space. A part of `check.py`; no torch.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput, differing
from ingot.base.hub import ask_tokenizer
from ingot.base.storage import is_remote
from ingot.cloud.machines import MACHINES
from ingot.config.identity import check_others_weights
from ingot.config.models.family import sizes
from ingot.config.models.source import (
    ADAPTER,
    check_lengths,
    check_lora,
    check_positions,
    check_trained_type,
    config_folder,
    model_config,
    named_config,
    named_folder,
    position_keys,
    source_config,
    starts_random,
    trained_kind,
)
from ingot.config.models.types import BEHIND_PADDING, POSITION_KEYS, RELATIVE
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import CHAT_TEMPLATED, TWO_ROWS
from ingot.config.sections.training import ModelSettings
from ingot.config.shape import (
    BatchPlan,
    batch_plan,
    check_float8_fits,
    check_layout,
    check_pipeline,
    check_routers,
)
from ingot.config.values import Findings
from ingot.data.batches.spans import hiding_of
from ingot.tokenizers.chats.templates import find_template, for_recipe
from ingot.tokenizers.familiar import check_end, check_reference
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.teacher import (
    KNOB,
    check_learnt_size,
    check_teachers_positions,
    check_teachers_tokenizer,
    check_teachers_vocabulary,
    teacher_sizes,
)
from ingot.tokenizers.tokenizer import Tokenizer

FLOAT8_CAPABILITY = 8.9
OLDER = ("nvidia-tesla-", "nvidia-a100")
"""Name prefixes of accelerators without float8."""
RANDOM = "starts from random weights"


def check_model(recipe: Recipe, found: Findings) -> dict[str, Any] | None:
    """The configuration of the model to train; None if it cannot be determined."""
    values = found.ask(_model_values, recipe.model, at="model.source")
    if values is None:
        return None
    where, kind = f"model.source {recipe.model.source}", trained_kind(recipe)
    if kind != "decoder":
        found.ask(check_trained_type, recipe, values, where, at="model.source")
        if (most := _encoder_positions(values)) is not None:
            written = values.get("max_decoder_position_embeddings")
            keys = position_keys(values, random=values[RANDOM])
            found.ask(partial(check_lengths, keys=keys), recipe, most, written)
        return values
    positions = found.ask(_positions, values, where)
    if positions is not None:
        keys = position_keys(values, random=values[RANDOM])
        found.ask(partial(check_lengths, keys=keys), recipe, positions)
    return None if positions is None else values


def _model_values(model: ModelSettings) -> dict[str, Any]:
    """The configuration of a source, and under `RANDOM` whether training starts from random
    weights.
    """
    folder = config_folder(model)
    random = starts_random(model, folder)
    check_lora(model, random=random)
    values = source_config(model, folder) | {RANDOM: random}
    check_positions(model, folder, random=random)
    return values


def _positions(config: Mapping[str, Any], where: str) -> int:
    """The maximum length of a decoder in tokens. Raises WrongInput for an unknown decoder."""
    try:
        return sizes(config, where).positions
    except (KeyError, TypeError, ValueError) as error:
        raise WrongInput(
            f"{where}: its configuration lacks a size or has one that is no number ({error}); mend"
            " its config.json, or model.config"
        ) from None


def _encoder_positions(values: Mapping[str, Any]) -> int | None:
    """The maximum length of an encoder in tokens if its configuration has one; T5 and related types
    have none.
    """
    if values.get("model_type") in RELATIVE:
        return None
    pad = values.get("pad_token_id")
    most = next((values[key] for key in POSITION_KEYS if values.get(key)), None)
    if not isinstance(most, int) or most <= 0:
        return None
    behind_padding = values.get("model_type") in BEHIND_PADDING
    return most - (1 + pad if behind_padding and isinstance(pad, int) else 0)


def check_tokenizer_fits(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """Check the tokenizer against data and model."""
    template = recipe.tokenizer.template
    if template is not None:
        found.ask(find_template, template, at="tokenizer.template")
    vocabulary: int | None = recipe.tokenizer.vocab_size
    if not recipe.trains_tokenizer:
        known = model is not None or recipe.tokenizer.source is not None
        vocabulary = _check_tokenizer(recipe, model, found) if known else None
    given = recipe.model.config.get("vocab_size") if model else None
    limit = given if model and model[RANDOM] else model and model.get("vocab_size")
    if isinstance(vocabulary, int) and isinstance(limit, int) and vocabulary > limit:
        knob = "tokenizer.vocab_size" if recipe.trains_tokenizer else "the tokenizer"
        found.add(
            f"{knob} has {vocabulary} ids, model.source {recipe.model.source} only {limit}; use the"
            f" model's own tokenizer, or random weights with model.config.vocab_size={vocabulary}"
        )


def _check_tokenizer(
    recipe: Recipe, model: Mapping[str, Any] | None, found: Findings
) -> int | None:
    """The vocabulary size of a tokenizer that is not trained; None if it cannot be determined."""
    knob = "model.source" if recipe.tokenizer.source is None else "tokenizer.source"
    tokenizer = found.ask(_tokenizer, recipe, at=knob)
    if tokenizer is None:
        return None
    if model is not None and trained_kind(recipe) == "encoder":
        found.ask(check_end, recipe, str(model.get("model_type")), tokenizer, at=knob)
    return tokenizer.vocab_size


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer; raises if it is invalid, or has no template for chats, or nothing to
    hide tokens behind.
    """
    tokenizer = for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe, ask=True)))
    if recipe.documents in CHAT_TEMPLATED:
        _ = tokenizer.chat_format
    hiding_of(recipe, tokenizer)
    return tokenizer


def _check_teacher(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """Check that a teacher has the student's vocabulary and enough positions for a row."""
    source, knob = recipe.objective.teacher_source, KNOB
    config = found.ask(check_other_model, source, knob, at=knob) if source else None
    if source is None or config is None:
        return
    theirs = found.ask(teacher_sizes, config, source, at=knob)
    if theirs is None:
        return
    own = recipe.model.config.get("vocab_size") if model and model[RANDOM] else None
    own = model["vocab_size"] if model and not model[RANDOM] else own
    if isinstance(own, int):
        found.ask(check_teachers_vocabulary, recipe, theirs, own, at=knob)
    found.ask(check_teachers_positions, recipe, theirs)
    found.ask(_check_teachers_tokenizer, recipe, source, at=knob)


def _check_teachers_tokenizer(recipe: Recipe, source: str) -> None:
    """Raises WrongInput if the teacher's tokenizer cannot be the student's."""
    hub = source.startswith("hf:")
    theirs = load_tokenizer(ask_tokenizer(source[3:]) if hub else named_folder(source, KNOB))
    if recipe.trains_tokenizer:
        check_learnt_size(recipe, theirs)
    else:
        check_teachers_tokenizer(recipe, _tokenizer(recipe), theirs)


def _check_references_tokenizer(recipe: Recipe, source: str) -> None:
    """Raises WrongInput if the reference reads the ids of the data as other text."""
    if recipe.trains_tokenizer or source.startswith("hf:"):  # seen when training starts
        return
    check_reference(source, _tokenizer(recipe), named_folder(source, "objective.reference"))


def check_training(
    recipe: Recipe, model: Mapping[str, Any] | None, found: Findings, *, here: bool
) -> None:
    """Check batch, layout, other models, tracking and disk space."""
    found.ask(check_others_weights, recipe)
    placed = recipe.at("train").launch
    world = placed.nodes * placed.processes
    automatic = recipe.parallel.degrees == "auto"
    batch = None if automatic else found.ask(batch_plan, recipe.train, recipe.parallel, world)
    if automatic:
        _check_automatic(recipe, model, found)
    if trained_kind(recipe) == "decoder" and model is not None and batch:
        found.ask(check_layout, recipe.parallel, world, model, recipe.data.seq_len)
    if model is not None:
        decoder = trained_kind(recipe) == "decoder"
        found.ask(check_routers, recipe.train.experts, model if decoder else None)
    lora = recipe.model.lora
    dropout = lora.dropout if lora else 0.0
    staged = partial(check_pipeline, compiled=recipe.train.compile, dropout=dropout)
    found.ask(staged, recipe.parallel, recipe.memory)
    _check_teacher(recipe, model, found)
    reference, knob = recipe.objective.reference_source, "objective.reference"
    if reference is not None:
        found.ask(check_other_model, reference, knob, at=knob)
        found.ask(_check_references_tokenizer, recipe, reference, at=knob)
    _check_float8(recipe, batch, found, here=here)
    if lora is not None and lora.adapter and not (Path(lora.adapter) / ADAPTER).is_file():
        found.add(f"model.lora.adapter {lora.adapter} has no {ADAPTER}; give PEFT's folder")
    start = recipe.train.start_from
    if start is not None and not is_remote(start) and not Path(start).is_dir():
        found.add(f"train.start_from {start} does not exist; give a run folder or a checkpoint")
    if here and placed.kind == "local":
        if recipe.track.wandb is not None:
            need(found, "wandb", "track.wandb", "pip install 'ingot[track]'")
        for tracker in ("mlflow", "trackio"):
            if getattr(recipe.track, tracker) is not None:
                need(found, tracker, f"track.{tracker}", f"pip install 'ingot[{tracker}]'")
        _check_disk(recipe, model, found)


def _check_automatic(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """Check that `parallel: auto` has a layout to choose, by arithmetic alone."""
    from ingot.plan.automatic import no_layout
    from ingot.plan.place import place_of

    place = place_of(recipe.at("train"))
    reason = None if model is None else found.ask(no_layout, recipe, place, model)
    if reason:
        found.add(reason, "parallel.degrees")
    elif place.world > 1:
        found.skip(
            "parallel: auto is decided when training starts, on the devices that are there;"
            " `ingot plan` tells what it would be",
            "parallel.degrees",
        )


def check_other_model(source: str, knob: str) -> dict[str, Any]:
    """The configuration of a model that is not trained. Raises WrongInput if it is not a model,
    Failed if its hub does not answer.
    """
    return model_config(named_config(source, knob))


def _check_float8(recipe: Recipe, batch: BatchPlan | None, found: Findings, *, here: bool) -> None:
    """Check that recipe and machine support float8 training."""
    kind, placed = recipe.precision.float8, recipe.at("train").launch
    if kind == "none":
        return
    if batch is not None:
        tokens = (2 if recipe.documents in TWO_ROWS else 1) * recipe.data.seq_len
        lengths = {"data.seq_len": batch.micro_batch * tokens // recipe.parallel.context}
        found.ask(check_float8_fits, kind, lengths, recipe.model.lora is not None)
    if recipe.precision.compute == "fp32":
        found.add(f"precision.float8 {kind} goes with precision.compute bf16, not fp32; set one")
    lacking = ""
    if placed.kind == "local" and here:
        need(found, "torchao", "precision.float8", "pip install 'ingot[float8]'")
        best = _best_capability()
        if best is not None and best < FLOAT8_CAPABILITY:
            lacking = f"this machine has {f'one of {best}' if best else 'no GPU'}"
    elif placed.kind in ("gce", "vertex"):
        machine = MACHINES.get(placed.machine.type or "")
        has = placed.machine.accelerator or (machine and machine.accelerator) or "none"
        if has == "none" or has.startswith(OLDER):
            lacking = f"the machines of launch.machine have {has}"
    if lacking:
        found.add(
            f"precision.float8 {kind} needs a GPU of compute capability {FLOAT8_CAPABILITY} or"
            f" more (Ada, Hopper and newer), and {lacking}; set precision.float8 to none"
        )


def _best_capability() -> float | None:
    """The highest compute capability of this machine's GPUs, 0 without a GPU; None if unknown."""
    if Path("/dev/kfd").exists():  # AMD's
        return None
    if shutil.which("nvidia-smi") is None:
        return 0.0
    ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True).stdout
        return max((float(line) for line in said.splitlines() if line.strip()), default=0.0)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _check_disk(recipe: Recipe, model: Mapping[str, Any] | None, found: Findings) -> None:
    """Check the space for the kept checkpoints, one being written, and the export: what they take
    at least in the plan. Only for a training that has not begun.
    """
    from ingot.plan.ranges import Range
    from ingot.plan.storage import checkpoint_bytes, disk_spaces, model_size
    from ingot.plan.unknown import plus

    folder = recipe.folder.root.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    begun = recipe.folder.checkpoints.exists() and any(recipe.folder.checkpoints.iterdir())
    if model is None or begun:
        return
    config = dict(model)
    if model[RANDOM] and recipe.trains_tokenizer:
        config["vocab_size"] = recipe.model.config.get("vocab_size", recipe.tokenizer.vocab_size)
    size = model_size(recipe, config)
    if size is None:  # reported by the check of the model
        return
    checkpoints, exported = disk_spaces(recipe, size, checkpoint_bytes(recipe, size))
    together = plus(checkpoints.bytes, exported.bytes)
    assert isinstance(together, Range)
    needed = math.ceil(together.low)
    free, total = shutil.disk_usage(folder).free, shutil.disk_usage(folder).total
    if not total:
        found.add(f"output {recipe.output} is on no disk; set output to a folder on one")
    elif free < needed:
        has, takes = differing(
            free, needed, lambda size: f"{size / 1e9:.1f} GB", "{:,} bytes".format
        )
        found.add(
            f"output {recipe.output} has {has} free, and {checkpoints.what}"
            f" and the export of {size.weights / 1e6:,.0f} M weights take {takes}; make room, set"
            " output, or lower checkpoint.keep"
        )


def need(found: Findings, module: str, knob: str, get_it: str) -> None:
    """Record a package that is not installed here as a finding."""
    if importlib.util.find_spec(module) is None:
        found.add(f"{knob} needs {module}, which is not installed; {get_it}")
