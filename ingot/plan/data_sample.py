"""How long documents are beside the rows of a recipe, what is cut away or padded, and how many rows
there are: from prepared columns where they exist, else from a sample of the sources, tokenised and
packed by the same code. Imports no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.markers import read_marker
from ingot.config.recipe import Recipe
from ingot.config.sections.data import ValidationShare
from ingot.config.sections.objective import CHAT_TEMPLATED, PLAIN
from ingot.data.batches.rows import open_rows
from ingot.data.columns.column import Column, ColumnWriter, column_prefix, token_dtype
from ingot.data.columns.manifest import MASK, column_dtype, is_mask, prefix_of, prepared_for
from ingot.data.documents.kinds import plain_text
from ingot.data.packing.planning import (
    PackingCounts,
    PackStage,
    SingleRecordStage,
    column_limits,
    longest_piece,
    piece_stage,
)
from ingot.data.packing.tables import ONE_PER_ROW, read_packed
from ingot.data.raw.store import MANIFEST as RAW_MANIFEST
from ingot.data.sample import TextSample, sample_sources
from ingot.data.tokenizing.encode import TokenRecords, encode_records
from ingot.data.tokenizing.vocabulary import learn_tokenizer
from ingot.plan.ranges import Range
from ingot.plan.unknown import Estimate, Unknown
from ingot.tokenizers.chats.templates import for_recipe
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

MOST_DOCUMENTS, MOST_BYTES = 256, 1_000_000
"""Of a sample: enough for percentiles, and a second of tokenising."""
QUICK = 5
"""Where a glance is enough, it is so much smaller."""
MEASURED_PARTS = 64
MASK_BLOCK = 128
"""Tokens in a block of flex attention's mask."""
PACKED_TEXT = Range(1.0, 2.5, 5.0, "guessed")
"""Bytes of text in a byte of a compressed file."""
PLAIN_TEXT = Range(0.6, 0.9, 1.0, "guessed")
"""The same of a file that is not compressed: the rest is keys, quotes and other columns."""
RAW_BYTES = Range(0.2, 0.4, 1.0, "guessed")
"""Bytes of Parquet in which a byte of text is ingested."""
OWN_TOKENIZER = Range(0.85, 1.0, 1.15)
"""Tokens of a tokenizer that is not trained yet, beside those of one that a sample trained."""
ENOUGH_BYTES, MOST_TOKENS = 50, 1.5
"""Of less text for each token of the vocabulary, the sample's tokenizer knows that text too well:
all documents may be so many times as many tokens.
"""
Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ColumnLengths:
    """Tokens of a document in one column, and what of them is beyond the row's `limit`: the share
    of documents, and of all tokens.
    """

    limit: int
    mean: float
    low: float
    median: float
    high: float
    longest: int
    longer: float
    beyond: float
    attended: float
    """Of what causal attention over full rows computes, the share that lies within documents, in
    the blocks of a mask by which a GPU skips the rest.
    """

    @classmethod
    def of(cls, lengths: Lengths, limit: int, *, cut: bool = False) -> ColumnLengths:
        low, median, high = np.percentile(lengths, (10, 50, 90)).tolist()
        over = np.maximum(lengths - limit, 0).sum()
        return cls(
            limit,
            float(lengths.mean()),
            low,
            median,
            high,
            int(lengths.max()),
            float((lengths > limit).mean()),
            float(over / max(1, lengths.sum())),
            _attended(lengths, limit, cut=cut),
        )


def _attended(lengths: Lengths, limit: int, *, cut: bool) -> float:
    """All blocks on the diagonal are computed. Beside it, a document that touches k blocks in a row
    adds k (k - 1) / 2; it touches one more than the borders that it crosses, as many as its length
    in blocks, rounded up or down. In a stream that is `cut` into rows of n blocks, two blocks at a
    distance d lie in the same row with probability 1 - d / n.
    """
    block = min(MASK_BLOCK, limit)
    blocks = limit / block

    def beside(touched: npt.NDArray[Any]) -> npt.NDArray[Any]:
        within: npt.NDArray[Any] = touched * (touched - 1) / 2
        if not cut:
            return within
        split = within - touched * (touched**2 - 1) / (6 * blocks)
        longer = touched * (blocks - 1) / 2 - (blocks**2 - 1) / 6
        return np.asarray(np.where(touched < blocks, split, longer))

    # Where rows hold whole documents, longer ones fill rows, and their rest lies in another one.
    whole, rest = (0, lengths) if cut else np.divmod(lengths, limit)
    few, more = np.divmod(rest / block, 1.0)
    added = (1 - more) * beside(few + 1) + more * beside(few + 2)
    row = blocks * (blocks + 1) / 2
    computed = float(np.sum(whole) * row + rest.sum() / block + added.sum())
    return min(1.0, computed / (max(1.0, float(lengths.sum()) / limit) * row))


@dataclass(frozen=True)
class LengthSample:
    """What the training documents of a recipe look like as rows."""

    about: str
    """Which documents were looked at."""
    documents: int
    columns: Mapping[str, ColumnLengths]
    truncated: float
    """Share of the documents that are cut, at the side that `data.truncate` names."""
    left_out: float
    """Share of the documents without anything that is trained, in all or in what remains."""
    lost_targets: float | None
    """Share of the trained tokens that are cut away; None if it was not counted. Texts lose none:
    what is too long goes on in another row.
    """
    padding: float
    """Share of the positions that is padding."""
    rows: Range | None
    """Training rows of the whole recipe; None if that cannot be known yet."""
    tokens: Range | None
    """Tokens of all training documents."""
    text_bytes: Range | None
    """Bytes of the texts of all documents of the training sources, those that are held out or not
    trained on included; once they are prepared, of what is written in the training documents.
    """
    vocab_size: int
    unreadable: float = 0.0
    """Share of the records that cannot be read, which ingesting leaves out."""
    why_unreadable: str = ""
    whole: bool = False
    """Whether these are all documents of the sources, none held out yet."""


def look_at_data(recipe: Recipe, *, quick: bool = False) -> LengthSample:
    """The prepared columns of a recipe, or else a sample of its sources; a small one if `quick`.

    Raises:
        WrongInput: neither can be read here, or not with this tokenizer.
        Failed: the hub, which has the tokenizer, cannot be reached.
    """
    if read_marker(recipe.folder.columns, "manifest.json") is not None:
        return _prepared(recipe)
    return _sampled(recipe, QUICK if quick else 1)


def _prepared(recipe: Recipe) -> LengthSample:
    prepared, folder, data = prepared_for(recipe), recipe.folder.columns, recipe.data
    is_pair = recipe.documents == "pair"
    target_len = data.target_len if is_pair else None
    limits = column_limits(prepared.documents, data.seq_len, target_len)
    parts = [part.number for source in prepared.splits["train"] for part in source.parts]
    measured = parts[:: max(1, len(parts) // MEASURED_PARTS)]
    columns = {
        name: ColumnLengths.of(
            np.concatenate([_lengths(folder, name, number) for number in measured]),
            limit,
            cut=recipe.pack == "cut",
        )
        for name, limit in limits.items()
    }
    documents, records, tokens = (
        prepared.total("train", what) for what in ("documents", "records", "tokens")
    )
    counts, padding = PackingCounts(), 0.0
    if recipe.pack != "cut":
        packed = read_packed(folder, prepared, data.seq_len, recipe.row_plan, target_len)
        counts, padding = packed.counts["train"], packed.padding
    rows = open_rows(
        folder,
        "train",
        data.seq_len,
        pad_last=False,
        pack=recipe.row_plan,
        weights=[source.weight for source in data.train],
        target_len=data.target_len,
        by_part=data.window is not None,
    )
    if prepared.documents in ONE_PER_ROW:
        padding = _alone(columns)
    if prepared.documents == "masked":
        longest = longest_piece(data.seq_len, prepared.framing, recipe.row_plan)
        padding = _of_pieces(counts, longest, prepared.framing)
    return LengthSample(
        f"all {documents:,} prepared documents",
        documents,
        columns,
        counts.truncated / max(1, records),
        (counts.lost + counts.too_long + counts.untrained) / max(1, records),
        None,
        padding,
        Range.exactly(len(rows), "measured"),
        Range.exactly(tokens, "measured"),
        Range.exactly(float(prepared.total("train", "bytes")), "measured"),
        prepared.vocab_size,
    )


def _lengths(folder: Path, name: str, number: int) -> Lengths:
    column = Column(column_prefix(folder, "train", name, number))
    return column.lengths(0, len(column)).astype(np.int64)


def _sampled(recipe: Recipe, smaller: int) -> LengthSample:
    sample = sample_sources(recipe, MOST_DOCUMENTS // smaller, MOST_BYTES // smaller)
    if not sample.texts:
        why = f"of its first records {sample.why_bad}" if sample.bad else "they are empty"
        raise WrongInput(f"the sources of data.train hold no document that can be read: {why}")
    tokenizer, is_own = _tokenizer(recipe, sample.texts)
    encode, whole = tokenizer.encode_batch, recipe.objective.samples_answers
    records = encode_records(
        recipe.documents, tokenizer, encode, sample.texts, prefix_of(recipe), whole=whole
    )
    data, count = recipe.data, len(sample.texts)
    target_len = data.target_len if recipe.documents == "pair" else None
    limits = column_limits(recipe.documents, data.seq_len, target_len)
    columns = {
        name: ColumnLengths.of(records.lengths[name], limit, cut=recipe.pack == "cut")
        for name, limit in limits.items()
    }
    counts, padding = _packed(recipe, records, tokenizer, target_len, columns)
    text = _text_bytes(recipe, sample)
    size = sum(len(one.encode()) for one in sample.texts)
    uncertain = 1.0 if is_own else _own_tokens(recipe, tokenizer, size, whole=sample.whole)
    kept = _trained_share(recipe)
    tokens = None if text is None else text * (kept * records.tokens / size) * uncertain
    # Of a stream that is cut, a sample may hold less than a row.
    each = counts.rows / max(1, records.tokens) if recipe.pack != "cut" else 1 / data.seq_len
    rows = None if tokens is None else tokens * each
    files = f"{sample.files:,} {'file' if sample.files == 1 else 'files'}"
    spread = "" if sample.whole else f" of {files}"
    about = f"{'all' if sample.whole else 'a sample of'} {count:,} documents{spread}"
    trained_here = "" if is_own else ", with a tokenizer trained on them alone"
    return LengthSample(
        about + trained_here,
        count,
        columns,
        counts.truncated / int(records.counts.sum()),
        (counts.lost + counts.too_long + counts.untrained) / int(records.counts.sum()),
        0.0 if recipe.documents in PLAIN else _lost_targets(recipe, records, limits),
        padding,
        rows,
        tokens,
        text,
        tokenizer.vocab_size if is_own else recipe.tokenizer.vocab_size,
        sample.bad.total() / (sample.bad.total() + count),
        sample.why_bad if sample.bad else "",
        sample.whole,
    )


def data_bytes(recipe: Recipe, sample: LengthSample | None) -> Estimate:
    """Room of ingested and prepared data: of the files that there are, else of what will be."""
    folder = recipe.folder.data
    if read_marker(recipe.folder.columns, "manifest.json") is not None:
        files = (path for path in folder.rglob("*") if path.is_file())
        return Range.exactly(float(sum(path.stat().st_size for path in files)), "measured")
    if sample is None or sample.tokens is None or sample.text_bytes is None:
        return Unknown("`ingot ingest`")
    masks = 1 if recipe.documents in CHAT_TEMPLATED else 0
    each = token_dtype(sample.vocab_size).itemsize + masks
    return sample.text_bytes * RAW_BYTES + sample.tokens * float(each)


def _tokenizer(recipe: Recipe, texts: list[str]) -> tuple[Tokenizer, bool]:
    """The recipe's tokenizer, and True; or a stand-in for one that is not trained yet."""
    if not recipe.trains_tokenizer:
        return for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe, ask=True))), True
    if (recipe.folder.tokenizer / "tokenizer.json").is_file():
        return load_tokenizer(recipe.folder.tokenizer), True
    return learn_tokenizer(recipe, (plain_text(recipe.documents, text) for text in texts)), False


def _own_tokens(recipe: Recipe, stand_in: Tokenizer, size: int, *, whole: bool) -> Range:
    """Tokens of the tokenizer that will be trained, beside those of one that learnt from a sample
    of `size` bytes, or from the `whole` of the documents. A smaller vocabulary needs more tokens
    for the same text.
    """
    wanted = recipe.tokenizer.vocab_size
    if whole or (stand_in.vocab_size >= wanted and size >= ENOUGH_BYTES * wanted):
        return OWN_TOKENIZER
    # Below all that was seen with vocabularies of 280 to 32,000 tokens on texts in English.
    fewer = min(1.0, stand_in.vocab_size / wanted) ** (1 / 3)
    return Range(OWN_TOKENIZER.low * fewer, 1.0, MOST_TOKENS, "guessed")


def _packed(
    recipe: Recipe,
    records: TokenRecords,
    tokenizer: Tokenizer,
    target_len: int | None,
    columns: Mapping[str, ColumnLengths],
) -> tuple[PackingCounts, float]:
    """The rows that `prepare` would make of these records, and the share of padding."""
    seq_len = recipe.data.seq_len
    if recipe.pack == "cut":
        return PackingCounts(rows=max(1, records.tokens // seq_len), tokens=records.tokens), 0.0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, values in records.columns.items():
            dtype = column_dtype(name, tokenizer.vocab_size)
            with ColumnWriter(column_prefix(folder, "train", name, 0), dtype) as writer:
                writer.append(values, records.lengths[name])
        if recipe.documents == "masked":
            framing = sum(map(len, tokenizer.frame))
            pieces = piece_stage(folder, "rows", "masked", seq_len, framing, recipe.row_plan)
            counts = pieces.open()(("train", 0), _ignore).counts
            return counts, _of_pieces(counts, pieces.seq_len, framing)
        if recipe.documents in ONE_PER_ROW:
            alone = SingleRecordStage(
                folder, "rows", recipe.documents, seq_len, target_len, recipe.data.truncate
            )
            return alone.open()(("train", 0), _ignore).counts, _alone(columns)
        stage = PackStage(folder, "rows", recipe.row_plan, seq_len, MASK in records.columns)
        counts = stage.open()(("train", 0), _ignore).counts
    return counts, 1.0 - counts.tokens / max(1, counts.rows * seq_len)


def _ignore(done: int) -> None:
    pass


def _alone(columns: Mapping[str, ColumnLengths]) -> float:
    """The padding of one record a row if every batch is as long as the limit: the most there is."""
    kept = sum(one.mean * (1 - one.beyond) for one in columns.values())
    return 1.0 - kept / max(1, sum(one.limit for one in columns.values()))


def _of_pieces(counts: PackingCounts, longest: int, framing: int) -> float:
    """The same of pieces of texts of up to `longest` tokens, each in a frame of `framing`."""
    most = counts.rows * (longest + framing)
    return 1.0 - (counts.tokens + counts.rows * framing) / max(1, most)


def _lost_targets(recipe: Recipe, records: TokenRecords, limits: Mapping[str, int]) -> float | None:
    """The share of the trained tokens that lie beyond the row; of other ways to cut only `prepare`
    knows what is lost.
    """
    if recipe.data.truncate != "right":
        return None
    trained = lost = 0
    for name, limit in limits.items():
        mask = records.columns.get(MASK if name == "tokens" else f"{name}_{MASK}")
        if mask is None and (name == "source" or any(map(is_mask, records.columns))):
            continue  # only read, never written
        lengths = records.lengths[name]
        place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        weights: npt.NDArray[Any] = np.ones_like(place) if mask is None else mask
        trained += int(weights.sum())
        lost += int(weights[place >= limit].sum())
    return lost / trained if trained else None


def _trained_share(recipe: Recipe) -> float:
    """The share of the training sources' documents that is trained on."""
    data = recipe.data
    held_out = data.validation.fraction if isinstance(data.validation, ValidationShare) else 0.0
    return data.fraction * (1.0 - held_out)


def _text_bytes(recipe: Recipe, sample: TextSample) -> Range | None:
    """Bytes of text of all documents of the training sources."""
    if (raw := read_marker(recipe.folder.raw, RAW_MANIFEST)) is not None:
        size = sum(int(source["bytes"]) for source in raw["splits"].get("train", ()))
        return Range.exactly(float(size), "measured")
    if sample.whole:
        return Range.exactly(sample.taken * sum(len(one.encode()) for one in sample.texts))
    if sample.file_bytes is None:
        return None
    held = Range.exactly(1.0) if sample.only_text else PLAIN_TEXT
    return (PACKED_TEXT if sample.compressed else held) * (sample.taken * sample.file_bytes)
