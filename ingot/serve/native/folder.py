"""Checks a model folder before anything of it is loaded.

Every engine checks folders here, so that vLLM and Triton refuse what our own server refuses, and as
early.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.config.models.source import WORDS, ModelKind, model_config
from ingot.config.models.weights import weight_files
from ingot.models.adapters.peft_config import is_adapter
from ingot.models.hf.folder import check_template
from ingot.models.kinds import base_folder, kind_of_folder
from ingot.serve.native.causal import is_bare_encoder
from ingot.tokenizers.load import load_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

# The factor by which texts may be longer with tokenizers that drop characters: indented source code
# is mostly spaces.
LOSSY = 4


@dataclass(frozen=True)
class CheckedFolder:
    """A checked model folder. `base` is the folder with the configuration: for an adapter that of
    its base model.
    """

    folder: Path
    base: Path
    kind: ModelKind
    tokenizer: Tokenizer


def check_model_folder(folder: Path, *, any_template: bool) -> CheckedFolder:
    """Check a model folder without loading weights.

    Raises:
        WrongInput: not a model folder, no tokenizer in it, or, unless `any_template`, another chat
            template than the model was trained with.
    """
    kind = "encoder" if is_bare_encoder(folder) else kind_of_folder(folder)
    base = base_folder(folder) if is_adapter(folder) else folder
    tokenizer = load_tokenizer(folder if (folder / "tokenizer_config.json").exists() else base)
    if not any_template:
        check_template(folder, tokenizer.template_identity, "serve.any_template")
    return CheckedFolder(folder, base, kind, tokenizer)


def check_vocabulary(checked: CheckedFolder, vocabulary: int) -> None:
    """Raises WrongInput where the tokenizer has ids that the model does not have."""
    if checked.tokenizer.vocab_size > vocabulary:
        raise WrongInput(
            f"{checked.folder}: the tokenizer has {checked.tokenizer.vocab_size:,} tokens, the"
            f" model's vocabulary {vocabulary:,}; put the tokenizer beside it that the model was"
            " trained with"
        )


def check_decoder_folder(folder: Path, engine: str, *, any_template: bool) -> CheckedFolder:
    """Check a model folder for an engine that loads complete decoders only.

    Raises:
        WrongInput: as `check_model_folder`; or another kind of model, an adapter, or no weights.
    """
    checked = check_model_folder(folder, any_template=any_template)
    if checked.kind != "decoder":
        what = "a classifier" if checked.kind == "encoder" else WORDS[checked.kind]
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
    check_vocabulary(checked, vocab_size_of(model_config(folder)))
    return checked


def most_characters(tokenizer: Tokenizer, positions: int) -> int:
    """Characters of the longest text whose tokens fit into `positions`: each of them is the
    longest one. A tokenizer that drops or joins characters (spaces, accents) gets LOSSY times that.
    """
    exact = tokenizer.lossy_reason is None
    return positions * tokenizer.longest_token * (1 if exact else LOSSY)


def vocab_size_of(config: dict[str, Any]) -> int:
    """The vocabulary size of a configuration, or of its text part."""
    part = config.get("text_config")
    return int(
        config.get("vocab_size") or (part.get("vocab_size", 0) if isinstance(part, dict) else 0)
    )
