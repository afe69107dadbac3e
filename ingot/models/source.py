"""From `model.source` to a folder or a configuration: presets, the hub, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.hub import fetch_model
from ingot.base.runfolder import RunFolder
from ingot.config.family import overridden
from ingot.config.presets import preset
from ingot.config.work import Model
from ingot.models.folder import CONFIG, model_config


def source_folder(model: Model) -> Path | None:
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


def source_config(model: Model, folder: Path | None) -> dict[str, Any]:
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


def starts_random(model: Model, folder: Path | None) -> bool:
    """Whether training starts from random weights. Raises WrongInput when weights are asked of a
    preset.
    """
    if model.init == "weights" and folder is None:
        raise WrongInput(
            f"model.init weights: {model.source} is a preset and has none; use hf:ORG/NAME or a"
            " folder"
        )
    return model.init == "random" or folder is None
