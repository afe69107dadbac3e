"""The weight files of a Hugging Face model folder, and the hash of a model by them. Reads bytes,
never tensors, and does not import torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import sha256_file
from ingot.config.models.lineage import model_again, read_lineage
from ingot.config.models.source import model_config

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PART = re.compile(r"model-\d+-of-\d+\.safetensors")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, according to its index if there is one; without it the one
    file of all weights, else those that are numbered as parts. Others beside them are not read, as
    by transformers.
    """
    if (named := indexed(folder)) is not None:
        files = [folder / name for name in sorted(set(named.values()))]
    elif (folder / WHOLE).exists():
        files = [folder / WHOLE]
    else:
        files = sorted(
            file for file in folder.glob("model-*.safetensors") if _PART.fullmatch(file.name)
        )
    if not files:
        pickled = " (pickled weights are not read)" if list(folder.glob("*.bin")) else ""
        raise WrongInput(
            f"{folder} has no {WHOLE} or parts of it{pickled}; give a folder with safetensors"
            " weights"
        )
    if missing := [file.name for file in files if not file.exists()]:
        raise WrongInput(
            f"{folder}: {', '.join(missing)} missing, though {INDEX} names"
            f" {'it' if len(missing) == 1 else 'them'}; {model_again(folder)}"
        )
    return files


def indexed(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by a folder's index; None if it has none."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        named = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in named.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise WrongInput(
            f"{index} is not an index of safetensors files; {model_again(folder)}"
        ) from None


def model_hash(folder: Path) -> str:
    """Hash of a model folder's weights and configuration: from its `ingot.json`, else computed from
    the files.
    """
    lineage = read_lineage(folder)
    if lineage is not None and "model_hash" in lineage:
        return str(lineage["model_hash"])
    return hash_model(folder)


def hash_model(folder: Path) -> str:
    """Compute the hash of a model folder; reads every byte of the weights."""
    return fingerprint(
        {
            "config": model_config(folder),
            "weights": {file.name: sha256_file(file) for file in weight_files(folder)},
        }
    )
