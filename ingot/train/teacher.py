"""The teacher of a distillation: where it lies, and whether a student can learn from it."""

from __future__ import annotations

from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.config.models.source import model_config, named_folder
from ingot.config.recipe import Recipe
from ingot.models.native.config import DecoderConfig
from ingot.models.spec import ModelSpec
from ingot.tokenizers.chats.templates import with_template
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer


def teacher_folder(recipe: Recipe, tokenizer: Tokenizer) -> Path | None:
    """The teacher's folder; None unless the objective needs one.

    Raises:
        WrongInput: there is no such model, or its tokenizer gives other ids than the student's.
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
    """The width of the teacher's logits, which a randomly initialised student adopts."""
    return DecoderConfig.from_hf(model_config(folder), str(folder)).vocab_size


def check_teacher(folder: Path, student: ModelSpec, recipe: Recipe) -> None:
    """Raises WrongInput if teacher and student differ in vocabulary size, or the teacher has fewer
    positions than a row has tokens.
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
