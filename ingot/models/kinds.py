"""The kinds of model: native decoders, and transformers' models behind the same interface. Opening
a folder and listing the tensors to export work the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model
from ingot.base.progress import say
from ingot.config.models.content import CHANGED, LABELS, QUANTIZE
from ingot.config.models.lineage import read_lineage
from ingot.config.models.rotary import overridden
from ingot.config.models.source import ModelKind, kind_of, model_config
from ingot.config.models.types import HFKind
from ingot.config.models.weights import model_hash
from ingot.models.adapters.lora import merged_weights
from ingot.models.adapters.peft import class_count, load_adapter
from ingot.models.adapters.peft_config import base_of, is_adapter, read_adapter_config
from ingot.models.hf import folder as folders
from ingot.models.hf.config import HFConfig, read_hf_config
from ingot.models.hf.loading import hf_weights, load_hf_model
from ingot.models.hf.models import Encoder, HFModel, MaskedLM, Seq2Seq, TextReader
from ingot.models.hf.tensor_names import (
    LORA_LEAVES,
    expert_pieces,
    joined,
    pieces_shape,
    stored_pieces,
)
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import named_weights

AnyModel = Decoder | Seq2Seq | Encoder | MaskedLM


def kind_of_folder(folder: Path) -> ModelKind:
    """The kind of the model in a folder; for an adapter, the kind of its merged model."""
    if not is_adapter(folder):
        return kind_of(model_config(folder))
    if class_count(folder) is not None:
        return "encoder"
    if (read_lineage(folder) or {}).get("objective") == "mlm":
        return "masked"
    return kind_of(model_config(base_folder(folder)))


def base_folder(adapter: Path) -> Path:
    """The folder of the model that a PEFT adapter belongs to.

    Raises:
        WrongInput: it exists neither as a folder nor on the hub.
    """
    base, revision = base_of(adapter), read_adapter_config(adapter).revision
    if base.startswith("hf:"):
        return fetch_model(base.removeprefix("hf:"), revision)
    if Path(base).is_dir():
        return Path(base)
    if base.count("/") == 1 and not base.startswith((".", "/")):
        return fetch_model(base, revision)
    raise WrongInput(
        f"{adapter} is an adapter of {base}, which is not there; put the model there, or name its"
        " folder in adapter_config.json"
    )


def open_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    changed: Mapping[str, Any] | None = None,
    check: bool = True,
) -> AnyModel:
    """Open the model in `folder`, of any kind, in `dtype` (None: float32), in evaluation mode. An
    adapter is merged into its base. `changed`: values instead of those of its configuration, as
    `model.config` has them. `check` False accepts files that changed since the export.

    Raises:
        WrongInput: not a model folder, an unsupported architecture, damaged files, tensors that do
            not fit, or, with `check`, that differ from those exported, or a base that is not the
            one of the adapter's training.
    """
    if is_adapter(folder):
        return _with_adapter(folder, device, dtype, changed or {}, check=check)
    config = overridden(model_config(folder), changed or {})
    kind = kind_of(config)
    if kind == "decoder":
        return folders.load_model(
            folder, device=device, dtype=dtype, overrides=changed, check=check
        )
    return load_hf_model(
        read_hf_config(config, kind, str(folder), unproved=True),
        folder,
        device=device,
        dtype=dtype or torch.float32,
        seed=None,
        check=check,
    ).eval()


def _with_adapter(
    adapter: Path,
    device: torch.device,
    dtype: torch.dtype | None,
    changed: Mapping[str, Any],
    *,
    check: bool,
) -> AnyModel:
    base, kind = base_folder(adapter), kind_of_folder(adapter)
    if check:
        _check_base(adapter, base)
    about = read_lineage(adapter) or {}
    changed = {**(about.get(CHANGED) or {}), **changed}
    if quantize := about.get(QUANTIZE):
        say(
            f"{adapter} was trained beside its base in {quantize.get('kind')}: beside {base} as it"
            " is, it is another model (`ingot verify export` tells how far off)"
        )
    model: AnyModel
    if kind == "decoder":
        model = folders.load_model(base, device=device, overrides=changed, check=check)
    else:
        config = _adapted_config(adapter, base, kind, about, changed)
        held = read_adapter_config(adapter).heads
        seed = 0 if held else None  # of what the base lacks and the adapter brings
        model = load_hf_model(
            config, base, device=device, dtype=torch.float32, seed=seed, check=check
        )
        _check_drawn(model, adapter, base, held)
    load_adapter(model, adapter, merge=True, check=check)
    return model.to(dtype or torch.float32).eval()


def _adapted_config(
    adapter: Path,
    base: Path,
    kind: HFKind,
    about: Mapping[str, Any],
    changed: Mapping[str, Any],
) -> HFConfig:
    """The configuration of a base with its adapter. The head of a classifier is the adapter's, so
    that it does not matter what the base's was for, or whether it has one; `ingot.json` names its
    classes, for which PEFT's layout has no place.
    """
    given = model_config(base)
    values = overridden(given, changed)
    classes = class_count(adapter)
    if classes is None:
        return read_hf_config(values, kind, str(base), unproved=True)
    # A score of ours is read where a text ends, whatever the base pads with.
    scores = about.get("objective") == "reward"
    if scores and values.get("pad_token_id") is None:
        values["pad_token_id"] = 0
    labels = about.get(LABELS) or ()
    if not labels and kind_of(given) != "encoder":
        labels = [str(label) for label in range(classes)]
    values["problem_type"] = None
    config = read_hf_config(values, kind, str(base), labels=labels, unproved=True)
    return replace(config, reads_last_place=scores)


def _check_drawn(model: HFModel, adapter: Path, base: Path, held: Sequence[str]) -> None:
    """Refuse an adapter that was trained beside modules that were drawn at random, and does not
    hold them: what they were then is nowhere.
    """
    drawn = model.drawn if isinstance(model, TextReader) else ()
    lost = [name for name in drawn if not any(name.endswith(head) for head in held)]
    if lost:
        raise WrongInput(
            f"{adapter}: neither it nor {base} has {', '.join(lost)}, which was drawn at random in"
            " its training; take the merged model of that run, or train the adapter again"
        )


def _check_base(adapter: Path, base: Path) -> None:
    """Refuse a base that is not the one of the adapter's training: whatever has the right shapes
    would be merged with it. Adapters that others made have no record of it.
    """
    recorded = ((read_lineage(adapter) or {}).get("base") or {}).get("model_hash")
    if recorded is not None and (found := model_hash(base)) != recorded:
        raise WrongInput(
            f"{adapter} was trained beside the model {recorded}, and {base} is"
            f" {found} (model_hash); put that model there again, name its folder"
            " in adapter_config.json, or train the adapter again; if it is meant to go with this"
            " one, accept it with"
            f" `ingot import {adapter} NEW`"
        )


def model_weights(
    model: AnyModel, tensors: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model by its own name, adapters merged, one at a time.

    `tensors`: the weights by those names, in the model's order, if the model is on `meta`.
    """
    if tensors is None and not isinstance(model, Decoder):
        tensors = hf_weights(model)
    return merged_weights(model, tensors)


def exported_weights(
    model: AnyModel, tensors: Iterable[tuple[str, Tensor]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The same as the tensors of Hugging Face's files: those that a family's files hold as one are
    joined, stacked experts taken apart.
    """
    config = model.config
    if not isinstance(config, DecoderConfig):
        yield from model_weights(model, tensors)
        return
    for name, tensor in joined(model_weights(model, tensors), config.fused, torch.cat):
        experts = expert_pieces(name, tuple(tensor.shape), config.experts)
        yield from ((stored, piece.of(tensor)) for stored, piece in experts)
        if not experts:
            yield name, tensor


def model_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """The names and shapes that `model_weights` yields, known without the weights."""
    own = named_weights(model) if isinstance(model, Decoder) else hf_weights(model)
    return {
        name: tuple(tensor.shape)
        for name, tensor in own
        if name.rpartition(".")[2] not in LORA_LEAVES
    }


def exported_shapes(model: AnyModel) -> dict[str, tuple[int, ...]]:
    """The names and shapes that `exported_weights` yields, known without the weights."""
    if not isinstance(model.config, DecoderConfig):
        return model_shapes(model)
    pieces = stored_pieces(model_shapes(model), model.config)
    return {stored: pieces_shape(held) for stored, held in pieces.items()}
