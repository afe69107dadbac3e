"""Chooses the library that encodes many texts: the fastest one whose ids equal the reference's on
the user's documents and on edge-case texts.

The ids never depend on the choice. A library that cannot be imported, cannot read this tokenizer or
gives one different id is rejected, and the reason is reported. Each library uses one thread: worker
processes are the parallelism.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.base.errors import WrongInput, one_line
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.edge_cases import FIXED, edge_case_texts, first_difference
from ingot.tokenizers.tokenizer import Tokenizer

EncodeBatch = Callable[[Sequence[str]], TokenBatch]


@dataclass(frozen=True)
class EncoderLibrary:
    """A fast encoding library. `open` takes a tokenizer.json without special tokens, and raises
    whatever the library raises.
    """

    package: str
    open: Callable[[str], EncodeBatch]

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def name(self) -> str:
        """The library with its version, by which the choice is recorded and opened again."""
        return f"{self.package} {self.version}"


def _open_gigatoken(text: str) -> EncodeBatch:
    from gigatoken.gigatoken_rs import load_hf_json

    tokenizer = load_hf_json(text)

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        # An awkward array consists of two flat arrays, which are used without a copy.
        layout: Any = tokenizer.encode_batch(list(texts), parallel=False).layout
        return np.asarray(layout.content.data).view(np.int32), np.asarray(
            layout.offsets.data
        ).astype(np.int64, copy=False)

    return encode_batch


def _open_fastokens(text: str) -> EncodeBatch:
    # The library reads these at its first batch. Its cache of whole texts is useless where each
    # document is encoded once.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    os.environ.setdefault("FASTOKENS_INPUT_CACHE", "0")
    from fastokens import Tokenizer

    tokenizer = Tokenizer.from_json_str(text)

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
        flat, offsets = tokenizer.encode_batch_flat(
            list(texts), add_special_tokens=False, split_special_tokens=True
        )
        return np.frombuffer(flat, np.dtype("<i4")), np.frombuffer(offsets, np.dtype("<i8"))

    return encode_batch


LIBRARIES = (
    EncoderLibrary("gigatoken", _open_gigatoken),
    EncoderLibrary("fastokens", _open_fastokens),
)


REFERENCE = "reference"
SAMPLE_BYTES = 2_000_000
LONGEST = 200_000
# A further library must be this much faster to be chosen, so that noise does not decide between
# equals.
LEAD = 1.5


class BatchEncoder(Protocol):
    """Encodes batches exactly as `Tokenizer.encode_batch`. Not thread-safe."""

    @property
    def name(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch: ...


@dataclass(frozen=True)
class EncoderChoice:
    """The chosen encoder, and for each library that was tried why it was chosen or not."""

    name: str
    tried: list[tuple[str, str]]
    """(library with its version, reason)"""
    speeds: dict[str, float]
    """MB of the sample per CPU second, for the reference and every exact library."""


@dataclass(frozen=True)
class _LibraryEncoder:
    name: str
    fast: EncodeBatch
    tokenizer: Tokenizer

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """Encode with the library; a batch on which it fails, for example for an extreme text, is
        encoded by the reference.
        """
        try:
            return self.fast(texts)
        except BaseException as error:
            if not _is_library_error(error):
                raise
            return self.tokenizer.encode_batch(texts)


@dataclass(frozen=True)
class _ReferenceEncoder:
    tokenizer: Tokenizer
    name: str = REFERENCE

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return self.tokenizer.encode_batch(texts)


def open_encoder(tokenizer: Tokenizer, name: str) -> BatchEncoder:
    """Open the encoder that `choose_encoder` named, in any process of this machine; it uses one
    thread.

    Raises:
        WrongInput: the library is not installed here in that version, or cannot read this
            tokenizer.
    """
    if name == REFERENCE:
        return _ReferenceEncoder(tokenizer)
    package, _, version = name.partition(" ")
    library = next((library for library in LIBRARIES if library.package == package), None)
    if library is None:
        raise WrongInput(
            f"there is no encoder {name!r}; take {REFERENCE!r} or one of"
            f" {', '.join(library.package for library in LIBRARIES)}"
        )
    if library.version != version:
        here = f"version {library.version} is" if library.version else "it is not"
        raise WrongInput(
            f"the encoder {name} was chosen and {here} installed here; pip install"
            f" {package}=={version}, or set tokenizer.encoder=reference"
        )
    opened = _open(library, tokenizer.plain_json(), tokenizer.library)
    if isinstance(opened, str):
        raise WrongInput(
            f"the encoder {name} was chosen and fails here: {opened}; set"
            " tokenizer.encoder=reference"
        )
    return _LibraryEncoder(name, opened, tokenizer)


def choose_encoder(
    tokenizer: Tokenizer, sample: Sequence[str], libraries: Sequence[EncoderLibrary] = LIBRARIES
) -> EncoderChoice:
    """Compare each library with the reference on the first 2 MB of `sample` and on the edge-case
    texts of this tokenizer.
    """
    texts = _bounded(sample)
    # The timed half is new to the library, like the documents of a corpus, but not the first that
    # it sees.
    parts = (texts[::2], texts[1::2]) if len(texts) > 1 else (list(FIXED), texts or list(FIXED))
    trials = [
        (part, tokenizer.encode_batch(part))
        for part in (edge_case_texts(tokenizer.special_texts), parts[0])
    ]
    began = time.process_time()
    trials.append((parts[1], tokenizer.encode_batch(parts[1])))
    speeds = {REFERENCE: _megabytes(parts[1]) / max(time.process_time() - began, 1e-9)}
    best, reasons, text = REFERENCE, list[tuple[str, str]](), tokenizer.plain_json()
    for library in libraries:
        opened = _open(library, text, tokenizer.library)
        found = opened if isinstance(opened, str) else _measure(opened, trials)
        if isinstance(found, str):
            reasons.append((library.package if library.version is None else library.name, found))
            continue
        speeds[library.name] = found
        if found > speeds[best] * (1.0 if best == REFERENCE else LEAD):
            best = library.name
        reasons.append((library.name, f"the same ids at {found:,.0f} MB per CPU second"))
    tried = [(name, _verdict(name, why, best, speeds)) for name, why in reasons]
    tried.append(
        (
            REFERENCE,
            _verdict(
                REFERENCE,
                f"{tokenizer.library}, {speeds[REFERENCE]:,.1f} MB per CPU second",
                best,
                speeds,
            ),
        )
    )
    return EncoderChoice(best, tried, speeds)


def _verdict(name: str, why: str, best: str, speeds: dict[str, float]) -> str:
    if name == best:
        return f"taken: {why}"
    return f"not taken: {why}" + (f"; {best} has {speeds[best]:,.0f}" if name in speeds else "")


def _open(library: EncoderLibrary, text: str | None, reference: str) -> EncodeBatch | str:
    """The library opened on a tokenizer.json, or the reason why it cannot be."""
    if library.version is None:
        return f"not installed; pip install {library.package}"
    if text is None:
        return (
            f"no tokenizer.json says exactly what {reference} does, and the library reads nothing"
            " else"
        )
    try:
        return library.open(text)
    except BaseException as error:
        if not _is_library_error(error):
            raise
        return f"does not support this tokenizer ({one_line(error, 160, kind=True)})"


def _measure(fast: EncodeBatch, trials: Sequence[tuple[Sequence[str], TokenBatch]]) -> float | str:
    """MB per CPU second of the last trial; or a description of the first difference from the
    expected ids.
    """
    speed = 0.0
    for texts, wanted in trials:
        began = time.process_time()
        try:
            found = fast(texts)
        except BaseException as error:
            if not _is_library_error(error):
                raise
            return f"fails on the texts it was tried on ({one_line(error, 160, kind=True)})"
        speed = _megabytes(texts) / max(time.process_time() - began, 1e-9)
        if trouble := first_difference(texts, wanted, found):
            return trouble
    return speed


def _bounded(sample: Sequence[str]) -> list[str]:
    """The texts up to `SAMPLE_BYTES` in all; of a long text only its beginning, since the reference
    would take minutes for a book.
    """
    texts, size = list[str](), 0
    for text in sample:
        texts.append(text[:LONGEST])
        size += len(texts[-1].encode())
        if size >= SAMPLE_BYTES:
            break
    return texts


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def _is_library_error(error: BaseException) -> bool:
    """Whether the library itself failed: a panic inside Rust code arrives as a BaseException of its
    own kind.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
