"""`ingot show mask`: the first examples as the model will see them, trained tokens highlighted, and
counts of typical errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.console import console
from ingot.base.errors import EXIT_DONE, WrongInput
from ingot.cli.output import print_json
from ingot.cli.views.audit import (
    Audit,
    AuditedExample,
    audit_chats,
    audit_documents,
    audit_preferences,
    audit_rated,
    counts,
    in_words,
    legend,
    table,
    with_what,
)
from ingot.cli.views.hidden import masked_json, show_masked, show_spans, spans_json
from ingot.config.load import read_recipe
from ingot.config.recipe import Recipe
from ingot.data.columns.manifest import prefix_of, token_columns
from ingot.data.documents.chats import from_chat
from ingot.data.documents.preferences import from_preference
from ingot.data.documents.rated import from_rated
from ingot.data.sample import training_texts
from ingot.data.tokenizing.encode import TokenRecords, encode_records, frame_of
from ingot.tokenizers.chats.templates import for_recipe
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.tokenizer import Tokenizer

SHOWN_IDS = 24
Ids = npt.NDArray[np.int32]


def show_framed(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int, out: Console
) -> None:
    """Print the first examples, then the counts for all of them."""
    records = encode_records(
        recipe.documents, tokenizer, tokenizer.encode_batch, texts, prefix_of(recipe)
    )
    plain = not out.is_terminal or out.no_color
    for number in range(min(examples, len(texts))):
        record = records.record(number)
        out.print(Text(f"--- example {number + 1}, {_lengths(record)}", "bold"))
        if recipe.documents == "pair":
            sides = [
                in_words(
                    tokenizer,
                    AuditedExample(
                        record[name], np.full(len(record[name]), name == "target", np.uint8)
                    ),
                    plain=plain,
                )
                for name in record
            ]
            out.print(Text(" | ", "bold").join(sides), soft_wrap=True)
            out.print(
                " | ".join(f"{name} {_ids(record[name])}" for name in record),
                soft_wrap=True,
            )
        else:
            text = in_words(
                tokenizer,
                AuditedExample(record["tokens"], np.zeros(len(record["tokens"]), np.uint8)),
                plain=plain,
            )
            label = int(record["label"][0])
            out.print(
                Text.assemble(
                    text, (" -> ", "bold"), (f"{recipe.labels[label]} ({label})", "green")
                ),
                soft_wrap=True,
            )
    out.print(_table(recipe, tokenizer, records))


def _framed_json(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int
) -> dict[str, Any]:
    """Pairs or labelled texts, and the audit as numbers."""
    records = encode_records(
        recipe.documents, tokenizer, tokenizer.encode_batch, texts, prefix_of(recipe)
    )
    shown = []
    for number in range(min(examples, len(texts))):
        record = records.record(number)
        example = {
            name: {
                "ids": record[name].tolist(),
                "text": tokenizer.decode(record[name], skip_special=False),
            }
            for name in token_columns(list(record))
        }
        labelled = recipe.documents == "labelled"
        label = recipe.labels[int(record["label"][0])] if labelled else None
        shown.append({"columns": example, "label": label})
    found = Counter(records.columns["label"].tolist()) if recipe.documents == "labelled" else {}
    longer = {
        name: int(
            (
                records.lengths[name]
                > (recipe.data.target_len if name == "target" else recipe.data.seq_len)
            ).sum()
        )
        for name in token_columns(list(records.columns))
    }
    audit = {
        "what": "pairs" if recipe.documents == "pair" else "labelled texts",
        "examples": len(next(iter(records.lengths.values()))),
        "tokens": records.tokens,
        "longer": longer,
        "labels": {label: found[number] for number, label in enumerate(recipe.labels or ())}
        if found
        else None,
    }
    return {"examples": shown, "audit": audit, **with_what(tokenizer)}


def _lengths(record: dict[str, Ids]) -> str:
    return ", ".join(
        f"{len(record[name]):,} tokens" + (f" in the {name}" if name != "tokens" else "")
        for name in token_columns(list(record))
    )


def _ids(ids: Ids) -> str:
    return " ".join(map(str, ids[:SHOWN_IDS].tolist())) + (" ..." if len(ids) > SHOWN_IDS else "")


def _table(recipe: Recipe, tokenizer: Tokenizer, records: TokenRecords) -> Table:
    """The counts as a table, with problems in red."""
    made = Table("what", "found", title="audit", title_justify="left")
    count = len(next(iter(records.lengths.values())))
    made.add_row(
        "looked at",
        f"{count:,} {'pairs' if recipe.documents == 'pair' else 'labelled texts'},"
        f" {records.tokens:,} tokens",
    )
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    before, after = (
        " ".join(str(tokenizer.token(token)) for token in tokens)
        for tokens in frame_of(recipe.documents, tokenizer)
    )
    around = f"{before or 'nothing'} before it, {after or 'nothing'} behind it"
    made.add_row(
        "around each text", Text(around, "" if after or recipe.documents == "labelled" else "red")
    )
    for name in token_columns(list(records.columns)):
        knob, limit = (
            ("data.target_len", recipe.data.target_len)
            if name == "target"
            else ("data.seq_len", recipe.data.seq_len)
        )
        longer = int((records.lengths[name] > limit).sum())
        what = "texts" if name == "tokens" else f"{name}s"
        made.add_row(
            f"{what} longer than {knob}={limit:,}",
            Text(f"{longer:,} of {count:,}", "yellow" if longer else ""),
        )
    if recipe.documents == "labelled":
        found = Counter(records.columns["label"].tolist())
        for number, label in enumerate(recipe.labels):
            made.add_row(
                Text(f"label {label} ({number})"),
                Text(
                    f"{found[number]:,}, {found[number] / max(1, count):.1%}",
                    "" if found[number] else "red",
                ),
            )
    return made


EXAMPLES = 3
AUDITED, AUDITED_CHARACTERS = 1000, 4_000_000


def show_mask(arguments: Sequence[str], examples: int = EXAMPLES, *, as_json: bool = False) -> int:
    """Print `examples` examples of a recipe's training data with trained tokens highlighted, then
    the audit of the first AUDITED, or of fewer where these are long.

    Raises:
        WrongInput: there is no tokenizer or template yet, or the sources cannot be read without
            `ingot ingest`.
    """
    recipe = read_recipe(arguments)
    tokenizer, out = _tokenizer(recipe), console()
    texts = _first(training_texts(recipe), examples)
    if not texts:
        raise WrongInput(
            "the first sources of data.train hold no document that can be read; run `ingot ingest`,"
            " which says why"
        )
    framed = recipe.documents in ("pair", "labelled")
    if as_json:
        if recipe.objective.spans is not None:
            told = spans_json(recipe, tokenizer, texts, examples)
        elif recipe.documents == "masked":
            told = masked_json(recipe, tokenizer, texts, examples)
        elif framed:
            told = _framed_json(recipe, tokenizer, texts, examples)
        else:
            audit, what = _audit(recipe, tokenizer, texts)
            told = audit_json(
                audit,
                tokenizer,
                recipe.data.seq_len,
                what=what,
                examples=examples,
                truncate=recipe.data.truncate,
            )
        print_json("show mask", **told)
    elif recipe.objective.spans is not None:
        show_spans(recipe, tokenizer, texts, examples, out)
    elif recipe.documents == "masked":
        show_masked(recipe, tokenizer, texts, examples, out)
    elif framed:
        show_framed(recipe, tokenizer, texts, examples, out)
    else:
        _show(recipe, tokenizer, texts, examples, out)
    return EXIT_DONE


def _first(texts: Iterable[str], examples: int) -> list[str]:
    """The texts that are looked at: whole books would take minutes."""
    kept, characters = list[str](), 0
    for text in islice(texts, AUDITED):
        kept.append(text)
        characters += len(text)
        if characters >= AUDITED_CHARACTERS and len(kept) >= examples:
            break
    return kept


def _show(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int, out: Console
) -> None:
    """Show the examples of a decoder."""
    audit, what = _audit(recipe, tokenizer, texts)
    sides = 2 if what == "sides" else 1
    for number, example in enumerate(audit.examples[: examples * sides]):
        title = (
            f"--- example {number // sides + 1}{example.side and f', {example.side}'},"
            f" {len(example.ids):,} tokens"
        )
        out.print(Text(title, "bold"))
        out.print(
            in_words(tokenizer, example, plain=not out.is_terminal or out.no_color), soft_wrap=True
        )
    legend(out)
    out.print(
        table(audit, tokenizer, recipe.data.seq_len, what=what, truncate=recipe.data.truncate)
    )
    for reason, count in audit.refused.items():
        out.print(Text(f"{count:,} refused: {reason}", "red"), soft_wrap=True)


def audit_json(
    audit: Audit,
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    what: str,
    examples: int,
    truncate: str,
) -> dict[str, Any]:
    """The first examples with what is trained of them, and what `table` tells as numbers."""
    shown = audit.examples[: examples * (2 if what == "sides" else 1)]
    cut = audit.cut(seq_len, truncate) if what != "documents" else Audit([])
    return {
        "examples": [
            {
                "side": example.side or None,
                "ids": example.ids.tolist(),
                "trained": example.mask.tolist(),
                "runs": _runs(tokenizer, example),
            }
            for example in shown
        ],
        "audit": {
            **counts(audit, tokenizer, seq_len, what),
            "cut_tokens": cut.tokens,
            "cut_trained_tokens": cut.trained,
        },
        **with_what(tokenizer),
    }


def _runs(tokenizer: Tokenizer, example: AuditedExample) -> list[dict[str, Any]]:
    """Runs of tokens that are all trained or all not, special tokens visible."""
    pairs = zip(example.ids.tolist(), example.mask.tolist(), strict=True)
    return [
        {
            "text": tokenizer.decode([token for token, _ in run], skip_special=False),
            "trained": bool(trained),
        }
        for trained, run in groupby(pairs, key=lambda pair: pair[1])
    ]


def _audit(recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Audit, str]:
    """The audit, and the name of what each example is."""
    if recipe.documents == "chat":
        return audit_chats(tokenizer, [from_chat(text) for text in texts]), "chats"
    if recipe.documents == "preference":
        return audit_preferences(tokenizer, [from_preference(text) for text in texts]), "sides"
    if recipe.documents == "rated":
        return audit_rated(tokenizer, [from_rated(text) for text in texts]), "answers"
    return audit_documents(tokenizer, texts), "documents"


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer with its template; a trained one exists once `prepare` has run."""
    if recipe.trains_tokenizer:
        if not (recipe.folder.tokenizer / "tokenizer.json").is_file():
            raise WrongInput(
                f"the tokenizer is trained by `ingot prepare`, and {recipe.folder.tokenizer} holds"
                " none yet; run that first"
            )
        return load_tokenizer(recipe.folder.tokenizer)
    return for_recipe(recipe, load_tokenizer(resolve_tokenizer(recipe)))
