"""Which library encodes many texts: the fastest whose ids are the reference's own, tried on the
user's documents and on nasty texts.

The ids never depend on the choice. A library that cannot be imported, cannot read this tokenizer or
gives one other id is not taken, and the reason is kept.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.edge_cases import FIXED, edge_case_texts, first_difference
from ingot.tokenizers.tokenizer import Tokenizer

EncodeBatch = Callable[[Sequence[str]], TokenBatch]


@dataclass(frozen=True)
class EncoderLibrary:
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

    def encode_batch(texts: Sequence[str]) -> TokenBatch:
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
# A later library must be this much faster to be taken: it opens more slowly in every worker, and
# noise should not choose between equals.
LEAD = 1.5


class BatchEncoder(Protocol):
    """Something that gives the ids of `Tokenizer.encode_batch`. Not for several threads at once."""

    @property
    def name(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch: ...


@dataclass(frozen=True)
class EncoderChoice:
    """The encoder to take, and for each that was tried why it was taken or not."""

    name: str
    tried: list[tuple[str, str]]
    """(library with its version, reason)"""
    speeds: dict[str, float]
    """MB of the sample per CPU second, of the reference and of every exact library."""


@dataclass(frozen=True)
class _LibraryEncoder:
    name: str
    fast: EncodeBatch
    tokenizer: Tokenizer

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        """A batch that the library fails on, as a text far outside what it was made for may make
        it, goes to the reference.
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
    """The encoder that `choose_encoder` named, on this machine: one thread, in any process.

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
    """Try each library against the reference on `sample`, the first 2 MB of it, and on the nasty
    texts of this tokenizer.
    """
    texts = _bounded(sample)
    # What is timed is new to the library, as all of a corpus is, but not its first text.
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
    """The library on a tokenizer.json, or why not."""
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
        return f"does not support this tokenizer ({_one_line(error)})"


def _measure(fast: EncodeBatch, trials: Sequence[tuple[Sequence[str], TokenBatch]]) -> float | str:
    """MB per CPU second of the last trial; or the first difference from the wanted ids in words."""
    speed = 0.0
    for texts, wanted in trials:
        began = time.process_time()
        try:
            found = fast(texts)
        except BaseException as error:
            if not _is_library_error(error):
                raise
            return f"fails on the texts it was tried on ({_one_line(error)})"
        speed = _megabytes(texts) / max(time.process_time() - began, 1e-9)
        if trouble := first_difference(texts, wanted, found):
            return trouble
    return speed


def _bounded(sample: Sequence[str]) -> list[str]:
    """The texts up to `SAMPLE_BYTES`; of a longer one its beginning, since the reference would take
    minutes over a book.
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
    """A panic inside a library written in Rust arrives as a BaseException of its own kind."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]
