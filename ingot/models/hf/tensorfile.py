"""Writes a safetensors file one tensor at a time, so that a model need not be in memory as a whole:
the format's own library needs all tensors at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ingot.config.models.weights import INDEX
from ingot.models.hf.content import digest

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name of each dtype."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: Path, forms: Mapping[str, TensorSpec], tensors: Iterator[tuple[str, Tensor]]
) -> dict[str, str]:
    """Write the tensors described by `forms`, taken from `tensors` in the same order and converted
    to their dtypes; returns their hashes by name.

    Dtypes with larger items must come before smaller ones, so that each tensor is aligned.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in forms.items():
        if end % form.dtype.itemsize:
            raise ValueError(f"{name}, {form.dtype}, would lie at byte {end} of {file}")
        header[name] = {
            "dtype": TYPES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [end, end := end + form.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests: dict[str, str] = {}
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for wanted, form in forms.items():
            name, tensor = next(tensors)
            if (name, tuple(tensor.shape)) != (wanted, form.shape):
                raise ValueError(
                    f"{name} {list(tensor.shape)} came where {wanted} {list(form.shape)} was told"
                )
            flat = tensor.detach().to("cpu", form.dtype).contiguous().reshape(-1)
            stream.write(flat.view(torch.uint8).numpy().data)
            digests[name] = digest(flat)
    return digests


SHARD_BYTES = 5_000_000_000


def save_weights(
    tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write tensors unchanged in Hugging Face's layout: one file, or numbered shards with an
    index.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    forms = {
        name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in ordered.items()
    }
    return list(stream_weights(forms, ordered.items(), folder, shard_bytes))


def stream_weights(
    forms: Mapping[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> dict[Path, dict[str, str]]:
    """The same for an iterator of tensors, in the order of `forms`, which describes them in
    advance; one tensor is held at a time. Returns each file with the hashes of its tensors.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, form in forms.items():
        if shards[-1] and filled + form.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = form
        filled += form.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    coming = iter(tensors)
    written = {
        folder / name: write_tensors(folder / name, shard, coming)
        for name, shard in zip(names, shards, strict=True)
    }
    if len(shards) > 1:
        weight_map = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        total = sum(form.nbytes for form in forms.values())
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        )
    return written
