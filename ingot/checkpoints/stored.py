"""The files of a checkpoint (`.metadata` and `*.distcp` of torch's distributed checkpoint), read
without `torch.distributed.checkpoint`: a training that starts again would wait for its import, most
of a second, before its first step. `writer.py` has torch write them.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.models.parameters import Slices, local_tensor, shard_slices

METADATA = ".metadata"


@dataclass(frozen=True)
class StoredChunk:
    """A block of a tensor, its position in the whole, and where its bytes are."""

    position: Slices
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it was stored: one chunk for each shard."""

    size: torch.Size
    dtype: torch.dtype
    chunks: Sequence[StoredChunk]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name; none is read yet.

    Raises:
        Failed: the index of the checkpoint is not of the form that torch writes.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _Index(file).load()
        places = {
            (index["fqn"], tuple(index["offset"])): place
            for index, place in metadata["storage_data"].items()
        }
        return {
            name: StoredTensor(
                about["size"],
                about["properties"][0],
                [_chunk(chunk, places[name, tuple(chunk["offsets"])]) for chunk in about["chunks"]],
            )
            for name, about in metadata["state_dict_metadata"].items()
        }
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError) as error:
        raise Failed(
            f"{folder / METADATA} is no index of a checkpoint as torch {torch.__version__} writes"
            f" it ({type(error).__name__}: {error}); use the version of ingot that wrote it"
        ) from None


def _chunk(about: _Record, place: _Record) -> StoredChunk:
    if place.get("transform_descriptors"):
        raise ValueError("its files are transformed")
    return StoredChunk(
        tuple(
            slice(first, first + size)
            for first, size in zip(about["offsets"], about["sizes"], strict=True)
        ),
        place["relative_path"],
        place["offset"],
        place["length"],
    )


class _Record:
    """Stands for any class named in the pickled index; keeps only the object's state."""

    def __init__(self, *_: object) -> None:
        self._state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self._state = state

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def get(self, key: str) -> Any:
        return self._state.get(key)


class _Index(pickle.Unpickler):
    """Reads an index without importing the classes that it names, nor calling anything in it."""

    def find_class(self, module: str, name: str, /) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        return found if found is torch.Size or isinstance(found, torch.dtype) else _Record


@dataclass(frozen=True)
class _Copy:
    """A part of a chunk that belongs into a tensor."""

    name: str
    chunk: StoredChunk
    part: Slices
    target: Tensor


@torch.no_grad()
def read_tensors(
    folder: Path, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]
) -> None:
    """Fill this rank's shard of each tensor from the chunks that overlap with it, whatever layout
    stored them. Whole sizes must be equal.

    Raises:
        Failed: chunks leave a part of a tensor out (then nothing is read), or a file holds another
            shape than the index says.
    """
    copies: dict[str, list[_Copy]] = defaultdict(list)
    for name, tensor in tensors.items():
        here, target, found = shard_slices(tensor), local_tensor(tensor), 0
        for chunk in stored[name].chunks:
            common = tuple(map(_overlap, here, chunk.position))
            if (count := math.prod(span.stop - span.start for span in common)) > 0:
                found += count
                copies[chunk.file].append(
                    _Copy(
                        name,
                        chunk,
                        tuple(map(_within, common, chunk.position)),
                        target[tuple(map(_within, common, here))],
                    )
                )
        if found != target.numel():
            raise Failed(
                f"checkpoint {folder} holds {found:,} of the {target.numel():,} values of {name}"
                " that are wanted"
            )
    for file in sorted(copies):
        with (folder / file).open("rb") as stream:
            for copy in sorted(copies[file], key=lambda copy: copy.chunk.offset):
                loaded = _load(stream, copy.chunk, f"{folder / file}, {copy.name}")
                copy.target.copy_(loaded[copy.part])


def _overlap(one: slice, other: slice) -> slice:
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def _within(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _load(stream: io.BufferedReader, chunk: StoredChunk, what: str) -> Tensor:
    """The tensor of a chunk, on the host."""
    section = io.BufferedReader(_Section(stream, chunk.offset, chunk.length))
    tensor: Tensor = torch.load(section, map_location="cpu", weights_only=True)
    size = [span.stop - span.start for span in chunk.position]
    if list(tensor.shape) != size:
        raise Failed(f"{what} is {list(tensor.shape)}, and the checkpoint's index says {size}")
    return tensor


class _Section(io.RawIOBase):
    """A section of a file as a file of its own."""

    def __init__(self, stream: io.BufferedReader, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._length}.get(whence, 0)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._at)]
        self._stream.seek(self._offset + self._at)
        count = self._stream.readinto(wanted)
        self._at += count
        return count
