"""A model folder before anything heavy is opened: what kind of model, its tokenizer, and that the
two belong together.

Every engine passes through here, so that vLLM and Triton refuse what our own server refuses, and as
early.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.hf.folder import check_template, model_config, weight_files
from ingot.models.kinds import Kind, base_folder, kind_of_folder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checked:
    """`base` is the folder with the configuration: of an adapter its base's."""

    folder: Path
    base: Path
    kind: Kind
    tokenizer: Tokenizer


def check_folder(folder: Path, *, any_template: bool = False) -> Checked:
    """Look at a model folder.

    Raises:
        WrongInput: not a model folder, no tokenizer in it, or, unless `any_template`, another chat
            template than the model was trained with.
    """
    kind = kind_of_folder(folder)
    base = base_folder(folder) if is_adapter(folder) else folder
    tokenizer = load_tokenizer(folder if (folder / "tokenizer_config.json").exists() else base)
    if not any_template:
        check_template(folder, tokenizer.template_identity, "serve.any_template")
    return Checked(folder, base, kind, tokenizer)


def check_vocabulary(checked: Checked, vocabulary: int) -> None:
    """Raises WrongInput when the tokenizer can give ids that the model does not have."""
    if checked.tokenizer.vocab_size > vocabulary:
        raise WrongInput(
            f"{checked.folder}: the tokenizer has {checked.tokenizer.vocab_size:,} tokens, the"
            f" model's vocabulary {vocabulary:,}; put the tokenizer beside it that the model was"
            " trained with"
        )


def check_causal(folder: Path, engine: str, *, any_template: bool = False) -> Checked:
    """The same for an engine that opens decoders alone, whole and from their own folder.

    Raises:
        WrongInput: as above; or another kind of model, an adapter, or weights that are not there.
    """
    checked = check_folder(folder, any_template=any_template)
    if checked.kind != "decoder":
        what = "a classifier" if checked.kind == "encoder" else "a sequence-to-sequence model"
        raise WrongInput(
            f"{folder} is {what}, and serve.engine {engine} answers with decoders alone; set"
            " serve.engine=native"
        )
    if is_adapter(folder):
        raise WrongInput(
            f"{folder} is an adapter, and serve.engine {engine} opens whole models; give the merged"
            f" one (`ingot export {folder} NEW`)"
        )
    weight_files(folder)
    check_vocabulary(checked, vocabulary_of(model_config(folder)))
    return checked


def vocabulary_of(config: dict[str, Any]) -> int:
    """The size that a configuration says, its text part's where it has parts."""
    part = config.get("text_config")
    return int(
        config.get("vocab_size") or (part.get("vocab_size", 0) if isinstance(part, dict) else 0)
    )
