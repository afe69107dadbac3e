"""Reading and writing Hugging Face model folders. Missing or surplus tensors, and those of another
shape, are all named, and then nothing is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.storage import sha256_file
from ingot.config.family import overridden
from ingot.config.model_content import read_lineage
from ingot.config.model_source import CONFIG, model_config
from ingot.models.hf.content import ALL, Share, compared, content_check
from ingot.models.hf.tensor_names import EMBEDDING, HEAD, describe_mismatches
from ingot.models.hf.tensorfile import INDEX
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.parameters import Slices, allocate, local_tensor, shard_slices


def load_model(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Decoder:
    """The decoder in `folder`, in `dtype` (None: float32), in evaluation mode. `check` False
    accepts changes since the export.

    Raises:
        WrongInput: not a model folder, an unsupported architecture, damaged files, tensors that do
            not fit, or, with `check`, that differ from those of the export.
    """
    config = DecoderConfig.from_hf(
        overridden(model_config(folder), overrides or {}), str(folder / CONFIG)
    )
    with torch.device("meta"):
        model = Decoder(config).to(dtype or torch.float32)
    allocate(model, device)
    load_weights(model, folder, ALL if check else None)
    return model.eval()


@torch.no_grad()
def load_weights(model: Decoder, folder: Path, share: Share | None = ALL) -> None:
    """Load the parameters of a model from `folder`, one tensor at a time; of sharded parameters
    only this rank's shard is read. `share`: the tensors compared with the record of the export;
    those are read completely.

    Raises:
        WrongInput: tensors that do not fit, or that differ from those of the export.
    """
    with torch.device("meta"):
        whole = {
            name: tuple(parameter.shape)
            for name, parameter in Decoder(model.config).named_parameters()
        }
    tied = model.config.tie_word_embeddings
    _check_names(whole, stored_shapes(folder), folder, tied=tied)
    places = {name: parameter for name, parameter in model.named_parameters() if name in whole}
    twin: Tensor | None = None
    check = None if share is None else content_check(folder, share)
    for file in weight_files(folder):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
                stored = reader.get_slice(name)
                if check is not None and check.wants(name):
                    stored = reader.get_tensor(name)
                    check.compare(file, name, stored)
                place = places.get(EMBEDDING if tied and name == HEAD else name)
                if place is None:
                    continue
                part = _part(stored, shard_slices(place))
                if not part.is_floating_point():
                    raise WrongInput(
                        f"{folder}: {name} holds {str(part.dtype).removeprefix('torch.')}, not"
                        " weights as they are; give an unquantized model"
                    )
                if name in places:
                    local_tensor(place).copy_(part)
                else:
                    twin = part
    if check is not None:
        check.finish()
    if twin is not None and not torch.equal(
        twin.to(places[EMBEDDING].dtype), local_tensor(places[EMBEDDING]).cpu()
    ):
        raise WrongInput(
            f"{folder}: {CONFIG} ties {HEAD} to {EMBEDDING}, but the two differ; set"
            " tie_word_embeddings to false"
        )


def _part(stored: Any, wanted: Slices) -> Tensor:
    """A slice of a stored tensor. A slice may be empty, as the last ranks have of a short tensor;
    such a one is not requested from the file.
    """
    part: Tensor = stored[
        tuple(slice(0, 1) if side.start == side.stop else side for side in wanted)
    ]
    return part[tuple(slice(0, 0) if side.start == side.stop else slice(None) for side in wanted)]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, according to its index if there is one."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise WrongInput(
                f"{index} is not an index of safetensors files; fetch the model again"
            ) from None
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        pickled = " (pickled weights are not read)" if list(folder.glob("*.bin")) else ""
        raise WrongInput(
            f"{folder} has no model*.safetensors{pickled}; give a folder with safetensors weights"
        )
    if missing := [file.name for file in files if not file.exists()]:
        raise WrongInput(
            f"{folder}: {', '.join(missing)} missing, though {INDEX} names"
            f" {'it' if len(missing) == 1 else 'them'}; fetch the model again"
        )
    return files


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes, read from the file headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with _opened(file) as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader is not a mapping)
                shapes[name] = tuple(reader.get_slice(name).get_shape())
    return shapes


def named_tensors(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors, in that order, one at a time; raises WrongInput after the last one if any
    differs from the export's.
    """
    holding: dict[str, tuple[Path, Any]] = {}
    for file in weight_files(folder):
        reader = _opened(file)
        holding |= dict.fromkeys(reader.keys(), (file, reader))
    found = ((holding[name][0], name, holding[name][1].get_tensor(name)) for name in names)
    yield from compared(content_check(folder), found)


def stored_tensors(folder: Path, *, check: bool = True) -> Iterator[tuple[str, Tensor]]:
    """All tensors, memory-mapped, one at a time. With `check`, compared with the record of the
    export: raises WrongInput after the last one if any differs.
    """
    found = (
        (file, name, reader.get_tensor(name))
        for file in weight_files(folder)
        for reader in [_opened(file)]
        for name in reader.keys()  # noqa: SIM118
    )
    if check:
        yield from compared(content_check(folder), found)
    else:
        yield from ((name, tensor) for _, name, tensor in found)


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except SafetensorError as error:
        raise WrongInput(
            f"{file} is torn or not safetensors ({error}); fetch the model again"
        ) from None


def _check_names(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    folder: Path,
    *,
    tied: bool,
) -> None:
    """Raise an error that names every difference. Older exports contain rotary frequencies (buffers
    computed here) and a copy of a tied head.
    """
    passed_over = {
        name for name in found if name.endswith("rotary_emb.inv_freq") or (tied and name == HEAD)
    }
    if trouble := describe_mismatches(wanted, found, passed_over):
        raise WrongInput(
            f"{folder}: weights do not fit {CONFIG}: {trouble}; check model.source and model.config"
        )


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


def check_template(folder: Path, template: str | None, knob: str) -> None:
    """Refuse a model folder whose chat template is not the one that the model was trained with.

    `template` is the identity of the folder's present template. Folders not written by ingot have
    no record of it and are accepted.

    Raises:
        WrongInput: they differ; `knob` allows it.
    """
    lineage = read_lineage(folder) or {}
    if lineage.get("template", template) != template:
        raise WrongInput(
            f"the chat template in {folder} ({template or 'none'}) is not the one that the model"
            f" was trained with ({lineage['template'] or 'none'}), so chats would be written in a"
            f" form that it never saw; put the old one back, or set {knob}=true"
        )
