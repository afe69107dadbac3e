"""The parts of a training run, made one by one from the recipe; `run.py` says in which order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.base.sinks import Guarded, JsonLines, TensorBoard, WeightsAndBiases
from ingot.checkpoints.store import Found, load_checkpoint
from ingot.config.identity import training_identity
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.config.shape import BatchPlan, batch_plan, parameter_count, total_steps
from ingot.data.manifest import prepared_for
from ingot.data.rows import Rows, open_rows
from ingot.models.architecture import DecoderConfig
from ingot.models.decoder import Decoder
from ingot.models.device import Compute, resolve_compute
from ingot.models.folder import load_weights, model_hash
from ingot.models.initial import initialise
from ingot.models.source import source_config, source_folder, starts_random
from ingot.objectives.choose import objective_of
from ingot.objectives.pretrain import Pretrain
from ingot.parallel.apply import apply_wrappers
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer
from ingot.train.optim import make_optimizer


@dataclass(frozen=True)
class Plan:
    """All that is settled before anything is loaded; making one checks everything against everything."""

    recipe: Recipe
    batch: BatchPlan
    tokenizer: Tokenizer
    drawing: Blueprint
    rows: Rows
    held_out: Rows
    last: int
    """Step at which training ends."""
    compute: Compute
    identity: dict[str, Any]


@dataclass(frozen=True)
class Trainee:
    """The model that owns the weights, the wrapped module that is called, and what moves the weights."""

    model: Decoder
    module: nn.Module
    objective: Pretrain
    optimizer: Optimizer


def plan_run(recipe: Recipe, mesh: Mesh) -> Plan:
    """Raises WrongInput when recipe, data, tokenizer, model and ranks do not fit together."""
    columns = recipe.folder.columns
    batch = batch_plan(recipe.train, recipe.parallel, mesh.world)
    tokenizer = load_tokenizer(recipe.folder.tokenizer)
    drawing = blueprint(recipe, tokenizer)
    prepared = prepared_for(recipe)
    if tokenizer.identity() != prepared.tokenizer:
        what = "chat template" if tokenizer.template_identity != prepared.template else "vocabulary or special tokens"
        raise WrongInput(f"{columns} was prepared with another tokenizer than {recipe.folder.tokenizer} holds now: other {what}; run `ingot prepare`")
    weights = [source.weight for source in recipe.data.train]
    rows = open_rows(columns, "train", recipe.data.seq_len, pack=recipe.pack, pad_last=False, weights=weights)
    held_out = open_rows(columns, "validation", recipe.data.seq_len, pack=recipe.pack_held_out, pad_last=True)
    if len(rows) < batch.global_batch:
        raise WrongInput(
            f"{columns} has {len(rows)} training rows of data.seq_len={recipe.data.seq_len}, less than train.global_batch={batch.global_batch}; "
            f"add documents, or lower one of the two"
        )
    last = total_steps(recipe.train, len(rows), recipe.data.seq_len)
    compute = resolve_compute(recipe.precision.compute, mesh.device)
    identity = {**training_identity(recipe), "precision.compute": compute, "data": rows.fingerprint, "tokenizer": tokenizer.identity()}
    return Plan(recipe, batch, tokenizer, drawing, rows, held_out, last, compute, identity)


def build_trainee(plan: Plan, start: Found | None, mesh: Mesh) -> Trainee:
    """Model on meta, weights, optimizer, then the wrappers."""
    with torch.device("meta"):
        model = Decoder(plan.drawing.config)
    materialise(model, plan.drawing, plan.recipe.seed, mesh.device, resumed=start is not None)
    optimizer = make_optimizer(plan.recipe.train.optimizer, model)
    if start is not None:
        load_checkpoint(start, model, optimizer, mesh)
    module = apply_wrappers(model.train(), mesh, compiled=plan.recipe.train.compile)
    return Trainee(model, module, objective_of(plan.recipe), optimizer)


@dataclass(frozen=True)
class Blueprint:
    """Which model is trained and where its weights come from; `folder` is None for random weights of a preset."""

    config: DecoderConfig
    folder: Path | None
    random: bool


def blueprint(recipe: Recipe, tokenizer: Tokenizer) -> Blueprint:
    """Check model, tokenizer and rows against each other, before anything is loaded.

    Raises:
        WrongInput: rows longer than the model's positions, or more ids than the model has embeddings.
    """
    folder = source_folder(recipe.model)
    random = starts_random(recipe.model, folder)
    values = source_config(recipe.model, folder)
    if random and "vocab_size" not in recipe.model.config:
        values["vocab_size"] = tokenizer.vocab_size
    config = DecoderConfig.from_hf(values, f"model.source {recipe.model.source}")
    if recipe.data.seq_len > config.max_position_embeddings:
        raise WrongInput(
            f"data.seq_len {recipe.data.seq_len} exceeds the model's {config.max_position_embeddings} positions; "
            f"lower data.seq_len or set model.config.max_position_embeddings"
        )
    if tokenizer.vocab_size > config.vocab_size:
        raise WrongInput(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {recipe.model.source} only {config.vocab_size}; "
            f"use the model's own tokenizer, or random weights with model.config.vocab_size={tokenizer.vocab_size}"
        )
    return Blueprint(config, folder, random)


def materialise(model: Decoder, plan: Blueprint, seed: int, device: torch.device, *, resumed: bool) -> None:
    """Give a model on `meta` its float32 weights: loaded, drawn, or (where a checkpoint follows) just room for them."""
    if plan.folder is not None and not plan.random and not resumed:
        load_weights(model, plan.folder, device=device, dtype=torch.float32)
        return
    model.to_empty(device=device)
    if not resumed:
        initialise(model, seed)


def lineage(plan: Plan, step: int) -> dict[str, Any]:
    """What `ingot.json` tells about where the model came from."""
    recipe, folder = plan.recipe, plan.drawing.folder
    base = None if plan.drawing.random or folder is None else {"source": recipe.model.source, "model_hash": model_hash(folder)}
    about = {"run": recipe.name, "step": step, "seed": recipe.seed, "objective": recipe.objective.kind}
    return {**about, "base": base, "data": plan.rows.fingerprint, "parameters": parameter_count(plan.drawing.config.to_hf())}


def open_sinks(recipe: Recipe, run: RunFolder, mesh: Mesh, resume_step: int, run_id: str) -> list[JsonLines | Guarded]:
    """The metric sinks of rank 0; the other ranks have none."""
    if not mesh.is_main:
        return []
    sinks: list[JsonLines | Guarded] = [JsonLines(run.metrics, resume_step)]
    if recipe.track.tensorboard:
        sinks.append(Guarded("TensorBoard", lambda: TensorBoard(run.tensorboard, resume_step)))
    if (wandb := recipe.track.wandb) is not None:
        knobs = {"recipe": dump_recipe(recipe)}
        sinks.append(Guarded("W&B", lambda: WeightsAndBiases(run.root, wandb.project, recipe.name, run_id, knobs)))
    return sinks
