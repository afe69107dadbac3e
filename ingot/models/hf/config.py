"""Configurations of transformers' sequence-to-sequence models, encoders and masked language models,
read from a Hugging Face `config.json`.

The only file that imports transformers for these, and only once such a model is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ingot.base.errors import WrongInput
from ingot.config.models.family import longrope_turn
from ingot.config.models.source import WORDS, ModelKind, check_model_type
from ingot.config.models.types import (
    BEHIND_PADDING,
    ENDS_AT_EOS,
    LIKE_BART,
    RELATIVE,
    HFKind,
    installed_types,
)
from ingot.models.hf.relative import NAME, LeanNorm, attend_relative

RELATIVE_POSITIONS = 8192
"""Maximum length in tokens for models such as T5 that use relative positions and have no limit of
their own; attention grows with the square of the length.
"""


AUTO: dict[ModelKind, str] = {
    "seq2seq": "AutoModelForSeq2SeqLM",
    "encoder": "AutoModelForSequenceClassification",
    "masked": "AutoModelForMaskedLM",
}
"""transformers' class that makes each kind of model."""


@dataclass(frozen=True)
class HFConfig:
    """Sizes of one transformers model. `source` is the whole configuration under Hugging Face's
    names.

    `vocab_size` is that of the model; `max_position_embeddings` is the maximum tokens of a source
    text, `target_positions` that of a target. `first_position` is the position id of a text's first
    token: RoBERTa and related models count from the one after padding's.
    """

    model_type: str
    kind: HFKind
    vocab_size: int
    max_position_embeddings: int
    target_positions: int
    first_position: int
    pad: int
    labels: tuple[str, ...]
    source: Mapping[str, Any] = field(repr=False, compare=False)
    learnt_start: Mapping[str, int] = field(default_factory=dict)
    """Start tokens of generation that the tokenizer determines when a model is trained, by their
    names in `generation_config.json`: those of the source would belong to another model.
    """

    reads_last_place: bool = False
    """Whether a decoder's classes are read where a text ends, however it is padded. transformers
    reads them at the last token that is not padding by its id, so a model that is trained with this
    needs a `pad_token_id` that no text ends with.
    """

    asked_share: float = 0.15
    """The share of the tokens that a masked language model is asked for in training; a plan, which
    has no tokens, counts so many logits.
    """

    side_by_side: bool = False
    """Whether rows may hold several texts, each with a segment and positions of its own."""

    @property
    def scores(self) -> bool:
        """Whether the model gives a text one number, rather than probabilities of classes."""
        return self.kind == "encoder" and len(self.labels) == 1

    def to_hf(self) -> dict[str, Any]:
        """The configuration to write into `config.json`."""
        return dict(self.source)

    @property
    def own_head(self) -> bool:
        """Whether a T5 has an output projection separate from its embedding. transformers ties them
        when it builds the model, whatever the configuration says, and unties them when it loads
        weights.
        """
        return self.model_type in RELATIVE and self.source.get("tie_word_embeddings") is False

    @property
    def projects(self) -> bool:
        """Whether the decoder's hidden states are available separately from the logits, so that a
        loss can be computed in chunks.
        """
        return self.model_type in (*LIKE_BART, *RELATIVE)

    def build(self) -> Any:
        """Build transformers' model in float32 on the CPU, randomly initialised from torch's
        generator.
        """
        library = _library()
        model = getattr(library, AUTO[self.kind]).from_config(
            _parsed(self.source, "model.config"), dtype=torch.float32, trust_remote_code=False
        )
        if self.model_type in RELATIVE:
            _train_lean(model)
        return model


def _train_lean(model: Any) -> None:
    """Give a model like T5 an attention and norms that keep less for backward."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = LeanNorm
    if model.config._attn_implementation == "sdpa":
        functions, masks = _library().AttentionInterface, _library().AttentionMaskInterface
        functions.register(NAME, partial(attend_relative, functions()["sdpa"]))
        masks.register(NAME, masks()["sdpa"])
        model.set_attn_implementation(NAME)
        for module in model.modules():
            # transformers 5.17 leaves the copies that encoder and decoder have.
            if hasattr(module, "config"):
                module.config._attn_implementation = NAME


def read_hf_config(
    values: Mapping[str, Any],
    kind: HFKind,
    where: str,
    labels: Sequence[str] = (),
    *,
    unproved: bool = False,
) -> HFConfig:
    """Parse the contents of `config.json`. `labels`: names of an encoder's classes; if empty, the
    configuration's own. `unproved`: also accept model types without proof.

    Raises:
        WrongInput: another model type, or an invalid value; `where` names the configuration.
    """
    model_type = check_model_type(values, kind, where, unproved=unproved)
    source = {**values, "architectures": [installed_types(kind)[model_type]]}
    if kind == "seq2seq":
        source["is_encoder_decoder"] = True
    elif kind == "encoder":
        source |= _classes(values, labels, where)
    if model_type == "marian" and source.get("share_encoder_decoder_embeddings", True):
        source["decoder_vocab_size"] = source.get("vocab_size")
    if model_type in RELATIVE and source.get("decoder_start_token_id") is None:
        source["decoder_start_token_id"] = source.get("pad_token_id", 0)
    parsed = _parsed(source, where)
    if not isinstance(getattr(parsed, "vocab_size", None), int):
        raise WrongInput(
            f"{where}: model_type `{model_type}` has no vocabulary of its own (vocab_size); take"
            " another model (`ingot show models`)"
        )
    source["vocab_size"] = int(parsed.vocab_size)
    _check(parsed, where, kind)
    pad = int(parsed.pad_token_id)
    first = _first_position(model_type, pad)
    positions, target = _positions(parsed, values, first)
    names = (
        tuple(str(parsed.id2label[index]) for index in range(parsed.num_labels))
        if kind == "encoder"
        else ()
    )
    return HFConfig(
        model_type, kind, int(parsed.vocab_size), positions, target, first, pad, names, source
    )


def _positions(parsed: Any, values: Mapping[str, Any], first: int) -> tuple[int, int]:
    """Maximum number of tokens of a source, and of a target."""
    most = getattr(parsed, "max_position_embeddings", None)
    if hasattr(parsed, "max_encoder_position_embeddings"):
        return int(parsed.max_encoder_position_embeddings), int(
            parsed.max_decoder_position_embeddings
        )
    if not isinstance(most, int) or most <= 0:  # relative positions: no limit
        most = max(RELATIVE_POSITIONS, int(values.get("n_positions") or 0))
    most = min(most, longrope_turn(parsed.to_dict()) or most)  # beyond it texts change each other
    return most - first, most - first


def _classes(values: Mapping[str, Any], labels: Sequence[str], where: str) -> dict[str, Any]:
    """The class settings of a configuration for single-label classification, or for one score.

    Raises:
        WrongInput: no `labels` are given, and the model's own outputs are not one class each text.
    """
    names = list(labels)
    if not names:
        given = values.get("id2label") or {}
        count = len(given) or int(values.get("num_labels") or 2)
        by_number = {int(number): str(name) for number, name in given.items()}
        names = [by_number.get(number, f"LABEL_{number}") for number in range(count)]
        problem = values.get("problem_type")
        if problem == "multi_label_classification" or (problem == "regression" and count > 1):
            raise WrongInput(
                f"{where}: problem_type `{problem}` with {count} outputs is not supported, only one"
                " class of several for each text, or one score; choose another model"
            )
    return {
        "num_labels": len(names),
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "regression" if len(names) == 1 else "single_label_classification",
    }


def _first_position(model_type: str, pad: int) -> int:
    if model_type in BEHIND_PADDING:
        return pad + 1
    return 2 if model_type == "mpnet" else 0


def _check(parsed: Any, where: str, kind: HFKind) -> None:
    """Check that token ids which the model itself inserts are in its vocabulary."""
    size = int(parsed.vocab_size)
    if (getattr(parsed, "decoder_vocab_size", None) or size) != size:
        raise WrongInput(
            f"{where}: a decoder with another vocabulary ({parsed.decoder_vocab_size:,} tokens)"
            f" than the encoder ({size:,}) is not supported"
        )
    needed = ["pad_token_id"]
    if kind == "seq2seq":
        needed.append("decoder_start_token_id")
    elif parsed.model_type in ENDS_AT_EOS:
        needed.append("eos_token_id")
    for name in needed:
        value = getattr(parsed, name, None)
        if value is None:
            what = "a classifier of texts" if kind == "encoder" else WORDS[kind]
            raise WrongInput(
                f"{where}: {name} is missing, which {what} needs; set model.config.{name}"
            )
        if not 0 <= value < size:
            raise WrongInput(
                f"{where}: {name} {value} is not in the vocabulary of {size:,} tokens; set"
                f" model.config.{name} to one that is"
            )


def _parsed(source: Mapping[str, Any], where: str) -> Any:
    values = {
        key: value
        for key, value in source.items()
        if key not in ("model_type", "num_labels", "auto_map", "dtype", "torch_dtype")
    }
    try:
        return _library().AutoConfig.for_model(source["model_type"], **values)
    except Exception as error:  # each configuration class validates in its own way
        reason = " ".join(str(error).split())
        raise WrongInput(
            f"{where}: transformers does not take this configuration ({reason}); mend it"
        ) from None


def _library() -> Any:
    import transformers

    return transformers
