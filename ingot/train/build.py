"""Builds the training state in the order in which it must happen: model, adapter, wrappers,
masters, optimizer, objective.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.checkpoints.collective import run_on_all
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.config.identity import WEIGHTS_OF, changes, weights_fingerprint
from ingot.config.models.content import CHANGED, QUANTIZE
from ingot.config.models.lineage import read_lineage
from ingot.config.models.source import CONFIG, model_config
from ingot.config.models.weights import model_hash
from ingot.config.recipe import Recipe
from ingot.models.adapters.lora import add_lora, init_adapter
from ingot.models.adapters.peft import load_adapter
from ingot.models.adapters.quantized import quantize_base
from ingot.models.device import Compute
from ingot.models.hf.content import Share
from ingot.models.hf.folder import load_model, load_weights
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.noise import EmbeddingNoise
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
from ingot.train.balance import LoadBalance, freeze_routers, make_balance
from ingot.train.beginning import OF_ONE_MODEL, trained_with
from ingot.train.optim.averaging import averaged_steps, drop_average
from ingot.train.optim.eager import reserve_state
from ingot.train.optim.optimizers import make_optimizer
from ingot.train.reference import Tables
from ingot.train.setup import TrainSetup


@dataclass(frozen=True)
class TrainState:
    """The model that owns the weights, the wrapped module that is called, the objectives, the
    masters, the optimizer, and what balances the load of experts if there are any.
    """

    model: AnyModel
    module: nn.Module
    objectives: Objectives
    masters: Masters
    optimizer: Optimizer
    balance: LoadBalance | None = None


def check_origin(setup: TrainSetup) -> None:
    """Raises WrongInput if the model or its optimizer cannot take over the state of another run's
    checkpoint. Only a training that begins asks; one that is resumed has a state of its own.
    """
    knobs = setup.recipe.train
    if setup.origin is None:
        return
    _check_origin_adapter(setup, setup.origin)
    if knobs.reset_optimizer:
        return
    old = trained_with(setup.origin, "train.optimizer")["kind"]
    if old != knobs.optimizer.kind:
        raise WrongInput(
            f"train.start_from {knobs.start_from} has the state of train.optimizer.kind {old},"
            f" which {knobs.optimizer.kind} cannot take over; set train.reset_optimizer=true to"
            " begin with its weights alone"
        )


ADAPTER = ("kind", "rank", "alpha")
"""The knobs of `model.lora` that say what its matrices are to the model."""


def _check_origin_adapter(setup: TrainSetup, origin: CommittedCheckpoint) -> None:
    """Raises WrongInput if only one of recipe and checkpoint has an adapter, or if the checkpoint's
    was trained as another one, or beside another model: the state of one is not that of the other.
    """
    start_from, base = setup.recipe.train.start_from, f"{WEIGHTS_OF}model.source"
    instead = "set model.source to what its run exported, in place of train.start_from"
    before, now = trained_with(origin, "model")["lora"], setup.identity["model"]["lora"]
    if (before is None) != (now is None):
        had, has = ("an", "no") if now is None else ("no", "a")
        raise WrongInput(
            f"train.start_from {start_from} was trained with {had} adapter, and the recipe has"
            f" {has} model.lora; to train on from its model, {instead}"
        )
    if before is None:
        return
    old, new = (
        {"model.lora": {knob: lora[knob] for knob in ADAPTER}, base: identity.get(base)}
        for lora, identity in ((before, origin.commit["identity"]), (now, setup.identity))
    )
    if changed := changes(old, new):
        raise WrongInput(
            f"train.start_from {start_from} has an adapter of another kind ({'; '.join(changed)});"
            f" undo the change, or {instead}"
        )


def check_adapter(setup: TrainSetup) -> None:
    """Raises WrongInput if the adapter to go on from was trained beside another model, or with
    values of `model.config` that the recipe leaves out: it would change another model than it was
    trained to. Adapters that others made have no record of either.
    """
    lora = setup.recipe.model.lora
    source = setup.recipe.model.source
    folder = setup.model_spec.folder
    if lora is None or lora.adapter is None or folder is None:
        return
    about = read_lineage(Path(lora.adapter)) or {}
    base = about.get("base") or {}
    recorded = base.get("model_hash")
    if recorded is not None and (found := model_hash(folder)) != recorded:
        raise WrongInput(
            f"model.lora.adapter {lora.adapter} was trained beside the model {recorded}"
            f" ({base.get('source')}), and model.source {source} is {found}"
            " (model_hash); set model.source to that model, or begin another adapter"
        )
    given, there = setup.recipe.model.config, model_config(folder)
    if left_out := [
        f"model.config.{name}={json.dumps(value)}"
        for name, value in (about.get(CHANGED) or {}).items()
        if name not in given and there.get(name) != value
    ]:
        raise WrongInput(
            f"model.lora.adapter {lora.adapter} was trained with {' '.join(left_out)}, and the"
            " recipe leaves that out; set it, too, or another value on purpose"
        )


def build_train_state(
    setup: TrainSetup,
    start: CommittedCheckpoint | None,
    tables: Tables | None,
    mesh: Mesh,
    *,
    quick: bool = False,
) -> TrainState:
    """Build the model on the meta device, its adapter and wrappers, this rank's shard of the
    weights and the optimizer; then load the checkpoint to resume or start from. `quick`: random
    weights may be any.
    """
    recipe = setup.recipe
    model = wrapped_model(
        setup,
        setup.model_spec,
        mesh,
        filled=start is None or recipe.model.lora is not None,
        quick=quick,
    )
    if recipe.model.lora is not None and recipe.model.lora.adapter is not None and start is None:
        load_adapter(model, Path(recipe.model.lora.adapter))
    masters = make_masters(model, mesh, setup.wrapping)
    knobs = recipe.train
    optimizer = make_optimizer(
        knobs.optimizer, masters, recipe.seed, knobs.average, recipe.model.lora
    )
    if start is not None:
        load_checkpoint(start, masters, optimizer, mesh)
    elif setup.origin is not None:
        state = None if knobs.reset_optimizer else optimizer
        load_checkpoint(setup.origin, masters, state, mesh, otherwise=OF_ONE_MODEL)
    if knobs.average is None or knobs.average.kind != "ema":
        drop_average(optimizer)
    reserve_state(optimizer)
    module = finish_wrapping(model.train(), mesh)
    return TrainState(
        model,
        module,
        make_objectives(recipe, setup.teacher, tables, setup.compute, mesh),
        masters,
        optimizer,
        make_balance(model, knobs.experts, mesh),
    )


def wrapped_model(
    setup: TrainSetup, model_spec: ModelSpec, mesh: Mesh, *, filled: bool, quick: bool
) -> AnyModel:
    """The model of `model_spec` with the recipe's adapter, sharded over the ranks. `filled` False
    allocates its weights without reading or initialising them; `quick`: random ones may be any.
    """
    recipe = setup.recipe
    model = draft_model(setup, model_spec, mesh)
    device, share = weights_device(mesh, setup.wrapping), _share(mesh)
    run_on_all(
        mesh,
        lambda: materialize_model(
            model, model_spec, recipe.seed, device, filled=filled, share=share, quick=quick
        ),
        lambda _: None,
    )
    init_adapter(model, recipe.seed)
    return model


def draft_model(
    setup: TrainSetup, model_spec: ModelSpec, mesh: Mesh, *, planned: bool = False
) -> AnyModel:
    """The model of `model_spec` with the recipe's adapter and wrappers; a native decoder is still
    on `meta`, and where `planned` any model.
    """
    recipe = setup.recipe
    model = create_model(model_spec, recipe.seed, planned=planned)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora, recipe.seed)
    if recipe.model.quantize is not None:
        quantize_base(model, recipe.model.quantize)
    if recipe.model.neftune_alpha is not None:
        assert isinstance(model, Decoder), "the recipe refuses noise for other models"
        model.noise = EmbeddingNoise(recipe.model.neftune_alpha, recipe.seed)
    if recipe.train.experts.frozen:
        freeze_routers(model)
    return apply_wrappers(model, mesh, setup.wrapping)


def check_source(setup: TrainSetup) -> None:
    """Raises Failed if `model.source` came to hold other weights while they were read."""
    folder = setup.model_spec.folder
    if folder is not None and _source_changed(setup, folder):
        raise Failed(
            f"model.source {folder} was changed while it was read, so that nobody knows what would"
            " be trained; run the same command again"
        )


def _source_changed(setup: TrainSetup, folder: Path) -> bool:
    began = setup.identity.get(f"{WEIGHTS_OF}model.source")
    return began is not None and weights_fingerprint(folder) != began


def _base_hash(setup: TrainSetup, folder: Path) -> str:
    """The hash of the model that training began with, which its folder may hold no longer: an
    adapter must not be taken for one of what another run exported there meanwhile. Without a
    record of its export it is the fingerprint of its weights, which no model has as its hash.
    """
    if not _source_changed(setup, folder):
        return model_hash(folder)
    say(
        f"train: warning: {folder} holds another model than training began with, and what is"
        " exported names that one; an adapter opens only once it lies there again"
    )
    return setup.source_hash or str(setup.identity[f"{WEIGHTS_OF}model.source"])


def lineage(setup: TrainSetup, step: int) -> dict[str, Any]:
    """What `ingot.json` records about the origin of the exported model."""
    recipe, folder = setup.recipe, setup.model_spec.folder
    base = (
        None
        if setup.model_spec.random or folder is None
        else {"source": recipe.model.source, "model_hash": _base_hash(setup, folder)}
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
    average = setup.recipe.train.average
    if average is not None and average.export:
        size = "decay" if average.kind == "ema" else "checkpoints"
        about["average"] = {"kind": average.kind, size: getattr(average, size)}
        if average.kind == "last":
            about["average"]["steps"] = averaged_steps(average, recipe.folder.checkpoints, step)
    if recipe.model.quantize is not None:
        about[QUANTIZE] = recipe.model.quantize.model_dump()
    if setup.origin is not None:
        about["start_from"] = {"checkpoint": str(setup.origin.folder), "step": setup.origin.step}
    if recipe.data.holds_out:
        about["held_out"] = setup.held_out.fingerprint
    return {**about, "base": base, "data": setup.rows.fingerprint}


@dataclass(frozen=True)
class Objectives:
    """The objective over training rows and the same over held-out rows."""

    training: Objective
    held_out: Objective


def make_objectives(
    recipe: Recipe,
    teacher: Path | None,
    tables: tuple[Tensor, Tensor] | None,
    compute: Compute,
    mesh: Mesh,
    *,
    drafted: Decoder | None = None,
) -> Objectives:
    """Make the recipe's objective. `teacher` is the result of `teacher_folder`, `tables` that of
    `reference_tables`. `drafted`: the teacher as `draft_teacher` makes it, whose weights are
    allocated and not read.
    """
    if drafted is not None:
        allocate(drafted, mesh.device)
    frozen = drafted
    if drafted is None and teacher is not None:
        frozen = _frozen(teacher, recipe, compute, mesh)
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
    """A frozen model in the compute dtype, without gradients, sharded as the student is."""
    if mesh.tensor.world == mesh.context.world == mesh.degrees.shard == 1:
        return load_model(folder, device=mesh.device, dtype=TYPES[compute]).requires_grad_(False)
    model = draft_teacher(folder, recipe, compute, mesh)
    make_room = partial(allocate, model, mesh.device)
    run_on_all(mesh, lambda: load_weights(model, folder, _share(mesh), make_room), lambda _: None)
    return model


def draft_teacher(folder: Path, recipe: Recipe, compute: Compute, mesh: Mesh) -> Decoder:
    """The frozen model of a folder, sharded, on `meta`.

    Pipeline stages apply to the student only: the last stage, which has the head, needs all of the
    teacher's hidden states.
    """
    with torch.device("meta"):
        model = Decoder(DecoderConfig.from_hf(model_config(folder), str(folder / CONFIG))).to(
            TYPES[compute]
        )
    model.requires_grad_(False).eval()
    apply_wrappers(model, mesh.unstaged, WrapSettings(recipe.parallel, compute=compute))
    return model


def _share(mesh: Mesh) -> Share:
    """The part of the content check done by this rank: the ranks of a node divide the tensors among
    them, since each node may have a copy of the model.
    """
    return Share(mesh.ranks.local_rank, mesh.ranks.local_world)
