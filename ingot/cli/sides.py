"""`ingot show mask` for pairs and labelled texts: what an encoder reads, and beside it what is to
be written or found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.cli.audit import Example, in_words
from ingot.config.recipe import Recipe
from ingot.data.kinds import token_columns
from ingot.data.manifest import prefix_of
from ingot.data.records import Records, encode_records
from ingot.tokenizers.tokenizer import Tokenizer

SHOWN_IDS = 24
Ids = npt.NDArray[np.int32]


def show_framed(
    recipe: Recipe, tokenizer: Tokenizer, texts: Sequence[str], examples: int, out: Console
) -> None:
    """Print the first examples, then what was found in all of them."""
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
                    Example(record[name], np.full(len(record[name]), name == "target", np.uint8)),
                    plain=plain,
                )
                for name in record
            ]
            out.print(Text(" | ", "bold").join(sides), soft_wrap=True)
            out.print(
                " | ".join(f"{name} {_ids(record[name])}" for name in record),
                soft_wrap=True,
                markup=False,
            )
        else:
            text = in_words(
                tokenizer,
                Example(record["tokens"], np.zeros(len(record["tokens"]), np.uint8)),
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


def _lengths(record: dict[str, Ids]) -> str:
    return ", ".join(
        f"{len(record[name]):,} tokens" + (f" in the {name}" if name != "tokens" else "")
        for name in token_columns(list(record))
    )


def _ids(ids: Ids) -> str:
    return " ".join(map(str, ids[:SHOWN_IDS].tolist())) + (" ..." if len(ids) > SHOWN_IDS else "")


def _table(recipe: Recipe, tokenizer: Tokenizer, records: Records) -> Table:
    """What was looked at, and in red what is wrong."""
    made = Table("what", "found", title="audit", title_justify="left")
    count = len(next(iter(records.lengths.values())))
    made.add_row(
        "looked at",
        f"{count:,} {'pairs' if recipe.documents == 'pair' else 'labelled texts'},"
        f" {records.tokens:,} tokens",
    )
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    before, after = (
        " ".join(str(tokenizer.token(token)) for token in tokens) for tokens in tokenizer.frame
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
        longer, what = (
            int((records.lengths[name] > limit).sum()),
            ("texts" if name == "tokens" else f"{name}s"),
        )
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
