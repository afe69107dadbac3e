"""`ingot show mask` of texts of which a part is hidden: what the model reads of the first ones and
is asked for, and how much that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.progress import visible
from ingot.cli.views.audit import AuditedExample, in_words, legend, with_what
from ingot.config.recipe import Recipe
from ingot.config.spans import LEAST_TOKENS
from ingot.data.batches.masking import Masking
from ingot.data.batches.spans import SpanCorruption
from ingot.data.columns.reader import IGNORE, Ids
from ingot.tokenizers.tokenizer import Tokenizer

SENTINEL = r"▁?<extra_id_\d+>"


@dataclass(frozen=True)
class MaskedPiece:
    """The first piece of a text: what stands there, what the model reads, what it is asked for."""

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @property
    def asked(self) -> npt.NDArray[np.bool_]:
        """Where the model is asked."""
        found: npt.NDArray[np.bool_] = self.labels != IGNORE
        return found


def masked_pieces(recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str]) -> list[MaskedPiece]:
    """The first piece of each text, masked as if they were the first samples of a training.

    Raises:
        WrongInput: the tokenizer has no mask token.
    """
    masking = Masking.of(recipe, tokenizer)
    assert masking is not None
    room, found = recipe.data.seq_len - masking.room, []
    for number, text in enumerate(texts):
        ids = masking.framed(np.array(tokenizer.encode(text)[:room]))
        found.append(MaskedPiece(ids, *masking.hide(ids, masking.of_sample(number))))
    return found


def _masked_audit(
    recipe: Recipe, tokenizer: Tokenizer, pieces: Sequence[MaskedPiece], texts: Sequence[str]
) -> dict[str, Any]:
    """How much of the pieces is asked for, and how it is hidden."""
    ids, tokens, asked = (
        np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("ids", "tokens", "asked")
    )
    masked = asked & (tokens == tokenizer.mask)
    room = recipe.data.seq_len - sum(map(len, tokenizer.frame))
    longer = sum(len(tokenizer.encode(text)) > room for text in texts)
    return {
        "texts": len(texts),
        "in_several_pieces": longer,
        "tokens": len(ids),
        "asked": int(asked.sum()),
        "masked": int(masked.sum()),
        "replaced": int((asked & (tokens != ids) & ~masked).sum()),
        "kept": int((asked & (tokens == ids)).sum()),
    }


def show_masked(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int, out: Console
) -> None:
    """Print the first pieces of the first texts with what is asked for, and as the model reads
    them; then the counts for all of them.
    """
    pieces = masked_pieces(recipe, tokenizer, texts)
    plain = not out.is_terminal or out.no_color
    for number, piece in enumerate(pieces[:examples], start=1):
        title = f"--- example {number}, {len(piece.ids):,} tokens, {piece.asked.sum():,} asked for"
        out.print(Text(title, "bold"))
        shown = AuditedExample(piece.ids.astype(np.int32), piece.asked.astype(np.uint8))
        out.print(in_words(tokenizer, shown, plain=plain), soft_wrap=True)
        read = Text(visible(tokenizer.decode(piece.tokens, skip_special=False)))
        out.print(Text.assemble(("the model reads: ", "bold"), read), soft_wrap=True)
    legend(out)
    audit = _masked_audit(recipe, tokenizer, pieces, texts)
    asked = max(1, audit["asked"])
    made = Table("what", "found", title="audit", title_justify="left")
    made.add_row(
        "looked at", f"the first pieces of {len(texts):,} texts, {audit['tokens']:,} tokens"
    )
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    made.add_row("longer than a piece", f"{audit['in_several_pieces']:,} of {len(texts):,}")
    made.add_row("asked for", f"{audit['asked']:,} tokens, {asked / audit['tokens']:.1%}")
    mask = str(tokenizer.token(tokenizer.mask or 0))
    for name, words in (
        ("masked", f"of these {mask}"),
        ("replaced", "of these another token"),
        ("kept", "of these as they are"),
    ):
        made.add_row(Text(words), f"{audit[name]:,}, {audit[name] / asked:.1%}")
    out.print(made)


def masked_json(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int
) -> dict[str, Any]:
    """The same as numbers."""
    pieces = masked_pieces(recipe, tokenizer, texts)
    shown = [
        {
            "ids": piece.tokens.tolist(),
            "labels": piece.labels.tolist(),
            "text": tokenizer.decode(piece.ids, skip_special=False),
            "read": tokenizer.decode(piece.tokens, skip_special=False),
        }
        for piece in pieces[:examples]
    ]
    audit = {"what": "texts", **_masked_audit(recipe, tokenizer, pieces, texts)}
    return {"examples": shown, "audit": audit, **with_what(tokenizer)}


@dataclass(frozen=True)
class CorruptedPieces:
    """The first piece of each text, corrupted as if it were a sample of a training: how many tokens
    it has, and what is read and written of it.
    """

    lengths: list[int]
    sources: list[Ids]
    targets: list[Ids]
    audit: dict[str, int]


def corrupted_pieces(recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str]) -> CorruptedPieces:
    """Raises WrongInput if the tokenizer has no sentinels, or no text is long enough."""
    corruption = SpanCorruption.of(recipe, tokenizer)
    assert corruption is not None
    longest = corruption.lengths.longest(recipe.data.seq_len - corruption.room)
    whole = [np.array(tokenizer.encode(text), np.int64) for text in texts]
    bodies = [ids[:longest] for ids in whole if len(ids) >= LEAST_TOKENS]
    if not bodies:
        raise WrongInput(
            f"none of the first {len(texts):,} texts has {LEAST_TOKENS} tokens, so nothing can be"
            " hidden in them; give longer ones"
        )
    made = [corruption.sample(body, place) for place, body in enumerate(bodies)]
    hidden = [corruption.lengths.hidden(len(body)) for body in bodies]
    audit = {
        "texts": len(texts),
        "too_short": len(whole) - len(bodies),
        "in_several_pieces": sum(len(ids) > longest for ids in whole),
        "tokens": sum(map(len, bodies)),
        "hidden": sum(tokens for tokens, _ in hidden),
        "spans": sum(spans for _, spans in hidden),
        "longest_source": max(len(source) for source, _ in made),
        "longest_target": max(len(target) for _, target in made),
    }
    sources, targets = zip(*made, strict=True)
    return CorruptedPieces([len(body) for body in bodies], list(sources), list(targets), audit)


def show_spans(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int, out: Console
) -> None:
    """Print what is read and written of the first pieces, then the counts for all of them."""
    pieces = corrupted_pieces(recipe, tokenizer, texts)
    shown = zip(pieces.lengths, pieces.sources, pieces.targets, strict=True)
    for number, (length, source, target) in enumerate([*shown][:examples], start=1):
        title = (
            f"--- example {number}, {length:,} tokens: {len(source):,} to read, {len(target):,} to"
            " write"
        )
        out.print(Text(title, "bold"))
        for words, ids in (("the model reads: ", source), ("and writes: ", target)):
            text = Text(visible(tokenizer.decode(ids, skip_special=False)))
            text.highlight_regex(SENTINEL, "bold green")
            out.print(Text.assemble((words, "bold"), text), soft_wrap=True)
    out.print(_table(pieces.audit, tokenizer))


def _table(audit: dict[str, int], tokenizer: Tokenizer) -> Table:
    made = Table("what", "found", title="audit", title_justify="left")
    texts, tokens, hidden, spans = (audit[name] for name in ("texts", "tokens", "hidden", "spans"))
    made.add_row("looked at", f"the first pieces of {texts:,} texts, {tokens:,} tokens")
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    made.add_row("longer than a piece", f"{audit['in_several_pieces']:,} of {texts:,}")
    made.add_row(
        f"left out: fewer than {LEAST_TOKENS} tokens",
        Text(f"{audit['too_short']:,} of {texts:,}", "yellow" if audit["too_short"] else ""),
    )
    made.add_row("hidden", f"{hidden:,} tokens, {hidden / tokens:.1%}")
    made.add_row("spans", f"{spans:,}, of {hidden / spans:.2f} tokens on average")
    longest = f"{audit['longest_source']:,} to read, {audit['longest_target']:,} to write"
    made.add_row("longest", longest)
    return made


def spans_json(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int
) -> dict[str, Any]:
    """The same as numbers."""
    pieces = corrupted_pieces(recipe, tokenizer, texts)
    shown = [
        {
            name: {"ids": ids.tolist(), "text": tokenizer.decode(ids, skip_special=False)}
            for name, ids in (("source", source), ("target", target))
        }
        for source, target in zip(pieces.sources, pieces.targets, strict=True)
    ]
    audit = {"what": "texts", **pieces.audit}
    return {"examples": shown[:examples], "audit": audit, **with_what(tokenizer)}
