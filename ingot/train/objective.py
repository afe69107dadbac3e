"""From the recipe's objective to the mathematics, with the other models that it needs: a teacher, a
reference.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.models.device import Compute
from ingot.models.hf.folder import CONFIG, load_model, load_weights, model_config
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import give_memory
from ingot.models.spec import Blueprint, named_folder
from ingot.objectives.protocol import Objective, ObjectiveInputs, make_objective
from ingot.parallel.apply import TYPES, Wrapping, apply_wrappers
from ingot.parallel.mesh import Mesh
from ingot.tokenizers.chat_templates import with_template
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Objectives:
    """The objective on the rows that are trained on, and the same on those held out."""

    training: Objective
    held_out: Objective


def teacher_folder(recipe: Recipe, tokenizer: Tokenizer) -> Path | None:
    """The folder of the teacher; None unless the objective needs one.

    Raises:
        WrongInput: there is none, or its tokenizer gives other ids than the student's.
    """
    teacher = recipe.objective.teacher_source
    if teacher is None:
        return None
    folder = named_folder(teacher, "objective.teacher")
    own, theirs = (with_template(one, "").identity() for one in (tokenizer, load_tokenizer(folder)))
    if own != theirs:
        raise WrongInput(
            f"the tokenizer of objective.teacher {teacher} is not the student's, so their"
            f" distributions are over other tokens; set tokenizer.source to {teacher}, or choose"
            " another teacher"
        )
    return folder


def teacher_vocabulary(folder: Path) -> int:
    """The width of a teacher's logits, which a student that starts from nothing takes over."""
    return DecoderConfig.from_hf(model_config(folder), str(folder)).vocab_size


def check_teacher(folder: Path, student: Blueprint, recipe: Recipe) -> None:
    """Raises WrongInput where teacher and student have vocabularies of other sizes, or the teacher
    fewer positions than a row has tokens.
    """
    config = DecoderConfig.from_hf(model_config(folder), str(folder))
    if config.vocab_size != student.config.vocab_size:
        raise WrongInput(
            f"the teacher {folder} has a vocabulary of {config.vocab_size:,} tokens, the student"
            f" {recipe.model.source} one of {student.config.vocab_size:,}; distillation compares"
            " them token by token: choose two of the same vocabulary"
        )
    if config.max_position_embeddings < recipe.data.seq_len:
        raise WrongInput(
            f"data.seq_len {recipe.data.seq_len} exceeds the {config.max_position_embeddings}"
            f" positions of the teacher {folder}; lower it"
        )


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
    apply_wrappers(model, _stage_of(mesh), Wrapping(recipe.parallel, compute=compute))
    give_memory(model, mesh.device)
    load_weights(model, folder)
    return model


def _stage_of(mesh: Mesh) -> Mesh:
    """The ranks that hold the same layers, as if there were no others."""
    parts = {name: part for name, part in mesh.parts.items() if name not in ("pipeline", "ends")}
    return replace(mesh, degrees=replace(mesh.degrees, pipeline=1), parts=parts)
