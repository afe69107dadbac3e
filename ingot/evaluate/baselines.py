"""Baselines in bits per byte on the same held-out documents: general compressors and a bigram of
the same tokens.
"""

from __future__ import annotations

import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from ingot.base.errors import WrongInput
from ingot.base.progress import Progress
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import Baseline
from ingot.config.sections.measured import CompressorName, compressors_of, why_not_compressed
from ingot.data.cleaning.documents import read_documents
from ingot.data.columns.column import Column
from ingot.data.columns.manifest import PreparedData
from ingot.data.raw.store import open_raw
from ingot.evaluate.bigram import bigram_nll
from ingot.evaluate.corpus import document_bytes, open_columns, pairs
from ingot.tokenizers.load import load_tokenizer


class _Compressor(Protocol):
    """What the compressors of zlib and lzma have in common."""

    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


_COMPRESSORS: dict[CompressorName, tuple[str, Callable[[], _Compressor]]] = {
    "gzip": ("gzip -9", lambda: zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)),
    "xz": ("xz -9", lambda: lzma.LZMACompressor(lzma.FORMAT_XZ, preset=9)),
}


def compressed_bytes(
    texts: Iterable[str], names: Sequence[CompressorName]
) -> tuple[int, dict[str, int]]:
    """The bytes of all texts, and their size compressed as one stream by `gzip -9` and `xz -9`.

    One pass, so that memory does not grow with the texts. The containers count too, as they do for
    files: 18 bytes for gzip, about 60 for xz.
    """
    running = {_COMPRESSORS[name][0]: _COMPRESSORS[name][1]() for name in names}
    total, compressed = 0, dict.fromkeys(running, 0)
    for text in texts:
        data = text.encode()
        total += len(data)
        for name, compressor in running.items():
            compressed[name] += len(compressor.compress(data))
    for name, compressor in running.items():
        compressed[name] += len(compressor.flush())
    return total, compressed


Item = TypeVar("Item")


def check_baselines(recipe: Recipe, names: Sequence[Baseline]) -> None:
    """Raises WrongInput when the baselines `names` need documents that are missing, or do not apply
    to this objective. Reads no document.
    """
    if names and recipe.documents != "text":
        raise WrongInput(
            f"evaluate.tasks: the baselines {', '.join(names)} are for objective.kind pretrain, or"
            f" distill on texts; remove them for {recipe.objective.kind}"
        )
    if problem := why_not_compressed(names, recipe.data.held_out_columns):
        raise WrongInput(problem)
    if compressors_of(names):
        open_raw(recipe)


def baselines(
    recipe: Recipe, prepared: PreparedData, names: Sequence[Baseline]
) -> dict[str, float]:
    """Bits per byte under `gzip -9`, `xz -9` and `bigram`, for those of `names`.

    Compressors read the held-out documents one after the other. The bigram is counted on the
    training split and scored on the same tokens as the model, ends of documents included; pairs
    never cross documents, and the bytes are those of the tokens that are scored.

    Raises:
        WrongInput: the raw documents are missing, or are no longer those that were prepared.
    """
    found: dict[str, float] = {}
    total = prepared.total("validation", "bytes")
    if programs := compressors_of(names):
        size, compressed = _compressed(recipe, programs, total)
        if size != total:
            raise WrongInput(
                f"{recipe.folder.raw} has {size:,} held-out bytes, {total:,} were prepared; run"
                " `ingot prepare --again`"
            )
        found.update({name: 8 * made / total for name, made in compressed.items()})
    if "bigram" in names:
        folder = recipe.folder.columns
        training = open_columns(folder, prepared, "train")
        held_out = open_columns(folder, prepared, "validation")
        tokenizer = load_tokenizer(recipe.folder.tokenizer)
        scored = float(document_bytes(held_out, tokenizer, total).sum())
        if scored:
            nats = _bigram(training, held_out, prepared.vocab_size)
            found["bigram"] = nats / math.log(2) / scored
    return found


def _compressed(
    recipe: Recipe, names: Sequence[CompressorName], total: int
) -> tuple[int, dict[str, int]]:
    texts = (document.text for document in read_documents(recipe, "validation"))
    with Progress(" and ".join(names), total // 10**6, "MB") as progress:
        return compressed_bytes(
            _with_progress(texts, progress, lambda text: len(text), 10**6), names
        )


def _bigram(training: Sequence[Column], held_out: Sequence[Column], vocab_size: int) -> float:
    with Progress("bigram", None, "tokens") as progress:
        return bigram_nll(
            lambda: _with_progress(pairs(training), progress, lambda pair: len(pair[0]), 1),
            pairs(held_out),
            vocab_size,
        )


def _with_progress(
    items: Iterable[Item], progress: Progress, size: Callable[[Item], int], unit: int
) -> Iterator[Item]:
    """The items, with the progress updated after each."""
    done = 0
    for item in items:
        yield item
        done += size(item)
        progress.update(done // unit)
