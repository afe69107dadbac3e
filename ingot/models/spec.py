"""The model that a recipe means, checked before anything is loaded, and its construction: on
`meta`, then with weights loaded, initialised or only allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ingot.base.errors import WrongInput
from ingot.config.models.source import (
    ModelKind,
    check_lengths,
    check_trained_type,
    position_keys,
    source_config,
    source_folder,
    starts_random,
    trained_kind,
)
from ingot.config.models.types import RELATIVE, WRAPS
from ingot.config.recipe import Recipe
from ingot.config.sections.mlm import MLMSettings
from ingot.models.hf.config import HFConfig, read_hf_config
from ingot.models.hf.content import ALL, Share
from ingot.models.hf.folder import load_weights
from ingot.models.hf.loading import find_drawn, init_hf_model, load_hf_model
from ingot.models.kinds import AnyModel
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import allocate, init_weights, is_sharded
from ingot.models.quantized import init_packed
from ingot.models.quantized_experts import init_stacks

SCORE = "score"
"""The name of a reward model's only output."""


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
    """The model that the recipe trains, for a tokenizer of `ids` ids; `special` are its special ids
    by name (`Tokenizer.ids_for_model`).

    A randomly initialised model gets one embedding per id, at least `least`.

    Raises:
        WrongInput: another kind or type of model than the objective needs, rows longer than the
            model's positions, or more ids than the model has embeddings.
    """
    kind, source = trained_kind(recipe), recipe.model.source
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
        check_trained_type(recipe, values, f"model.source {source}")
        scores = recipe.objective.scores_chats
        if kind in ("encoder", "masked") and (scores or values.get("pad_token_id") is None):
            # Decoders that classify are told apart from padding by its id, and often name none. A
            # tokenizer that is prepared for scores pads with what no chat holds.
            pad = special.get("pad") if special.get("pad") is not None else special.get("eos")
            values |= {} if pad is None else {"pad_token_id": pad}
        start = _learnt_start(values, special) if kind == "seq2seq" else {}
        values |= {key: value for key, value in start.items() if key != "forced_bos_token_id"}
        config = read_hf_config(
            values,
            kind,
            f"model.source {source}",
            labels=[SCORE] if scores else recipe.labels,
            unproved=recipe.model.unproved,
        )
        config = replace(config, learnt_start=start, reads_last_place=scores)
        if isinstance(recipe.objective, MLMSettings):
            config = replace(
                config,
                asked_share=recipe.objective.mlm_probability,
                side_by_side=recipe.pack == "best_fit",
            )
    written = config.target_positions if isinstance(config, HFConfig) else None
    keys = position_keys(values, random=random)
    check_lengths(recipe, config.max_position_embeddings, written, keys=keys)
    if ids > config.vocab_size:
        raise WrongInput(
            f"the tokenizer has {ids} ids, the model {source} only {config.vocab_size}; "
            f"use the model's own tokenizer, or random weights with model.config.vocab_size={ids}"
        )
    return ModelSpec(kind, config, folder, random)


def _learnt_start(
    values: Mapping[str, object], special: Mapping[str, int | None]
) -> dict[str, int]:
    """What generation begins with, as it is learnt: the language of targets, and where the decoder
    reads a target's last token first, that one.
    """
    spoken, last = special.get("forced_bos"), special.get("target_end")
    found = {} if spoken is None else {"forced_bos_token_id": spoken}
    if values.get("model_type") in WRAPS and last is not None:
        found["decoder_start_token_id"] = last
    return found


def _of_tokenizer(
    kind: ModelKind, values: Mapping[str, object], ids: int, special: Mapping[str, int | None]
) -> dict[str, int]:
    """Settings that a randomly initialised model takes from its tokenizer."""
    if kind == "decoder":
        return {"vocab_size": ids}
    named = {
        f"{name}_token_id": token
        for name in ("bos", "eos", "pad")
        if (token := special.get(name)) is not None
    }
    pad = named.setdefault("pad_token_id", named.get("eos_token_id", 0))
    # T5's decoder starts with padding, BART's with the end-of-sequence token.
    start = pad if values.get("model_type") in RELATIVE else named.get("eos_token_id", pad)
    return {
        "vocab_size": ids,
        **named,
        **({"decoder_start_token_id": start} if kind == "seq2seq" else {}),
    }


def create_model(spec: ModelSpec, seed: int, *, planned: bool = False) -> AnyModel:
    """The model before wrappers: a native decoder on `meta`.

    A transformers model gets its weights at once, whole in this host's memory: values computed by
    its constructors (buffers) cannot be told apart from learnt ones without them. Sharding moves it
    to the device layer by layer. It is filled even if a checkpoint is loaded afterwards, since that
    holds only trained parameters: not Marian's bias of each token, nor embeddings that are not
    used. `planned` leaves it on `meta` as well, since nothing is computed with it.
    """
    if isinstance(spec.config, DecoderConfig):
        with torch.device("meta"):
            return Decoder(spec.config)
    if planned:
        with (meta := torch.device("meta")):
            model = init_hf_model(spec.config, seed, meta)
        # What the folder lacks is trained whole beside an adapter. One on the hub may be planned
        # before its weights are here.
        if spec.folder is not None and not spec.random and any(spec.folder.glob("*.safetensors")):
            find_drawn(model, spec.folder)
        return model
    host = torch.device("cpu")
    if spec.folder is None or spec.random:
        return init_hf_model(spec.config, seed, host)
    return load_hf_model(spec.config, spec.folder, device=host, dtype=torch.float32, seed=seed)


def materialize_model(
    model: AnyModel,
    spec: ModelSpec,
    seed: int,
    device: torch.device,
    *,
    filled: bool,
    share: Share = ALL,
    quick: bool = False,
) -> None:
    """Allocate the model on `device` and fill this rank's part of its weights, loaded or randomly
    initialised; `filled` False only allocates. `share`: the tensors that this rank checks against
    the record of the export. `quick`: random ones may be any (`init_weights`).
    """
    if not isinstance(model, Decoder) and not any(one.is_meta for one in model.parameters()):
        if not is_sharded(model):
            model.to(device)
        return
    if filled and isinstance(model, Decoder) and spec.folder is not None and not spec.random:
        load_weights(model, spec.folder, share, lambda: allocate(model, device))
        return
    allocate(model, device)
    if filled and isinstance(model, Decoder):
        init_weights(model, seed, quick=quick)
        init_packed(model, seed, model.config.initializer_range)
        init_stacks(model, seed, model.config.initializer_range)


def build_model(spec: ModelSpec, seed: int, *, filled: bool) -> AnyModel:
    """The model in float32 on the CPU, with weights loaded or randomly initialised; `filled` False
    only allocates, for a checkpoint to follow.
    """
    model = create_model(spec, seed)
    materialize_model(model, spec, seed, torch.device("cpu"), filled=filled)
    return model
