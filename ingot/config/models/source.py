"""Which model a recipe means, from its configuration alone: its location, its kind, and the known
model types. Loads no weights and does not import torch.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_config, fetch_model
from ingot.base.runfolder import RunFolder, model_folder
from ingot.config.models.lineage import model_again, tell_earlier_model
from ingot.config.models.presets import PRESETS, THROUGH_TRANSFORMERS, preset
from ingot.config.models.rotary import overridden
from ingot.config.models.types import (
    LEARNED_POSITIONS,
    POSITION_KEYS,
    PROVED,
    READS_LAST,
    SIDE_BY_SIDE,
    STORED_POSITIONS,
    UNFIT,
    HFKind,
    check_own_code,
    installed_types,
)
from ingot.config.recipe import Recipe
from ingot.config.sections.objective import Documents
from ingot.config.sections.training import ModelSettings

ModelKind = Literal["decoder", "seq2seq", "encoder", "masked"]

KIND_FOR_DOCUMENTS: dict[Documents, ModelKind] = {
    "text": "decoder",
    "chat": "decoder",
    "preference": "decoder",
    "rated": "decoder",
    "pair": "seq2seq",
    "labelled": "encoder",
    "masked": "masked",
}
"""The kind of model that gives each kind of document a probability."""

WORDS: dict[HFKind, str] = {
    "seq2seq": "a sequence-to-sequence model",
    "encoder": "an encoder",
    "masked": "a masked language model",
}
"""Each kind of transformers' models in words."""
CONFIG, META, ADAPTER = "config.json", "params.json", "adapter_config.json"
_MAY_BE_LEFT_OUT = (
    *("rope_parameters", "rope_scaling", "rope_theta", "head_dim"),
    *("pad_token_id", "decoder_start_token_id"),
)
"""Keys that may be set although the configuration lacks them."""


def trained_kind(recipe: Recipe) -> ModelKind:
    """The kind of model that a recipe trains."""
    return "encoder" if recipe.objective.scores_chats else kind_that_reads(recipe)


def kind_that_reads(recipe: Recipe) -> ModelKind:
    """The kind of model that gives the recipe's documents a probability."""
    if recipe.objective.spans is not None:
        return "seq2seq"
    return KIND_FOR_DOCUMENTS[recipe.documents]


def check_trained_type(recipe: Recipe, values: Mapping[str, Any], where: str) -> None:
    """Check the `model_type` of a model of transformers' that the recipe trains.

    Raises:
        WrongInput: as `check_model_type`; or it has no score that is read at the last token, which
            the objective trains.
    """
    kind = trained_kind(recipe)
    if kind == "decoder":
        return
    model_type = check_model_type(values, kind, where, unproved=recipe.model.unproved)
    if kind == "masked" and recipe.pack == "best_fit" and model_type not in SIDE_BY_SIDE:
        raise WrongInput(
            f"{where}: model_type `{model_type}` cannot keep several texts of a row apart, which"
            f" data.pack=best_fit asks for; set data.pack to none ({', '.join(SIDE_BY_SIDE)} can)"
        )
    if recipe.objective.scores_chats and model_type not in READS_LAST:
        raise WrongInput(
            f"{where}: model_type `{model_type}` has no score at a text's last token, which"
            f" objective.kind {recipe.objective.kind} trains; take a decoder, such as `llama` or"
            " `qwen2`"
        )


def check_model_type(
    values: Mapping[str, Any], kind: HFKind, where: str, *, unproved: bool = False
) -> str:
    """The `model_type` of a configuration that transformers builds; `where` names the
    configuration.

    Raises:
        WrongInput: transformers has no such type of this kind, the type is unfit, it is unproved
            and `unproved` (`model.unproved`) is not set, or its weights are quantised.
    """
    model_type = str(values.get("model_type"))
    what = WORDS[kind]
    if reason := UNFIT[kind].get(model_type):
        raise WrongInput(
            f"{where}: model_type `{model_type}` is not supported as {what}: {reason}; take"
            " another model (`ingot show models`)"
        )
    if model_type not in PROVED[kind]:
        if model_type not in installed_types(kind):
            check_own_code(values, where)
            near = difflib.get_close_matches(model_type, PROVED[kind], n=1, cutoff=0.0)[0]
            raise WrongInput(
                f"{where}: model_type `{model_type}` is not supported as {what} (nearest:"
                f" `{near}`); `ingot show models` names those that are"
            )
        if not unproved:
            raise WrongInput(
                f"{where}: model_type `{model_type}` is not proved: transformers builds it, but"
                " that it trains and answers here as it does there was never tested; set"
                " model.unproved=true to go on, or take another model (`ingot show models`)"
            )
    if values.get("quantization_config") is not None:
        raise WrongInput(
            f"{where}: quantised weights are not supported; take the model that they were made from"
        )
    return model_type


def kind_of(config: Mapping[str, Any]) -> ModelKind:
    """The kind of model that a `config.json` describes."""
    if any(
        str(name).endswith("ForSequenceClassification")
        for name in config.get("architectures") or ()
    ):
        return "encoder"
    if any(str(name).endswith("ForMaskedLM") for name in config.get("architectures") or ()):
        return "masked"
    return "seq2seq" if config.get("is_encoder_decoder") else "decoder"


def model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises WrongInput if it is not a model folder."""
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if (folder / META).exists():
            raise WrongInput(
                f"{folder} is in Meta's original layout; run `ingot import {folder} NEW` and give"
                " the new folder"
            ) from None
        if folder.is_dir() and not any(folder.iterdir()):
            raise WrongInput(f"{folder} is an empty folder; give a Hugging Face folder") from None
        raise WrongInput(
            f"{folder} is not a model folder ({CONFIG} is missing); give a Hugging Face folder"
        ) from None
    except ValueError as error:
        raise WrongInput(
            f"{folder / CONFIG} is not JSON ({error}); {model_again(folder)}"
        ) from None
    if not isinstance(config, dict):
        raise WrongInput(f"{folder / CONFIG} is not a mapping; {model_again(folder)}")
    return language_config(config)


_LANGUAGE_PARTS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
}
"""Types of the language part of a multimodal model, and the class of that part alone."""


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language part, if a configuration describes a multimodal model
    (Gemma 3, Mistral 3); its other parts are not supported.
    """
    text = config.get("text_config")
    if config.get("model_type") not in ("gemma3", "mistral3") or not isinstance(text, dict):
        return config
    usual = "gemma3_text" if config["model_type"] == "gemma3" else "mistral"
    kind = str(text.get("model_type", usual))
    outer = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        **{key: config[key] for key in outer if key in config},
        **text,
        **{key: config[key] for key in ids if key in config},
        "model_type": kind,
        "architectures": [_LANGUAGE_PARTS.get(kind, "")],
    }


def source_folder(model: ModelSettings) -> Path | None:
    """The folder of `model.source`, downloaded from the hub if necessary; None for a preset.

    Raises:
        WrongInput: no such folder, preset or hub model.
    """
    scheme, _, rest = model.source.partition(":")
    if scheme == "preset":
        preset(rest)
        return None
    return named_folder(model.source, "model.source", model.revision)


def config_folder(model: ModelSettings) -> Path | None:
    """A folder with the configuration of `model.source`, for what loads no weights: of a model on
    the hub nothing else is downloaded; None for a preset.

    Raises:
        WrongInput: no such folder, preset or hub model.
        Failed: the hub does not answer.
    """
    scheme, _, rest = model.source.partition(":")
    return fetch_config(rest, model.revision) if scheme == "hf" else source_folder(model)


def named_config(source: str, knob: str, *, adapters: bool = False) -> Path:
    """A folder with the configuration of the model that `knob` names, which with `adapters` may be
    that of an adapter alone; raises as `named_folder`.
    """
    scheme, _, rest = source.partition(":")
    is_hub = scheme == "hf"
    return fetch_config(rest, adapters=adapters) if is_hub else named_folder(source, knob)


def named_folder(source: str, knob: str, revision: str | None = None) -> Path:
    """The model folder that `hf:ORG/NAME`, a folder, or a run folder refers to; for a run, its
    exported model, and a note where that may be an earlier training's.

    Raises:
        WrongInput: there is no such folder or hub model; `knob` names the knob that refers to it.
    """
    if source.startswith("hf:"):
        return fetch_model(source.removeprefix("hf:"), revision)
    folder = Path(source)
    if not folder.is_dir():
        raise _unknown_source(source, knob)
    own = model_folder(folder)
    if own != folder:
        tell_earlier_model(RunFolder(folder))
    return own


def _unknown_source(source: str, knob: str) -> WrongInput:
    """The error for a source that is not a folder, which may be a name without its scheme."""
    takes_presets = knob == "model.source"
    known = (
        "a folder nor preset:NAME nor hf:ORG/NAME" if takes_presets else "a folder nor hf:ORG/NAME"
    )
    action = "check the path"
    if takes_presets and source in PRESETS | THROUGH_TRANSFORMERS:
        action = f"did you mean preset:{source}?"
    elif re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        action += f", or write hf:{source} for a model of the hub"
    return WrongInput(f"{knob} {source} is neither {known}; {action}")


def source_config(model: ModelSettings, folder: Path | None) -> dict[str, Any]:
    """The Hugging Face configuration of the source, overridden by `model.config`."""
    config = preset(model.source.partition(":")[2]) if folder is None else model_config(folder)
    unknown = [key for key in model.config if key not in config and key not in _MAY_BE_LEFT_OUT]
    if unknown:
        near = difflib.get_close_matches(unknown[0], config, n=3, cutoff=0.0)
        raise WrongInput(
            f"model.config: {', '.join(unknown)} is not in the configuration of {model.source};"
            f" the nearest names there are {', '.join(near)}"
        )
    return overridden(config, model.config)


def starts_random(model: ModelSettings, folder: Path | None) -> bool:
    """Whether training starts from random weights. Raises WrongInput if weights are requested of a
    preset.
    """
    if model.init == "weights" and folder is None:
        raise WrongInput(
            f"model.init weights: {model.source} is a preset and has none; use hf:ORG/NAME or a"
            " folder"
        )
    return model.init == "random" or folder is None


def learned_positions(values: Mapping[str, Any], *, random: bool) -> bool:
    """Whether a model has as many positions as its weights have learned, or hold, and cannot have
    more.
    """
    model_type = values.get("model_type")
    if random or model_type in STORED_POSITIONS:
        return not random
    # DeBERTa V3 has but relative ones, in buckets; without those there is one for each distance.
    distances = values.get("relative_attention") and all(
        (values.get(key) or -1) < 1 for key in ("max_relative_positions", "position_buckets")
    )
    has_vectors = values.get("position_biased_input") is not False or distances
    return bool(has_vectors) and model_type in LEARNED_POSITIONS


def position_keys(values: Mapping[str, Any], *, random: bool) -> list[str]:
    """What in `model.config` gives a model more positions: of sources first, of targets last; none
    where `learned_positions`.
    """
    learned = learned_positions(values, random=random)
    return [] if learned else [key for key in POSITION_KEYS if values.get(key)]


def check_positions(model: ModelSettings, folder: Path | None, *, random: bool) -> None:
    """Raises WrongInput if `model.config` changes how many positions weights have learned."""
    if folder is None or not learned_positions(config := model_config(folder), random=random):
        return
    for key in POSITION_KEYS:
        have, wanted = config.get(key), model.config.get(key, config.get(key))
        if wanted != have:
            raise WrongInput(
                f"model.config.{key} {wanted}: the weights of {model.source} have {have}"
                " positions and no others; remove it, or set model.init to random"
            )


def check_lengths(
    recipe: Recipe, positions: int, written: int | None = None, *, keys: Sequence[str]
) -> None:
    """Raises WrongInput if rows are longer than the model's `positions`; `written`: positions of
    targets, if different; `keys`: as `position_keys` says.
    """
    longest = {"data.seq_len": (recipe.data.seq_len, positions, keys[:1])}
    if recipe.documents == "pair":
        longest["data.target_len"] = recipe.target_len, written or positions, keys[-1:]
    elif recipe.objective.spans is not None:
        most = max(recipe.data.seq_len, recipe.target_len)
        longest["data.seq_len"] = most, positions, keys[:1]
    for knob, (length, most, more) in longest.items():
        if length > most:
            raise WrongInput(
                f"{knob} {length} exceeds the model's {most} positions; lower {knob}"
                f"{f' or set model.config.{more[0]}' if more else ''}"
            )


def check_lora(model: ModelSettings, *, random: bool) -> None:
    """Raises WrongInput if an adapter is configured for a model with random weights."""
    if model.lora is not None and random:
        raise WrongInput(
            f"model.lora trains an adapter of weights that are kept, and {model.source} starts from"
            " random ones; set model.source to a model with weights, or model.lora=null"
        )
