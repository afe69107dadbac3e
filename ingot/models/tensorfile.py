"""A safetensors file written a tensor at a time, so that a model need not be in memory as a whole:
the format's own library wants them all at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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
"""The format's name of each type."""


class Form(NamedTuple):
    """What is known of a tensor before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    file: Path, forms: Mapping[str, Form], tensors: Iterator[tuple[str, Tensor]]
) -> None:
    """Write the tensors that `forms` tells of, taken from `tensors` in the same order and turned
    into their types.

    Types of more bytes must come before smaller ones, so that each tensor lies where its type may.
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
