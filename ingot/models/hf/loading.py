"""transformers' models: random initialisation, loading from a Hugging Face folder, and export under
its tensor names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.base.errors import WrongInput, some_of
from ingot.base.progress import say
from ingot.config.models.source import CONFIG
from ingot.config.models.types import HFKind
from ingot.models.hf.config import HFConfig
from ingot.models.hf.folder import stored_shapes, stored_tensors
from ingot.models.hf.models import Encoder, HFModel, MaskedLM, Seq2Seq, TextReader
from ingot.models.hf.tensor_names import current_name

GENERATION = "generation_config.json"
# The heads of masked language models.
MASKED_HEADS = (
    "cls",
    "lm_head",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
    "generator_predictions",
    "generator_lm_head",
    "lm_predictions",
    "decoder",
    "predictions",
)
# Heads for other tasks in pretrained encoders, and the pooler, which some classifiers lack.
OTHER_HEADS = (*MASKED_HEADS, "discriminator_predictions", "mask_predictions", "pooler")
# The same beside the head of masked language models, by the beginnings of their names.
OTHER_PARTS = (
    "pooler.",
    "cls.seq_relationship.",
    "sop_classifier.",
    "classifier.",
    "dense.",
    "pre_classifier.",
    "qa_outputs.",
    "discriminator_predictions.",
    "mask_predictions.",
)

_GLOBAL = r"_global\.(weight|bias)$"  # for tokens with global attention, which are not used here
UNREAD: dict[tuple[HFKind, str], str] = {
    ("encoder", "xlnet"): r"\.(mask_emb|r_s_bias|seg_embed)$",  # for masked tokens, pairs of texts
    ("seq2seq", "led"): _GLOBAL,
    ("masked", "longformer"): _GLOBAL,
}
"""Regular expressions of parameters that only unsupported inputs use, by kind and model type."""


def init_hf_model(config: HFConfig, seed: int, device: torch.device) -> HFModel:
    """Random weights in float32 as transformers initialises them, the same for a seed on every rank
    and device. The state of torch's generators is preserved.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        inner = config.build()
    if config.own_head:
        inner.lm_head.weight = nn.Parameter(inner.lm_head.weight.detach().clone())
        inner.all_tied_weights_keys.pop("lm_head.weight", None)
    # An unused parameter, such as an untied embedding, gets no gradient, and data parallelism would
    # wait for one.
    shared = getattr(getattr(inner, "model", None), "shared", None)
    if shared is not None and shared.weight is not inner.model.encoder.embed_tokens.weight:
        shared.weight.requires_grad_(False)
    _set_start(config, inner)
    unread = UNREAD.get((config.kind, config.model_type), "(?!)")
    for name, parameter in inner.named_parameters():
        if re.search(unread, name):
            parameter.requires_grad_(False)
    wrappers: dict[HFKind, type[HFModel]] = {
        "seq2seq": Seq2Seq,
        "encoder": Encoder,
        "masked": MaskedLM,
    }
    return wrappers[config.kind](config, inner).to(device)


def load_hf_model(
    config: HFConfig,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    check: bool = True,
) -> HFModel:
    """The model in `folder`, its weights in `dtype`; buffers stay in float32.

    A pretrained encoder has no head for our classes yet, and some have none for masked tokens: it
    is initialised from `seed`, a line is printed, and the model knows it (`drawn`). `seed` None
    makes that an error. `check` False accepts changes since the export.

    Raises:
        WrongInput: damaged files, tensors that do not fit (all are named, and nothing is loaded),
            or that differ from the export's.
    """
    model = init_hf_model(config, seed or 0, torch.device("cpu"))
    places = _places(model)
    ours, fresh, unused = _compare(model, folder, may_draw=seed is not None)
    loaded: dict[int, str] = {}
    with torch.no_grad():
        for stored, tensor in stored_tensors(folder, check=check):
            if (name := ours[stored]) not in places:
                continue
            place = places[name]
            if id(place) not in loaded:
                place.copy_(tensor)
                loaded[id(place)] = stored
            elif not torch.equal(place, tensor.to(place.dtype)):
                twin = loaded[id(place)]
                raise WrongInput(
                    f"{folder}: {CONFIG} ties {stored} to {twin}, but the two differ; set"
                    " tie_word_embeddings to false"
                )
    if fresh or unused:
        drawn = f"{', '.join(fresh)} drawn from seed {seed}" if fresh else "nothing drawn"
        say(f"{folder}: {drawn}{f'; not used: {some_of(unused)}' if unused else ''}")
    if isinstance(model, Seq2Seq):
        _read_generation(model, folder)
        _set_start(config, model.inner)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    return model.to(device)


def find_drawn(model: HFModel, folder: Path) -> None:
    """Let a model without contents know which of its modules the folder lacks. Raises WrongInput as
    `load_hf_model` does.
    """
    _compare(model, folder, may_draw=True)


def hf_weights(model: HFModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors to export, under transformers' names: tied ones once, under the name that
    transformers ties the others to, which models with another head have too; computed ones not at
    all.
    """
    left_out = re.compile(
        "|".join(getattr(model.inner, "_keys_to_ignore_on_save", None) or ["(?!)"])
    )
    seen, places = set[int](), _places(model)
    tied: Mapping[str, str] = getattr(model.inner, "all_tied_weights_keys", None) or {}
    for name, tensor in places.items():
        if places.get(tied.get(name, "")) is tensor:
            continue
        if id(tensor) not in seen and not left_out.search(name):
            yield name, tensor.detach()
        seen.add(id(tensor))


def _places(model: HFModel) -> dict[str, Tensor]:
    """Every name of every tensor; tied names map to the same tensor."""
    named: dict[str, Tensor] = dict(model.inner.named_parameters(remove_duplicate=False))
    kept = model.inner.state_dict(keep_vars=True)
    return named | {name: tensor for name, tensor in kept.items() if name not in named}


def _compare(
    model: HFModel, folder: Path, *, may_draw: bool
) -> tuple[dict[str, str], list[str], list[str]]:
    """The names in the folder with those of the model, the names of parameters to initialise, and
    unused names in the folder.
    """
    places, found = _places(model), stored_shapes(folder)
    # Older folders also contain computed buffers, such as BERT's position ids.
    names = places.keys() | {name for name, _ in model.inner.named_buffers()}
    ours = {stored: current_name(stored, model.inner.base_model_prefix, names) for stored in found}
    shapes = {name: tuple(tensor.shape) for name, tensor in places.items()}
    fresh, unused = _check(model, shapes, found, ours, folder, may_draw=may_draw)
    if isinstance(model, TextReader):
        model.drawn = tuple(dict.fromkeys(_part(model, name) for name in fresh))
    return ours, fresh, unused


def _check(
    model: HFModel,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    ours: Mapping[str, str],
    folder: Path,
    *,
    may_draw: bool,
) -> tuple[list[str], list[str]]:
    """Names of parameters to initialise, and unused names in the folder. Raises WrongInput for
    every other difference.
    """
    have = set(ours.values())
    places = _places(model)
    covered = {id(places[name]) for name in have if name in places}
    computed = _pattern(model, "_keys_to_ignore_on_load_missing")
    missing = [
        name for name in shapes if id(places[name]) not in covered and not computed.search(name)
    ]
    fresh = [name for name in missing if may_draw and _new_head(model, name, have)]
    unused = [
        stored for stored, name in ours.items() if name not in shapes and _other_head(model, name)
    ]
    buffers = {name for name, _ in model.inner.named_buffers()}
    ignored = _pattern(model, "_keys_to_ignore_on_load_unexpected")
    surplus = [
        stored
        for stored, name in ours.items()
        if name not in shapes
        and name not in buffers
        and stored not in unused
        and not ignored.search(name)
    ]
    problems = [f"{name} is missing" for name in missing if name not in fresh]
    problems += [f"{name} is not part of this model" for name in sorted(surplus)]
    problems += [
        f"{stored} is {list(found[stored])}, {list(shapes[name])} is wanted"
        for stored, name in ours.items()
        if name in shapes and found[stored] != shapes[name]
    ]
    if problems:
        knobs = "model.source, model.config" + (
            " and objective.labels" if model.config.kind == "encoder" else ""
        )
        raise WrongInput(
            f"{folder}: weights do not fit {CONFIG}: {some_of(problems, 8, '; ')}; check {knobs}"
        )
    return fresh, unused


def _new_head(model: HFModel, name: str, have: set[str]) -> bool:
    """Whether a missing tensor belongs to a part that a pretrained encoder lacks completely: the
    classifier, the pooler under it, or the head for masked tokens.
    """
    if model.config.kind == "seq2seq":
        return False
    part = _part(model, name)
    return name.startswith(f"{part}.") and not any(other.startswith(f"{part}.") for other in have)


def _part(model: HFModel, name: str) -> str:
    """The module that a pretrained encoder may lack with this tensor."""
    prefix = f"{model.inner.base_model_prefix}."
    return name.split(".")[0] if not name.startswith(prefix) else f"{prefix}pooler"


def _other_head(model: HFModel, name: str) -> bool:
    own = name.removeprefix(f"{model.inner.base_model_prefix}.")
    if model.config.kind == "masked":
        return own.startswith(OTHER_PARTS)
    return model.config.kind == "encoder" and own.split(".")[0] in OTHER_HEADS


def _pattern(model: HFModel, attribute: str) -> re.Pattern[str]:
    """transformers' own pattern of names that may be missing or surplus; one that never matches if
    it has none.
    """
    return re.compile("|".join(getattr(model.inner, attribute, None) or ["(?!)"]))


def _set_start(config: HFConfig, inner: Any) -> None:
    for name, token in config.learnt_start.items():
        setattr(inner.generation_config, name, token)


def _read_generation(model: Seq2Seq, folder: Path) -> None:
    try:
        values = json.loads((folder / GENERATION).read_bytes())
        model.inner.generation_config = type(model.inner.generation_config).from_dict(values)
    except FileNotFoundError:
        pass
    except (ValueError, TypeError, AttributeError) as error:
        raise WrongInput(
            f"{folder / GENERATION} is not a generation configuration ({error}); fetch the model"
            " again"
        ) from None
