"""Which model a recipe means, checked before anything is loaded, and built: on meta, then weights
loaded, drawn, or just room for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model
from ingot.base.runfolder import RunFolder
from ingot.config.family import overridden
from ingot.config.presets import preset
from ingot.config.recipe import Recipe
from ingot.config.sections.training import Model as ModelKnobs
from ingot.models.hf.config import HFConfig, read_hf_config
from ingot.models.hf.folder import CONFIG, load_weights, model_config
from ingot.models.hf.loading import init_hf_model, load_hf_model
from ingot.models.kinds import KIND_FOR_DOCUMENTS, AnyModel, ModelKind
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import allocate, init_weights, is_sharded


@dataclass(frozen=True)
class ModelSpec:
    """A model and where its weights come from; `folder` is None for random weights of a preset."""

    kind: ModelKind
    config: DecoderConfig | HFConfig
    folder: Path | None
    random: bool


def resolve_model_spec(
    recipe: Recipe, ids: int, special: Mapping[str, int | None], least: int = 0
) -> ModelSpec:
    """The model that the recipe trains, for a tokenizer of `ids` ids, `special` ones among them by
    name (`bos`, `eos`, `pad`).

    A model that starts from nothing has as many embeddings as there are ids, `least` at the least.

    Raises:
        WrongInput: another kind of model than the objective is for, rows longer than the model's
            positions, or more ids than the model has embeddings.
    """
    kind, source = KIND_FOR_DOCUMENTS[recipe.documents], recipe.model.source
    folder = source_folder(recipe.model)
    random = starts_random(recipe.model, folder)
    values = source_config(recipe.model, folder)
    if random:
        values |= {
            name: value
            for name, value in _of_tokenizer(kind, values, max(ids, least), special).items()
            if name not in recipe.model.config
        }
    config: DecoderConfig | HFConfig
    if kind == "decoder":
        config = DecoderConfig.from_hf(values, f"model.source {source}")
    else:
        config = read_hf_config(values, kind, f"model.source {source}", labels=recipe.labels)
    longest = {"data.seq_len": recipe.data.seq_len} | (
        {"data.target_len": recipe.data.target_len} if kind == "seq2seq" else {}
    )
    for knob, length in longest.items():
        if length > config.max_position_embeddings:
            raise WrongInput(
                f"{knob} {length} exceeds the model's {config.max_position_embeddings} positions;"
                f" lower {knob} or set model.config.max_position_embeddings"
            )
    if ids > config.vocab_size:
        raise WrongInput(
            f"the tokenizer has {ids} ids, the model {source} only {config.vocab_size}; "
            f"use the model's own tokenizer, or random weights with model.config.vocab_size={ids}"
        )
    return ModelSpec(kind, config, folder, random)


def _of_tokenizer(
    kind: ModelKind, values: Mapping[str, object], ids: int, special: Mapping[str, int | None]
) -> dict[str, int]:
    """What the configuration of a model that starts from nothing takes from its tokenizer."""
    if kind == "decoder":
        return {"vocab_size": ids}
    named = {f"{name}_token_id": token for name, token in special.items() if token is not None}
    pad = named.setdefault("pad_token_id", named.get("eos_token_id", 0))
    # T5 begins to write with padding, BART with the end of what came before.
    start = pad if values.get("model_type") in ("t5", "mt5") else named.get("eos_token_id", pad)
    return {
        "vocab_size": ids,
        **named,
        **({"decoder_start_token_id": start} if kind == "seq2seq" else {}),
    }


def create_model(spec: ModelSpec, seed: int) -> AnyModel:
    """The model before wrappers: a decoder on `meta`.

    One of transformers has its weights at once, all of them in this host's memory: what its
    constructors compute cannot be told from what is learnt without them. Sharding brings a layer at
    a time to the device. It is filled even where a checkpoint follows, which holds what is
    trained and nothing else: not Marian's bias of each token, nor embeddings that nobody reads.
    """
    if isinstance(spec.config, DecoderConfig):
        with torch.device("meta"):
            return Decoder(spec.config)
    host = torch.device("cpu")
    if spec.folder is None or spec.random:
        return init_hf_model(spec.config, seed, host)
    return load_hf_model(spec.config, spec.folder, device=host, dtype=torch.float32, seed=seed)


def materialize_model(
    model: AnyModel, spec: ModelSpec, seed: int, device: torch.device, *, filled: bool
) -> None:
    """Give a drafted model its memory on `device`, and this rank's part of its weights, loaded or
    drawn; not `filled`: just room for them.
    """
    if not isinstance(model, Decoder):
        if not is_sharded(model):
            model.to(device)
        return
    allocate(model, device)
    if not filled:
        return
    if spec.folder is None or spec.random:
        init_weights(model, seed)
    else:
        load_weights(model, spec.folder)


def build_model(spec: ModelSpec, seed: int, device: torch.device, *, filled: bool) -> AnyModel:
    """The model in float32 on `device`, its weights loaded or drawn; not `filled`: with just room
    for them, where a checkpoint follows.
    """
    model = create_model(spec, seed)
    materialize_model(model, spec, seed, device, filled=filled)
    return model


def source_folder(model: ModelKnobs) -> Path | None:
    """The folder that `model.source` means, fetched from the hub if need be; None for a preset.

    Raises:
        WrongInput: no such folder, preset or hub model.
    """
    scheme, _, rest = model.source.partition(":")
    if scheme == "preset":
        preset(rest)
        return None
    return named_folder(model.source, "model.source", model.revision)


def named_folder(source: str, knob: str, revision: str | None = None) -> Path:
    """The model folder that `hf:ORG/NAME`, a folder, or a run folder means; of a run the model that
    it exported.

    Raises:
        WrongInput: there is no such folder or hub model; `knob` says what asked for it.
    """
    if source.startswith("hf:"):
        return fetch_model(source.removeprefix("hf:"), revision)
    folder = Path(source)
    if not folder.is_dir():
        known = (
            "a folder nor preset:NAME nor hf:ORG/NAME"
            if knob == "model.source"
            else "a folder nor hf:ORG/NAME"
        )
        raise WrongInput(f"{knob} {source} is neither {known}; check the path")
    own = RunFolder(folder).model
    return own if not (folder / CONFIG).exists() and (own / CONFIG).exists() else folder


def source_config(model: ModelKnobs, folder: Path | None) -> dict[str, Any]:
    """The Hugging Face configuration of the source, with `model.config` laid over it."""
    config = preset(model.source.partition(":")[2]) if folder is None else model_config(folder)
    unknown = [
        key
        for key in model.config
        if key not in config
        and key not in ("rope_parameters", "rope_scaling", "rope_theta", "head_dim")
    ]
    if unknown:
        raise WrongInput(
            f"model.config: {', '.join(unknown)} is not in the configuration of {model.source}; see"
            " its config.json for the names"
        )
    return overridden(config, model.config)


def starts_random(model: ModelKnobs, folder: Path | None) -> bool:
    """Whether training starts from random weights. Raises WrongInput when weights are asked of a
    preset.
    """
    if model.init == "weights" and folder is None:
        raise WrongInput(
            f"model.init weights: {model.source} is a preset and has none; use hf:ORG/NAME or a"
            " folder"
        )
    return model.init == "random" or folder is None
