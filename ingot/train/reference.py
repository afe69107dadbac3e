"""A reference model's log-probabilities of preference pairs, computed once before the policy is
built and cached beside the prepared columns.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.progress import Progress
from ingot.base.storage import atomic_file
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import CommittedCheckpoint, checkpoint_in
from ingot.config.models.source import model_config, named_folder
from ingot.config.models.weights import model_hash
from ingot.config.sections.layout import Precision
from ingot.config.sections.quantize import Quantize
from ingot.data.batches.loader import fixed_batches
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.models.adapters.quantized import quantize_base
from ingot.models.device import computing_in
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.spec import ModelSpec, create_model, materialize_model
from ingot.objectives.cross_entropy import CrossEntropy
from ingot.objectives.forward import shard_batch
from ingot.objectives.preferences import answer_sums
from ingot.parallel.apply import (
    WrapSettings,
    apply_wrappers,
    compute_weights_dtype,
    narrow_frozen,
)
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.parallel.rows import row_sharing
from ingot.tokenizers.familiar import check_reference
from ingot.train.beginning import OF_ONE_MODEL
from ingot.train.setup import TrainSetup

Floats = npt.NDArray[np.float32]


class Tables(NamedTuple):
    """Summed log-probabilities of (chosen, rejected) by row, float32 `[rows, 2]`; NaN for rows that
    were not computed.
    """

    training: Tensor
    held_out: Tensor


def reference_tables(setup: TrainSetup, mesh: Mesh) -> Tables | None:
    """The reference's log-probabilities for the rows that this training uses; None unless the
    objective needs a reference.

    Collective. Rows computed before, by an interrupted or shorter training, are reused.

    Raises:
        WrongInput: there is no such reference, or it does not fit the tokenizer or the rows.
        Failed: the disk is full.
    """
    recipe = setup.recipe
    if not recipe.objective.needs_reference:
        return None
    model_spec = _reference_spec(setup, recipe.objective.reference_source)
    samples = setup.order.rows(
        setup.begin * setup.batch.global_batch,
        (setup.last - setup.begin) * setup.batch.global_batch,
    )
    wanted = (
        np.unique(samples),
        np.arange(
            min(recipe.train.evaluate_rows, len(setup.held_out))
            if recipe.train.evaluate_every and recipe.data.holds_out
            else 0
        ),
    )
    model: list[AnyModel] = []

    def opened() -> AnyModel:
        if not model:
            model.append(_open(setup, model_spec, mesh))
        return model[0]

    rows = (setup.rows, setup.held_out)
    about = _about(setup, model_spec)
    paths = [
        recipe.folder.reference / f"{split}-{fingerprint({**about, 'data': each.fingerprint})}.npy"
        for split, each in zip(("train", "validation"), rows, strict=True)
    ]
    made = [_table(*each, setup, mesh, opened) for each in zip(rows, wanted, paths, strict=True)]
    model.clear()
    # A sharded model and its hooks form a reference cycle; without this its memory would still be
    # held while the policy is built.
    gc.collect()
    return Tables(*(torch.from_numpy(table) for table in made))


def open_reference(setup: TrainSetup, mesh: Mesh) -> AnyModel:
    """The reference model itself, for an objective that asks it about what is not in the data;
    without stages, since it is asked for every token at once. Collective; raises WrongInput as
    `reference_tables` does.
    """
    spec = _reference_spec(setup, setup.recipe.objective.reference_source)
    return _open(setup, spec, mesh.unstaged)


def _reference_spec(setup: TrainSetup, source: str | None) -> ModelSpec:
    if source is None:
        return setup.model_spec
    folder = named_folder(source, "objective.reference")
    config = DecoderConfig.from_hf(model_config(folder), str(folder))
    if (
        config.vocab_size < setup.tokenizer.vocab_size
        or config.max_position_embeddings < setup.recipe.data.seq_len
    ):
        raise WrongInput(
            f"objective.reference {source} has {config.vocab_size:,} ids and"
            f" {config.max_position_embeddings:,} positions, the data need"
            f" {setup.tokenizer.vocab_size:,} and {setup.recipe.data.seq_len:,}; choose a reference"
            " of the same family"
        )
    check_reference(source, setup.tokenizer, folder)
    return ModelSpec("decoder", config, folder, random=False)


def _starts_elsewhere(setup: TrainSetup, model_spec: ModelSpec) -> bool:
    """Whether the reference is the policy as trained by another run (`origin`), not as its source
    has it.
    """
    return (
        model_spec is setup.model_spec
        and setup.origin is not None
        and setup.recipe.model.lora is None
    )


def _about(setup: TrainSetup, model_spec: ModelSpec) -> dict[str, Any]:
    """Everything that determines the numbers in a table, but for the rows of its split."""
    weights: dict[str, Any]
    if _starts_elsewhere(setup, model_spec) and setup.origin is not None:
        weights = {"checkpoint": setup.origin.commit["files"]}
    elif model_spec.random or model_spec.folder is None:
        weights = {"seed": setup.recipe.seed}
    else:
        weights = {"model": model_hash(model_spec.folder)}
    knobs = _quantized(setup, model_spec)
    # The configuration is included because `model.config` may override what the weights came with.
    about = {
        "config": model_spec.config.to_hf(),
        "seq_len": setup.recipe.data.seq_len,
        "truncate": setup.recipe.data.truncate,
        "compute": setup.compute,
        "master": setup.recipe.precision.master,
        "quantize": None if knobs is None else [knobs.kind, knobs.double],
    }
    return {**weights, **about}


def _quantized(setup: TrainSetup, model_spec: ModelSpec) -> Quantize | None:
    """How the matrices of the reference are kept: as the policy's where it is what the policy
    starts from, or the two would differ before the first step.
    """
    return setup.recipe.model.quantize if model_spec is setup.model_spec else None


def _open(setup: TrainSetup, model_spec: ModelSpec, mesh: Mesh) -> AnyModel:
    """The reference model, sharded as the policy will be and with weights in the same dtype, or
    the two would differ before the first step.
    """
    origin = setup.origin if _starts_elsewhere(setup, model_spec) else None
    if origin is not None:
        mesh.from_main(lambda: _check_there(origin))
    precision = Precision(master=setup.recipe.precision.master)
    how = WrapSettings(setup.recipe.parallel, precision=precision, compute=setup.compute)
    model = create_model(model_spec, setup.recipe.seed)
    if (knobs := _quantized(setup, model_spec)) is not None:
        quantize_base(model, knobs)
    model = apply_wrappers(model, mesh, how)
    materialize_model(model, model_spec, setup.recipe.seed, mesh.device, filled=True)
    if origin is not None:
        load_checkpoint(origin, Masters(model, mesh), None, mesh, otherwise=OF_ONE_MODEL)
    model.eval().requires_grad_(False)
    dtype = compute_weights_dtype(model, how)
    if dtype is not None and isinstance(model, Decoder):
        narrow_frozen(model, dtype)
    return model


def _check_there(origin: CommittedCheckpoint) -> None:
    """Raises WrongInput if another checkpoint, or none, stands where training began: the reference
    is the policy as it was then, whatever its run has done since.
    """
    try:
        there = checkpoint_in(origin.folder).commit["files"]
    except WrongInput:
        there = None
    if there != origin.commit["files"]:
        raise WrongInput(
            f"{origin.folder}, which this training began with and compares with, is"
            f" {'gone' if there is None else 'another one by now'}; restore it, or start over with"
            " --fresh (the old checkpoints are set aside, not deleted)"
        )


def _table(
    rows: Rows | Samples,
    wanted: npt.NDArray[np.int64],
    path: Path,
    setup: TrainSetup,
    mesh: Mesh,
    opened: Callable[[], AnyModel],
) -> Floats:
    """One split's table with all `wanted` rows present, read from disk or computed; each
    data-parallel rank computes its share.
    """
    table = mesh.from_main(lambda: _read(path, len(rows)))
    missing = wanted[np.isnan(table[wanted]).any(axis=1)]
    if not len(missing):
        return table
    data, micro_batch = mesh.data, setup.batch.micro_batch
    mine = missing[data.rank :: data.world].tolist()
    # Equally many forward passes on every rank: a sharded model is gathered by collectives in each.
    forward_passes = math.ceil(math.ceil(len(missing) / data.world) / micro_batch)
    nothing = next(fixed_batches(rows, [0], micro_batch))
    nothing = replace(nothing, rows=torch.full_like(nothing.rows, -1))
    batches = itertools.islice(
        itertools.chain(fixed_batches(rows, mine, micro_batch), itertools.repeat(nothing)),
        forward_passes,
    )
    found = torch.zeros(len(rows), 2, dtype=torch.float64)
    model, sharing, done = opened(), row_sharing(mesh), 0
    with (
        torch.no_grad(),
        computing_in(setup.compute, mesh.device),
        Progress("reference", len(mine), "pairs", quiet=not mesh.is_main) as progress,
    ):
        for batch in batches:
            there = shard_batch(batch, sharing).to(mesh.device)
            values = -model(
                there.tokens, there.positions, there.segments, there.labels, CrossEntropy().token
            )
            sums = answer_sums(
                values.float(), (lambda part: part) if sharing is None else sharing.total
            )
            live = batch.rows >= 0
            found[batch.rows[live]] = sums.cpu()[live].double()
            done += int(live.sum())
            progress.update(done)
    table[missing] = data.all_sum(found)[missing].float().numpy()
    if not np.isfinite(table[missing]).all():
        raise WrongInput(
            "the reference gives log-probabilities that are not finite; choose another"
            " objective.reference"
        )
    mesh.from_main(lambda: _write(path, table))
    return table


def _read(path: Path, rows: int) -> Floats:
    """The table of an earlier training; all NaN if there is none that fits."""
    try:
        table = np.load(path)
    except (FileNotFoundError, ValueError, EOFError):
        table = np.empty((0, 2))
    return (
        table
        if table.shape == (rows, 2) and table.dtype == np.float32
        else np.full((rows, 2), np.nan, np.float32)
    )


def _write(path: Path, table: Floats) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        np.save(stream, table)
