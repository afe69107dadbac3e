"""The teacher of a distillation: where it lies, and whether a student can learn from it. Asked when
a recipe is checked, as far as that is known then, and when its training starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.models.family import DecoderSizes, sizes
from ingot.config.models.source import model_config, named_folder
from ingot.config.recipe import Recipe
from ingot.tokenizers.chats.templates import with_template
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

KNOB = "objective.teacher"


def teacher_folder(recipe: Recipe, tokenizer: Tokenizer) -> Path | None:
    """The teacher's folder; None unless the objective needs one.

    Raises:
        WrongInput: there is no such model, or its tokenizer gives other ids than the student's.
    """
    teacher = recipe.objective.teacher_source
    if teacher is None:
        return None
    folder = named_folder(teacher, KNOB)
    check_teachers_tokenizer(recipe, tokenizer, load_tokenizer(folder))
    return folder


def teacher_vocabulary(folder: Path) -> int:
    """The width of the teacher's logits, which a randomly initialised student adopts."""
    return teacher_sizes(model_config(folder), str(folder)).vocab


def teacher_sizes(config: Mapping[str, Any], where: str) -> DecoderSizes:
    """The sizes of a teacher. Raises WrongInput if its configuration is not that of a decoder."""
    try:
        return sizes(config, f"{KNOB} {where}")
    except (KeyError, TypeError, ValueError) as error:
        raise WrongInput(
            f"{KNOB} {where}: its configuration lacks a size or has one that is no number"
            f" ({error}); mend its config.json, or choose another teacher"
        ) from None


def check_teacher(folder: Path, student: int, recipe: Recipe) -> None:
    """Raises WrongInput if the teacher cannot teach a student with a vocabulary of so many
    tokens.
    """
    theirs = teacher_sizes(model_config(folder), str(folder))
    check_teachers_vocabulary(recipe, theirs, student)
    check_teachers_positions(recipe, theirs)


def check_teachers_vocabulary(recipe: Recipe, theirs: DecoderSizes, student: int) -> None:
    """Raises WrongInput if teacher and student differ in the size of their vocabulary."""
    if student != theirs.vocab:
        raise WrongInput(
            f"{KNOB} {recipe.objective.teacher_source} has a vocabulary of {theirs.vocab:,} tokens,"
            f" the student {recipe.model.source} one of {student:,}; distillation compares them"
            " token by token: choose two of the same vocabulary"
        )


def check_teachers_positions(recipe: Recipe, theirs: DecoderSizes) -> None:
    """Raises WrongInput if the teacher has fewer positions than a row has tokens."""
    if theirs.positions < recipe.data.seq_len:
        raise WrongInput(
            f"data.seq_len {recipe.data.seq_len} exceeds the {theirs.positions} positions of"
            f" {KNOB} {recipe.objective.teacher_source}; lower it"
        )


def check_teachers_tokenizer(recipe: Recipe, own: Tokenizer, theirs: Tokenizer) -> None:
    """Raises WrongInput if the tokenizers give other ids; their chat templates may differ."""
    teacher = recipe.objective.teacher_source
    if with_template(own, "").identity() != with_template(theirs, "").identity():
        raise WrongInput(
            f"the tokenizer of {KNOB} {teacher} is not the student's, so their distributions are"
            f" over other tokens; set tokenizer.source to {teacher}, or choose another teacher"
        )


def check_learnt_size(recipe: Recipe, theirs: Tokenizer) -> None:
    """Raises WrongInput if a tokenizer that will be learnt cannot have the teacher's ids."""
    if recipe.tokenizer.vocab_size != theirs.vocab_size:
        teacher = recipe.objective.teacher_source
        raise WrongInput(
            f"{KNOB} {teacher} has a tokenizer of {theirs.vocab_size:,} ids, and one of"
            f" {recipe.tokenizer.vocab_size:,} would be trained for the student; set"
            f" tokenizer.source to {teacher}"
        )
