"""From `model.source` to a folder or a configuration: presets, the hub, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model
from ingot.config.presets import preset
from ingot.config.work import Model
from ingot.models.folder import model_config


def source_folder(model: Model) -> Path | None:
    """The folder that `model.source` means, fetched from the hub if need be; None for a preset.

    Raises:
        WrongInput: no such folder, preset or hub model.
    """
    scheme, _, rest = model.source.partition(":")
    if scheme == "preset":
        preset(rest)
        return None
    if scheme == "hf":
        return fetch_model(rest, model.revision)
    folder = Path(model.source)
    if not folder.is_dir():
        raise WrongInput(f"model.source {model.source} is neither a folder nor preset:NAME nor hf:ORG/NAME; check the path")
    return folder


def source_config(model: Model, folder: Path | None) -> dict[str, Any]:
    """The Hugging Face configuration of the source, with `model.config` laid over it."""
    config = preset(model.source.partition(":")[2]) if folder is None else model_config(folder)
    unknown = [key for key in model.config if key not in config and key not in ("rope_scaling", "rope_theta", "head_dim")]
    if unknown:
        raise WrongInput(f"model.config: {', '.join(unknown)} is not in the configuration of {model.source}; see its config.json for the names")
    merged = {**config, **model.config}
    if "head_dim" not in model.config and {"hidden_size", "num_attention_heads"} & model.config.keys():
        merged.pop("head_dim", None)
    return merged


def starts_random(model: Model, folder: Path | None) -> bool:
    """Whether training starts from random weights. Raises WrongInput when weights are asked of a preset."""
    if model.init == "weights" and folder is None:
        raise WrongInput(f"model.init weights: {model.source} is a preset and has none; use hf:ORG/NAME or a folder")
    return model.init == "random" or folder is None
