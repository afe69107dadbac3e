"""The end of a training: the best checkpoint where that is asked for, and the model folder that all later steps use."""

from __future__ import annotations

import json
from pathlib import Path

from ingot.base.errors import Failed
from ingot.base.progress import say
from ingot.base.storage import write_atomic
from ingot.checkpoints.export import export_model, source_generation
from ingot.checkpoints.store import checkpoint_in, load_checkpoint, step_folder
from ingot.models.adapter import is_adapter, save_adapter
from ingot.models.folder import LINEAGE, weight_files
from ingot.parallel.mesh import Mesh
from ingot.train.build import Trainee, lineage
from ingot.train.plan import Plan


def take_best(plan: Plan, trainee: Trainee, best: int | None, reached: int, mesh: Mesh) -> int:
    """Load the weights of the best checkpoint, where one is asked for and is not the last; the step of what the model now is.

    Raises:
        Failed: it was deleted or damaged.
    """
    if best is None or best == reached:
        return reached
    folder = step_folder(plan.recipe.folder.checkpoints, best)
    if not folder.is_dir():
        raise Failed(f"{folder}, the best checkpoint, is gone; start over with --fresh, or set checkpoint.best=null to export the last one")
    found = mesh.from_main(lambda: checkpoint_in(folder))
    load_checkpoint(found, trainee.model, None, mesh)
    if mesh.is_main:
        say(f"train: step {best:,} was the best by {plan.recipe.checkpoint.best} and is exported")
    return best


def export_run(plan: Plan, trainee: Trainee, step: int) -> None:
    """Write `model/`, and for an adapter `adapter/` beside it."""
    recipe, run = plan.recipe, plan.recipe.folder
    size = sum(tensor.numel() for tensor in trainee.model.parameters())
    about = lineage(plan, step, size)
    generation = source_generation(plan.drawing.folder)
    export_model(trainee.model, plan.tokenizer, run.model, export_type=recipe.precision.export, lineage=about, generation=generation)
    if recipe.model.lora is not None:
        # A name on the hub is found anywhere, a folder from anywhere on this machine.
        source = recipe.model.source
        base = source if source.startswith("hf:") or plan.drawing.folder is None else str(plan.drawing.folder.resolve())
        save_adapter(trainee.model, run.adapter, base=base, kind=plan.drawing.kind)
        told = {"tokenizer": plan.tokenizer.identity(), "template": plan.tokenizer.template_identity, **about}
        write_atomic(run.adapter / LINEAGE, json.dumps(told, indent=2, ensure_ascii=False) + "\n")


def exported_files(folder: Path) -> list[Path]:
    """The files by which one knows whether an export is still what it was."""
    weights = sorted(folder.glob("adapter_model*.safetensors")) if is_adapter(folder) else weight_files(folder)
    return [*weights, folder / LINEAGE]
