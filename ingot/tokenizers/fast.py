"""The fast libraries, each opened so that one call uses one thread and gives flat arrays. Whether
their ids are right is not known here.

Worker processes are the parallelism, so a library that starts threads of its own would only take
them from its neighbours.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.tokenizers.batches import Batch

EncodeBatch = Callable[[Sequence[str]], Batch]


@dataclass(frozen=True)
class Library:
    """A fast library. `open` takes a tokenizer.json without special tokens, and raises whatever the
    library raises.
    """

    package: str
    open: Callable[[str], EncodeBatch]

    @property
    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def name(self) -> str:
        """The library with its version, by which it is chosen and opened again."""
        return f"{self.package} {self.version}"


def _open_gigatoken(text: str) -> EncodeBatch:
    from gigatoken.gigatoken_rs import load_hf_json

    tokenizer = load_hf_json(text)

    def encode_batch(texts: Sequence[str]) -> Batch:
        # An awkward array is two flat ones, of which nothing is copied.
        layout: Any = tokenizer.encode_batch(list(texts), parallel=False).layout
        return np.asarray(layout.content.data).view(np.int32), np.asarray(
            layout.offsets.data
        ).astype(np.int64, copy=False)

    return encode_batch


def _open_fastokens(text: str) -> EncodeBatch:
    # Read by the library at its first batch. Its cache of whole texts is of no use where each
    # document comes once.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    os.environ.setdefault("FASTOKENS_INPUT_CACHE", "0")
    from fastokens import Tokenizer

    tokenizer = Tokenizer.from_json_str(text)

    def encode_batch(texts: Sequence[str]) -> Batch:
        flat, offsets = tokenizer.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=True
        )
        return np.frombuffer(flat, np.dtype("<i4")), np.frombuffer(offsets, np.dtype("<i8"))

    return encode_batch


LIBRARIES = (Library("gigatoken", _open_gigatoken), Library("fastokens", _open_fastokens))
