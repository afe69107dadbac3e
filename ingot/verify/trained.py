"""A run that was trained, and its trainer's model built again from the checkpoint that was
exported: on the CPU, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.markers import problems, read_marker
from ingot.checkpoints.export import DTYPES
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import COMMIT, Found, committed, step_folder
from ingot.config.identity import changes
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.models.adapters.lora import adapter_parameters, add_lora
from ingot.models.hf.folder import CONFIG, LINEAGE, read_lineage
from ingot.models.kinds import Model
from ingot.models.spec import build_model
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.plan import Plan, plan_run
from ingot.verify.logits import HeldOut, held_out, ours
from ingot.verify.weights import Compared, compare_weights, round_weights

CPU = torch.device("cpu")
AGAIN = "run `ingot train` again"
TOLD = ("run", "step", "export_type", "model_hash", "tokenizer")
"""What training writes into `ingot.json`, and is needed here."""
ANYWHERE = ("precision.compute",)
"""What may differ where a run is verified on another machine than it was trained on."""


@dataclass(frozen=True)
class Export:
    """A trained run and what it says of its export."""

    plan: Plan
    lineage: Mapping[str, Any]
    found: Found | None
    """The checkpoint that was exported."""
    gone: str
    """Why there is none."""
    held: HeldOut

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def step(self) -> int:
        return int(self.lineage["step"])

    @property
    def type(self) -> str:
        return str(self.lineage["export_type"])

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES["fp32" if self.type == "fp32" else "bf16"]


def open_export(recipe: Recipe) -> Export:
    """Raises WrongInput when the run was not trained, or with another recipe."""
    run = recipe.folder
    lineage = read_lineage(run.model)
    if lineage is None or not (run.model / CONFIG).exists():
        raise WrongInput(
            f"{run.root} holds no model that was trained here (no {LINEAGE} in {run.model}); run"
            " `ingot train` first"
        )
    if missing := [key for key in TOLD if key not in lineage]:
        raise WrongInput(
            f"{run.model / LINEAGE} lacks {', '.join(missing)}, so it is not what training wrote;"
            f" {AGAIN}"
        )
    # One process rebuilds it, however many trained it.
    alone = recipe.model_copy(update={"parallel": Parallel()})
    plan = plan_run(alone, alone_on_cpu())
    found, gone = _checkpoint(recipe, int(lineage["step"]))
    if found is not None:
        before, now = (
            {key: value for key, value in identity.items() if key not in ANYWHERE}
            for identity in (found.commit["identity"], plan.identity)
        )
        if changed := changes(before, now):
            raise WrongInput(
                f"{found.folder} is of another recipe: {'; '.join(changed)}; give the recipe that"
                " was trained, or run `ingot train`"
            )
    return Export(plan, lineage, found, gone, held_out(plan.held_out, plan.drawing.kind))


def alone_on_cpu() -> Mesh:
    return Mesh(Ranks(), CPU)


def _checkpoint(recipe: Recipe, step: int) -> tuple[Found | None, str]:
    """The checkpoint of what was exported, or why there is none."""
    folder = step_folder(recipe.folder.checkpoints, step)
    commit = read_marker(folder, COMMIT)
    if commit is None:
        there = (
            ", ".join(f"{found.step:,}" for found in committed(recipe.folder.checkpoints)) or "none"
        )
        return None, f"{folder}, which was exported, is gone (steps that are there: {there})"
    if wrong := problems(folder, commit, checksums=True):
        return None, f"{folder} is damaged: {wrong[0]}"
    return Found(folder, int(commit["step"]), commit), ""


@dataclass(frozen=True)
class Trained:
    """What the trainer's model was, and what it said on the held-out records.

    `compared`: its weights with those of the folder, and `unrounded` its logits before they were
    rounded; None where there is no
    checkpoint to know them from. `adapter`: what was trained of a run with LoRA.
    """

    logits: Tensor
    """With its weights rounded to the export type."""
    unrounded: Tensor | None
    compared: Compared | None
    adapter: dict[str, Tensor]
    products: int
    """Matrices among the weights."""


def rebuild(export: Export) -> Trained:
    """The trainer's model. Without its checkpoint: the architecture that the recipe means, with the
    exported weights.

    Raises:
        WrongInput: the exported weights cannot be read, or are not those of this architecture.
    """
    plan, lora = export.plan, export.recipe.model.lora
    if export.found is None:
        drawing = replace(plan.drawing, folder=export.recipe.folder.model, random=False)
        model = build_model(drawing, plan.recipe.seed, CPU, filled=True).eval()
        return Trained(
            ours(model, export.held),
            None,
            None,
            {},
            sum(parameter.ndim > 1 for parameter in model.parameters()),
        )
    # A checkpoint of an adapter holds no more than that.
    model = build_model(plan.drawing, plan.recipe.seed, CPU, filled=lora is not None)
    if lora is not None:
        add_lora(model, lora, plan.recipe.seed)
    load_checkpoint(export.found, Masters(model, alone_on_cpu()), None, alone_on_cpu())
    unrounded = ours(model.eval(), export.held)
    adapter = (
        {name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()}
        if lora is not None
        else {}
    )
    compared = compare_weights(model, export.recipe.folder.model, export.dtype)
    round_weights(model, export.dtype)
    return Trained(ours(model, export.held), unrounded, compared, adapter, compared.products)


def base_of(plan: Plan) -> Model:
    """The model that training began with, without an adapter."""
    return build_model(plan.drawing, plan.recipe.seed, CPU, filled=True).eval()
