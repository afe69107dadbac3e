"""Builds what is trained, in the order in which it must happen: model, adapter, wrappers, masters,
optimizer, objective; and what a run writes to beside checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.checkpoints.collective import run_on_all
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.model_source import CONFIG, model_config
from ingot.config.recipe import Recipe
from ingot.models.adapters.lora import add_lora, init_adapter
from ingot.models.adapters.peft import load_adapter
from ingot.models.device import Compute
from ingot.models.hf.content import Share
from ingot.models.hf.folder import load_model, load_weights, model_hash
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import allocate
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.protocol import Objective, ObjectiveInputs, make_objective
from ingot.parallel.apply import (
    TYPES,
    WrapSettings,
    apply_wrappers,
    finish_wrapping,
    make_masters,
    weights_device,
)
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.optimizers import make_optimizer
from ingot.train.reference import Tables
from ingot.train.setup import TrainSetup


@dataclass(frozen=True)
class TrainState:
    """The model that owns the weights, the wrapped module that is called, and what moves the
    weights.
    """

    model: AnyModel
    module: nn.Module
    objectives: Objectives
    masters: Masters
    optimizer: Optimizer


def build_train_state(
    plan: TrainSetup, start: CommittedCheckpoint | None, tables: Tables | None, mesh: Mesh
) -> TrainState:
    """The model without weights, its adapter, the wrappers, this rank's part of the weights, the
    optimizer, what a checkpoint brings.
    """
    recipe = plan.recipe
    model = wrapped_model(
        plan, plan.model_spec, mesh, filled=start is None or recipe.model.lora is not None
    )
    if recipe.model.lora is not None and recipe.model.lora.adapter is not None and start is None:
        load_adapter(model, Path(recipe.model.lora.adapter))
    masters = make_masters(model, mesh, plan.wrapping)
    optimizer = make_optimizer(recipe.train.optimizer, masters, recipe.seed)
    if start is not None:
        load_checkpoint(start, masters, optimizer, mesh)
    elif plan.origin is not None:
        load_checkpoint(
            plan.origin, masters, None if recipe.train.reset_optimizer else optimizer, mesh
        )
    module = finish_wrapping(model.train(), mesh)
    return TrainState(
        model,
        module,
        make_objectives(recipe, plan.teacher, tables, plan.compute, mesh),
        masters,
        optimizer,
    )


def wrapped_model(plan: TrainSetup, model_spec: ModelSpec, mesh: Mesh, *, filled: bool) -> AnyModel:
    """The model of a blueprint, with the recipe's adapter, spread over the ranks; not `filled`:
    with just room for its weights.
    """
    recipe = plan.recipe
    model = create_model(model_spec, recipe.seed)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora, recipe.seed)
    model = apply_wrappers(model, mesh, plan.wrapping)
    device, share = weights_device(mesh, plan.wrapping), _share(mesh)
    run_on_all(
        mesh,
        lambda: materialize_model(
            model, model_spec, recipe.seed, device, filled=filled, share=share
        ),
        lambda _: None,
    )
    init_adapter(model, recipe.seed)
    return model


def lineage(plan: TrainSetup, step: int, parameters: int) -> dict[str, Any]:
    """What `ingot.json` tells about where the model came from."""
    recipe, folder = plan.recipe, plan.model_spec.folder
    base = (
        None
        if plan.model_spec.random or folder is None
        else {"source": recipe.model.source, "model_hash": model_hash(folder)}
    )
    about: dict[str, Any] = {
        "run": recipe.name,
        "step": step,
        "seed": recipe.seed,
        "objective": recipe.objective.kind,
    }
    for name in ("teacher", "reference", "prefix"):
        if value := getattr(recipe.objective, name, None):
            about[name] = value
    if plan.origin is not None:
        about["start_from"] = {"checkpoint": str(plan.origin.folder), "step": plan.origin.step}
    return {**about, "base": base, "data": plan.rows.fingerprint, "parameters": parameters}


@dataclass(frozen=True)
class Objectives:
    """The objective on the rows that are trained on, and the same on those held out."""

    training: Objective
    held_out: Objective


def make_objectives(
    recipe: Recipe,
    teacher: Path | None,
    tables: tuple[Tensor, Tensor] | None,
    compute: Compute,
    mesh: Mesh,
) -> Objectives:
    """The objective of the recipe. `teacher` is what `teacher_folder` gave, `tables` what
    `reference_tables` did.
    """
    frozen = None if teacher is None else _frozen(teacher, recipe, compute, mesh)
    if tables is None:
        one = make_objective(recipe.objective, ObjectiveInputs(teacher=frozen))
        return Objectives(one, one)
    return Objectives(
        *(
            make_objective(recipe.objective, ObjectiveInputs(table.to(mesh.device), frozen))
            for table in tables
        )
    )


def _frozen(folder: Path, recipe: Recipe, compute: Compute, mesh: Mesh) -> Decoder:
    """A model that is only read: in the type that is computed in, without gradients, spread as the
    student is.

    A pipeline's stages are the student's alone: the teacher's hidden states are wanted where its
    last layers and the head are.
    """
    if mesh.tensor.world == mesh.context.world == mesh.degrees.shard == 1:
        return load_model(folder, device=mesh.device, dtype=TYPES[compute]).requires_grad_(False)
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(model_config(folder), str(folder / CONFIG))).to(
            TYPES[compute]
        )
    model.requires_grad_(False).eval()
    apply_wrappers(model, _stage_of(mesh), WrapSettings(recipe.parallel, compute=compute))
    allocate(model, mesh.device)
    run_on_all(mesh, lambda: load_weights(model, folder, _share(mesh)), lambda _: None)
    return model


def _share(mesh: Mesh) -> Share:
    """What a rank compares of a model that all read: the ranks of a node, which may have a copy of
    its own, divide the tensors.
    """
    return Share(mesh.ranks.local_rank, mesh.ranks.local_world)


def _stage_of(mesh: Mesh) -> Mesh:
    """The ranks that hold the same layers, as if there were no others."""
    parts = {name: part for name, part in mesh.parts.items() if name not in ("pipeline", "ends")}
    return replace(mesh, degrees=replace(mesh.degrees, pipeline=1), parts=parts)
