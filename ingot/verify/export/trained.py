"""A trained run, and its model rebuilt from the exported checkpoint on the CPU in float32; and the
comparison of its weights with the exported ones, bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput, differing
from ingot.base.markers import COMMIT, problems, read_marker
from ingot.checkpoints.export import DTYPES
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.store import CommittedCheckpoint, committed, step_folder
from ingot.config.identity import changes
from ingot.config.models.experts import CORRECTION
from ingot.config.models.lineage import LINEAGE, read_lineage
from ingot.config.models.source import CONFIG
from ingot.config.recipe import Recipe
from ingot.config.sections.layout import Parallel
from ingot.config.sections.loop import Average
from ingot.config.sections.quantize import Quantize
from ingot.models.adapters.lora import adapter_tensors, add_lora, lora_layers, merge_in_place
from ingot.models.adapters.quantized import round_base
from ingot.models.hf.folder import stored_tensors
from ingot.models.hf.tensor_names import stored_name
from ingot.models.kinds import AnyModel, exported_weights, model_weights
from ingot.models.native.decoder import Decoder
from ingot.models.spec import build_model
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh
from ingot.train.optim.averaging import load_average, stored_average
from ingot.train.setup import TrainSetup, make_setup
from ingot.verify.export.logits import HeldOutRows, held_out, logit_difference, training_logits
from ingot.verify.proof import Check

FOLD_TOLERANCE = 2.0**-20
"""Tolerance of a weight that an adapter was folded into, relative to its tensor's largest: another
device sums in another order. One step of the export type is allowed in addition, and reported; on
the same kind of device there is no difference.
"""
MAX_NAMED = 3


@dataclass(frozen=True)
class WeightComparison:
    """The result of comparing stored tensors with a model's."""

    tensors: int
    weights: int
    products: int
    """The number of tensors that are matrices."""
    wrong: list[str]
    """Descriptions of the differences."""
    folded: int
    """Weights of folded-in layers whose last bit differs."""

    @property
    def summary(self) -> str:
        """The first differences in one line."""
        more = f"; and {len(self.wrong) - MAX_NAMED:,} more" if len(self.wrong) > MAX_NAMED else ""
        return "; ".join(self.wrong[:MAX_NAMED]) + more


@torch.no_grad()
def compare_weights(model: AnyModel, folder: Path, dtype: torch.dtype) -> WeightComparison:
    """Fold a model's adapter into its weights, in place, and compare them all, rounded to `dtype`,
    with those in `folder`.
    """
    fused = model.config.fused if isinstance(model, Decoder) else {}
    adapted = {stored_name(f"{name}.weight", fused) for name in lora_layers(model)}
    merge_in_place(model)
    wanted = dict(exported_weights(model))
    wrong, folded, seen = list[str](), 0, set[str]()
    for name, stored in stored_tensors(folder, check=False):
        seen.add(name)
        there = torch.float32 if name.endswith(CORRECTION) else dtype
        if name not in wanted:
            wrong.append(f"{name} is not part of the model")
        elif stored.dtype != there or stored.shape != wanted[name].shape:
            wrong.append(
                f"{name} is {_describe_tensor(stored)}, {list(wanted[name].shape)} of"
                f" {_dtype_name(there)} is wanted"
            )
        elif count := int((_bit_patterns(stored) != _bit_patterns(wanted[name].to(there))).sum()):
            if name in adapted and _within_one_step(stored, wanted[name], there):
                folded += count
            else:
                wrong.append(_describe_difference(name, stored, wanted[name].to(there), count))
    wrong += [f"{name} is missing" for name in wanted if name not in seen]
    return WeightComparison(
        len(seen),
        sum(tensor.numel() for tensor in wanted.values()),
        sum(tensor.ndim > 1 for tensor in wanted.values()),
        wrong,
        folded,
    )


@torch.no_grad()
def round_weights(model: AnyModel, dtype: torch.dtype) -> None:
    """Round every exported tensor of a model without an adapter to `dtype`, in place."""
    for name, tensor in model_weights(model):
        if not name.endswith(CORRECTION):
            tensor.copy_(tensor.to(dtype))


def differing_tensors(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor], which: Collection[str]
) -> list[str]:
    """The names in `which` whose tensors are not bit-identical."""
    return [
        name
        for name in which
        if one[name].shape != other[name].shape
        or bool((_bit_patterns(one[name]) != _bit_patterns(other[name])).any())
    ]


def _bit_patterns(tensor: Tensor) -> Tensor:
    """The bits as integers: 0.0 differs from -0.0, and NaN equals itself."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    )


def _within_one_step(stored: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    gap = (stored.float() - wanted.float()).abs()
    return bool(
        (gap <= torch.finfo(dtype).eps * wanted.abs() + FOLD_TOLERANCE * wanted.abs().max()).all()
    )


def _describe_difference(name: str, stored: Tensor, wanted: Tensor, count: int) -> str:
    gap = (stored.double() - wanted.double()).abs().nan_to_num(nan=torch.inf).flatten()
    at = int(gap.argmax())
    stored_value, expected = (float(one.flatten()[at]) for one in (stored, wanted))
    most = differing(stored_value, expected, "{:.6g}".format)
    return f"{name} differs in {count:,} of {gap.numel():,} weights, most {' for '.join(most)}"


def _describe_tensor(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {_dtype_name(tensor.dtype)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BASES = "base: as trained and as given"
CPU = torch.device("cpu")
TRAIN_AGAIN = "remove the folder and run `ingot train`, which exports it from the checkpoint"
LINEAGE_KEYS = ("run", "step", "export_type", "model_hash", "tokenizer")
"""Keys that training writes into `ingot.json` and that are needed here."""
MACHINE_DEPENDENT = ("precision.compute",)
"""Knobs that may differ when a run is verified on another machine."""


@dataclass(frozen=True)
class ExportedRun:
    """A trained run and the record of its export."""

    setup: TrainSetup
    lineage: Mapping[str, Any]
    found: CommittedCheckpoint | None
    """The checkpoint that was exported."""
    missing_reason: str
    """Why `found` is None."""
    held_out: HeldOutRows

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def step(self) -> int:
        return int(self.lineage["step"])

    @property
    def average(self) -> Average | None:
        """What was exported in place of the last weights."""
        return self.recipe.train.average if "average" in self.lineage else None

    @property
    def type(self) -> str:
        return str(self.lineage["export_type"])

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES["fp32" if self.type == "fp32" else "bf16"]


def open_export(recipe: Recipe) -> ExportedRun:
    """Open a trained run. Raises WrongInput if it was not trained, or with another recipe."""
    run = recipe.folder
    lineage = read_lineage(run.model)
    if lineage is None or not (run.model / CONFIG).exists():
        raise WrongInput(
            f"{run.root} holds no model that was trained here (no {LINEAGE} in {run.model}); run"
            " `ingot train` first"
        )
    if missing := [key for key in LINEAGE_KEYS if key not in lineage]:
        raise WrongInput(
            f"{run.model / LINEAGE} lacks {', '.join(missing)}, so it is not what training wrote;"
            f" {TRAIN_AGAIN}"
        )
    # One process rebuilds the model, however many trained it.
    alone = recipe.model_copy(update={"parallel": Parallel()})
    setup = make_setup(alone, alone_on_cpu())
    averaged = (lineage.get("average") or {}).get("steps", [])
    found, gone = _exported_checkpoint(recipe, int(lineage["step"]), averaged)
    if found is not None:
        before, now = (
            {key: value for key, value in identity.items() if key not in MACHINE_DEPENDENT}
            for identity in (found.commit["identity"], setup.identity)
        )
        if changed := changes(before, now):
            raise WrongInput(
                f"{found.folder} is of another recipe: {'; '.join(changed)}; give the recipe that"
                " was trained, or run `ingot train`"
            )
    return ExportedRun(setup, lineage, found, gone, held_out(setup.held_out, setup.model_spec.kind))


def alone_on_cpu() -> Mesh:
    return Mesh(Ranks(), CPU)


def _exported_checkpoint(
    recipe: Recipe, step: int, averaged: Iterable[int]
) -> tuple[CommittedCheckpoint | None, str]:
    """The exported checkpoint, or why it, or one that it was averaged with, is not whole."""
    checkpoints, commits = recipe.folder.checkpoints, dict[int, Mapping[str, Any]]()
    for one in {step, *averaged}:
        folder = step_folder(checkpoints, one)
        commit = read_marker(folder, COMMIT)
        if commit is None:
            there = ", ".join(f"{found.step:,}" for found in committed(checkpoints)) or "none"
            return None, f"{folder}, which was exported, is gone (steps that are there: {there})"
        if wrong := problems(folder, commit, checksums=True):
            return None, f"{folder} is damaged: {wrong[0]}"
        commits[one] = commit
    return CommittedCheckpoint(step_folder(checkpoints, step), step, commits[step]), ""


@dataclass(frozen=True)
class RebuiltModel:
    """The trainer's model and its logits on the held-out records.

    `compared`: its weights with those of the folder, and `unrounded` its logits before they were
    rounded; None where there is no
    checkpoint to know them from. `adapter`: what was trained of a run with LoRA.
    """

    logits: Tensor
    """The logits with weights rounded to the export type."""
    unrounded: Tensor | None
    compared: WeightComparison | None
    adapter: dict[str, Tensor]
    products: int
    """The number of weight matrices."""


def rebuild(export: ExportedRun) -> RebuiltModel:
    """Rebuild the trainer's model. Without its checkpoint: the recipe's architecture with the
    exported weights.

    Raises:
        WrongInput: the exported weights cannot be read, or are not those of this architecture.
    """
    setup, lora = export.setup, export.recipe.model.lora
    if export.found is None:
        model_spec = replace(setup.model_spec, folder=export.recipe.folder.model, random=False)
        model = build_model(model_spec, setup.recipe.seed, filled=True).eval()
        return RebuiltModel(
            training_logits(model, export.held_out),
            unrounded=None,
            compared=None,
            adapter={},
            products=sum(parameter.ndim > 1 for parameter in model.parameters()),
        )
    # A checkpoint of a run with an adapter contains only the adapter.
    model = build_model(setup.model_spec, setup.recipe.seed, filled=lora is not None)
    if lora is not None:
        add_lora(model, lora, setup.recipe.seed)
    masters = Masters(model, alone_on_cpu())
    load_checkpoint(export.found, masters, None, alone_on_cpu())
    if export.average is not None:
        load_average(
            masters, stored_average(export.average, export.recipe.folder.checkpoints, export.step)
        )
    if (quantize := merged_quantize(export.recipe)) is not None:
        round_base(model, quantize)
    unrounded = training_logits(model.eval(), export.held_out)
    adapter = adapter_tensors(model) if lora is not None else {}
    compared = compare_weights(model, export.recipe.folder.model, export.dtype)
    round_weights(model, export.dtype)
    return RebuiltModel(
        training_logits(model, export.held_out), unrounded, compared, adapter, compared.products
    )


def merged_quantize(recipe: Recipe) -> Quantize | None:
    """What the base was rounded to that the adapter is merged into; None if that is the source's
    own.
    """
    quantize = recipe.model.quantize
    return None if quantize is None or quantize.merge_into == "original" else quantize


def base_model(setup: TrainSetup) -> AnyModel:
    """The model that training started from, without an adapter."""
    return build_model(setup.model_spec, setup.recipe.seed, filled=True).eval()


def compare_bases(export: ExportedRun, beside: AnyModel, original: Tensor) -> tuple[Tensor, Check]:
    """Compare the adapter beside the base in few bits, which it was trained beside, with the one
    beside the source's own, whose logits are `original`. Leaves `beside` with the base that
    `model/` was merged into, and returns its logits.
    """
    quantize, model = export.recipe.model.quantize, export.recipe.folder.model
    assert quantize is not None
    kept = {name: one.clone() for name, one in beside.state_dict().items()}
    round_base(beside, quantize)
    rounded = training_logits(beside, export.held_out)
    gap = logit_difference(rounded, original)
    apart = f"logits differ by {gap.relative:.1e} in norm, {gap.largest:.2g} at most"
    folder = export.recipe.folder.adapter
    if merged_quantize(export.recipe) is not None:
        told = (
            f"{model.name} is merged into the {quantize.kind} base that it was trained beside;"
            f" beside the source's own, as other tools open {folder.name}, {apart}"
        )
        return rounded, Check(BASES, True, told)
    beside.load_state_dict(kept)
    told = (
        f"{model.name} is merged into the source's own weights and is not the model that was"
        f" trained: beside the {quantize.kind} base of training {apart}"
    )
    return original, Check(BASES, True, told)
