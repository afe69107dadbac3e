"""The end of training: load the best checkpoint if the recipe asks for it, and export the model
folder that later steps use.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.base.reports import file_sizes
from ingot.base.storage import disk_errors, write_atomic
from ingot.checkpoints.export import export_model, source_generation
from ingot.checkpoints.reader import WholeWeights, load_checkpoint
from ingot.checkpoints.store import checkpoint_in, step_folder
from ingot.config.models.content import CHANGED, CONTENT, FILES, LABELS, file_digests
from ingot.config.models.lineage import LINEAGE, MERGED, read_lineage
from ingot.config.models.source import model_config
from ingot.models.adapters.lora import add_lora, lora_layers
from ingot.models.adapters.peft import save_adapter
from ingot.models.adapters.quantized import round_base, rounded_tensors
from ingot.models.hf.folder import named_tensors
from ingot.models.hf.models import Encoder
from ingot.models.hf.tensor_names import LORA_LEAVES
from ingot.models.kinds import AnyModel, model_shapes
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import is_sharded
from ingot.models.spec import create_model
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.build import TrainState, lineage
from ingot.train.optim.averaging import NamedWeights, load_average, stored_average
from ingot.train.setup import TrainSetup


def take_best(
    setup: TrainSetup, train_state: TrainState, best: int | None, reached: int, mesh: Mesh
) -> int:
    """Load the weights of the best checkpoint, unless none is asked for or it is the last one.
    Returns the step whose weights the model now has.

    Raises:
        WrongInput: the best checkpoint was deleted.
        Failed: it is damaged.
    """
    if best is None or best == reached:
        return reached
    folder = step_folder(setup.recipe.folder.checkpoints, best)
    if not folder.is_dir():
        raise WrongInput(
            f"{folder}, the best checkpoint, is gone; start over with --fresh, or set"
            " checkpoint.best=null to export the last one"
        )
    found = mesh.from_main(lambda: checkpoint_in(folder))
    load_checkpoint(found, train_state.masters, None, mesh)
    if mesh.is_main:
        say(f"train: step {best:,} was the best by {setup.recipe.checkpoint.best} and is exported")
    return best


def export_run(setup: TrainSetup, train_state: TrainState, step: int) -> None:
    """Write `model/`, and for an adapter also `adapter/`, with the weights of `step`, which has
    been committed. Called on one rank.
    """
    recipe, run = setup.recipe, setup.recipe.folder
    model, tensors = _to_export(setup, train_state, step)
    about = lineage(setup, step)
    if (mean := about.get("average", {})).get("kind") == "last":
        steps = mean["steps"]
        say(
            f"train: the mean of {len(steps)} of {mean['checkpoints']} checkpoints is exported,"
            f" steps {min(steps):,} to {max(steps):,}"
        )
    # A model drawn at random may have another vocabulary than its source, whose token ids would
    # then be those of other tokens.
    spec = setup.model_spec
    generation = None if spec.random else source_generation(spec.folder)
    made = export_model(
        model,
        setup.tokenizer,
        run.model,
        export_type=recipe.precision.export,
        lineage=about,
        generation=generation,
        tensors=tensors,
    )
    if recipe.model.lora is not None:
        _export_adapter(setup, model, about, made)
    elif read_lineage(run.adapter) is not None:  # ours; until now it was that of the model here
        with disk_errors(run.adapter):
            shutil.rmtree(run.adapter)
        say(f"train: {run.adapter} was that of an earlier training's model and is removed")


def _export_adapter(
    setup: TrainSetup, model: AnyModel, about: Mapping[str, Any], made: Mapping[str, Any]
) -> None:
    """Write `adapter/`; `made` is the record of the model that it is merged into."""
    recipe, run = setup.recipe, setup.recipe.folder
    # A name on the hub is valid anywhere; a path is made absolute.
    source = recipe.model.source
    base = (
        source
        if source.startswith("hf:") or setup.model_spec.folder is None
        else str(setup.model_spec.folder.resolve())
    )
    changed = changed_config(setup)
    if changed:
        say(
            f"train: {run.adapter} was trained with {', '.join(changed)} of model.config, which"
            f" PEFT and vLLM do not read there; give them its base with these values in"
            f" config.json, or {run.model}, which has them"
        )
    digests = save_adapter(
        model,
        run.adapter,
        base=base,
        kind=setup.model_spec.kind,
        revision=recipe.model.revision if base.startswith("hf:") else None,
    )
    lineage_fields = {
        "tokenizer": setup.tokenizer.identity(),
        "template": setup.tokenizer.template_identity,
        CONTENT: {"tensors": digests, FILES: file_digests(run.adapter)},
        **about,
        **({CHANGED: changed} if changed else {}),
        **({LABELS: list(model.config.labels)} if isinstance(model, Encoder) else {}),
        "parameters": made["parameters"],
        MERGED: made["model_hash"],
    }
    write_atomic(
        run.adapter / LINEAGE, json.dumps(lineage_fields, indent=2, ensure_ascii=False) + "\n"
    )


def changed_config(setup: TrainSetup) -> dict[str, Any]:
    """What `model.config` changes of the model that training started from, which an adapter's
    folder has no place for; empty for a model drawn at random.
    """
    folder, given = setup.model_spec.folder, setup.recipe.model.config
    if folder is None or setup.model_spec.random:
        return {}
    before = model_config(folder)
    return {name: value for name, value in given.items() if before.get(name) != value}


def _to_export(
    setup: TrainSetup, train_state: TrainState, step: int
) -> tuple[AnyModel, Iterable[tuple[str, Tensor]] | None]:
    """The model to export, and its weights if they are not in the model itself.

    A sharded model is read back from its checkpoint, as is an average that bf16 weights would
    round: a decoder tensor by tensor, so that it is never in memory as a whole; a transformers
    model is built whole on this host, since only the built model knows its tensor names and ties.
    """
    average, checkpoints = setup.recipe.train.average, setup.recipe.folder.checkpoints
    stored: NamedWeights | None = None
    if average is not None and average.export:
        stored = stored_average(average, checkpoints, step)
    rounds = stored is not None and train_state.masters.stochastic
    if _is_whole(train_state) and not rounds:
        if stored is not None:
            load_average(train_state.masters, stored)
        train_state.masters.work_in(torch.float32)
        return train_state.model, None
    recipe, host, into = setup.recipe, torch.device("cpu"), setup.recipe.model.quantize
    if into is not None and into.merge_into == "original":
        into = None
    folder = step_folder(checkpoints, step)
    model = create_model(setup.model_spec, recipe.seed)
    if recipe.model.lora is not None:
        add_lora(model, recipe.model.lora, recipe.seed)
    if not isinstance(model, Decoder):
        alone = Mesh(Ranks(), host)
        masters = Masters(model, alone)
        load_checkpoint(checkpoint_in(folder), masters, None, alone)
        if stored is not None:
            load_average(masters, stored)
        if into is not None:
            round_base(model, into)
        return model, None
    weights, names = stored or WholeWeights(folder), model_shapes(model)
    if recipe.model.lora is None or setup.model_spec.folder is None:
        return model, ((name, weights[name]) for name in names)
    for name, layer in lora_layers(model).items():
        for matrix in [one for one in LORA_LEAVES if hasattr(layer, one)]:
            layer.register_parameter(matrix, nn.Parameter(weights[f"{name}.{matrix}"]))
    base = named_tensors(setup.model_spec.folder, names, model.config)
    return model, base if into is None else rounded_tensors(model, base, into)


def _is_whole(train_state: TrainState) -> bool:
    """Whether this rank holds the complete model, with every weight in float32 or backed by a
    float32 master.
    """
    model = train_state.model
    rounded = any(
        parameter.dtype != torch.float32 and not parameter.requires_grad
        for parameter in model.parameters()
    )
    return not (is_sharded(model) or train_state.masters.mesh.pipeline.world > 1 or rounded)


def exported_files(root: Path, folder: Path) -> dict[str, int | None]:
    """The `files` of a `VerbOutcome` for an export in the run folder `root`, just written. Weights
    and lineage must keep their sizes. The rest must only be there: who edits a generation_config
    means it, and an export would undo it.
    """
    files = sorted(file for file in folder.iterdir() if file.is_file())
    fixed = [file for file in files if file.suffix == ".safetensors" or file.name == LINEAGE]
    there: dict[str, int | None] = dict.fromkeys(str(file.relative_to(root)) for file in files)
    return there | file_sizes(root, fixed)
