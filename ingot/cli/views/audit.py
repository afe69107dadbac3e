"""Encodes examples for `ingot show mask` as the model will see them, and counts typical errors in
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import WrongInput
from ingot.base.progress import visible
from ingot.data.columns.manifest import VERDICTS
from ingot.data.documents.preferences import SIDES, Preference
from ingot.data.documents.rated import Rated
from ingot.data.tokenizing.encode import encode_documents
from ingot.tokenizers.chats.chat import Chat, Messages, is_trained
from ingot.tokenizers.chats.encode import encode_trained, end_of_turn
from ingot.tokenizers.tokenizer import Tokenizer

BEGIN, END = "⟦", "⟧"
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AuditedExample:
    """One chat, document or side of a preference. `turns`: the number of assistant turns that are
    trained; `silent`: of those that say and call nothing.
    """

    ids: Ids
    mask: Mask
    turns: int = 0
    side: str = ""
    silent: int = 0


@dataclass(frozen=True)
class Audit:
    """Encoded examples, and the number refused by the template, by reason. `added`: the texts
    beyond one for each chat, where the template writes an answer otherwise once others follow.
    """

    examples: list[AuditedExample]
    refused: Counter[str] = field(default_factory=Counter)
    added: int = 0

    def leading(self, token: int | None) -> Counter[int]:
        """Number of copies of `token` at the beginning of an example -> number of such examples."""
        return Counter(
            next(
                (place for place, found in enumerate(example.ids) if found != token),
                len(example.ids),
            )
            for example in self.examples
        )

    def ended(self, token: int | None) -> int:
        """How often `token` is a trained token."""
        return sum(
            int(((example.ids == token) & (example.mask == 1)).sum()) for example in self.examples
        )

    def cut(self, seq_len: int, truncate: str) -> Audit:
        """What of the examples is in no row, as they are longer than `seq_len`."""
        gone = [(one, _gone(one, seq_len, truncate)) for one in self.examples]
        return Audit([replace(one, ids=one.ids[at], mask=one.mask[at]) for one, at in gone])

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    @property
    def trained(self) -> int:
        """The tokens of them that are trained."""
        return sum(int(example.mask.sum()) for example in self.examples)

    def without_targets(self, seq_len: int | None = None) -> int:
        """Number of examples without a trained token when truncated to `seq_len`; the first token
        is never predicted.
        """
        return sum(not example.mask[1:seq_len].any() for example in self.examples)


def _gone(example: AuditedExample, seq_len: int, truncate: str) -> Places:
    """The places of the tokens that `data.truncate` takes from an example."""
    places, over = np.arange(len(example.ids)), max(0, len(example.ids) - seq_len)
    if truncate == "drop":
        return places if over else places[:0]
    if truncate == "left" and example.side:  # the prompt goes first, then the answer's end
        prompt = max(0, int(np.argmax(example.mask)) - 1)
        return np.roll(places, -min(over, prompt))[len(places) - over :]
    return places[:over] if truncate == "left" else places[seq_len:]


@dataclass(frozen=True)
class _Audited:
    """A chat of a record; `first`: the number of its first message that is trained."""

    chat: Chat
    first: int = 0
    side: str = ""


def audit_chats(tokenizer: Tokenizer, chats: Sequence[Chat]) -> Audit:
    """Encode chats; those that cannot be encoded are counted by reason."""
    return _audited(tokenizer, [[_Audited(chat)] for chat in chats])


def audit_preferences(tokenizer: Tokenizer, preferences: Sequence[Preference]) -> Audit:
    """Encode both sides of preferences, the chosen one first; a preference with a side that cannot
    be encoded is counted by reason.
    """
    return _audited(
        tokenizer,
        [
            [
                _Audited(chat, len(one.prompt), side)
                for chat, side in zip(one.sides, SIDES, strict=True)
            ]
            for one in preferences
        ],
    )


def audit_rated(tokenizer: Tokenizer, rated: Sequence[Rated]) -> Audit:
    """Encode rated answers; one that cannot be encoded is counted by reason."""
    return _audited(
        tokenizer, [[_Audited(one.chat, len(one.prompt), VERDICTS[one.label])] for one in rated]
    )


def _audited(tokenizer: Tokenizer, records: Sequence[Sequence[_Audited]]) -> Audit:
    """Encode the chats of all records; a record that cannot be encoded is counted by reason."""
    chats = [one for record in records for one in record]
    try:
        found = encode_trained(
            tokenizer,
            [one.chat for one in chats],
            tokenizer.encode_batch,
            [one.first for one in chats],
        )
    except WrongInput as error:
        if len(records) == 1:
            return Audit([], Counter([str(error)]))
        if tokenizer.template is None:
            raise
        return _together([_audited(tokenizer, [record]) for record in records])
    # Each answer is trained in one of a chat's texts, so the turns count with the first of them.
    of = np.repeat(np.arange(len(chats)), found.counts).tolist()
    turns = [_turns(one.chat.messages[one.first :]) for one in chats]
    return Audit(
        [
            AuditedExample(
                ids,
                trained,
                len(turns[chat]) if chat != before else 0,
                chats[chat].side,
                sum(map(_is_silent, turns[chat])) if chat != before else 0,
            )
            for ids, trained, chat, before in zip(
                *_cut(found.lengths, found.ids, found.mask), of, [-1, *of[:-1]], strict=True
            )
        ],
        added=len(of) - len(chats),
    )


def _together(audits: Sequence[Audit]) -> Audit:
    return Audit(
        [example for audit in audits for example in audit.examples],
        sum((audit.refused for audit in audits), Counter[str]()),
        sum(audit.added for audit in audits),
    )


def _turns(messages: Messages) -> Messages:
    """The assistant messages that are trained."""
    return [
        message for message in messages if message["role"] == "assistant" and is_trained(message)
    ]


def _is_silent(message: Mapping[str, Any]) -> bool:
    """Whether all that a message teaches is to end at once."""
    said = (message.get(key) for key in ("content", "tool_calls", "reasoning_content", "thinking"))
    return not any(text.strip() if isinstance(text, str) else text for text in said)


def audit_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Audit:
    """Encode documents as pretraining does: every token is trained."""
    flat, lengths = encode_documents(tokenizer, texts)
    return Audit(
        [AuditedExample(ids, np.ones(len(ids), np.uint8)) for ids in _cut(lengths, flat)[0]]
    )


def _cut(
    lengths: npt.NDArray[np.int64], *columns: npt.NDArray[Any]
) -> list[list[npt.NDArray[Any]]]:
    ends = np.cumsum(lengths)[:-1]
    return [np.split(column, ends) for column in columns]


def in_words(tokenizer: Tokenizer, example: AuditedExample, *, plain: bool) -> Text:
    """An example as text: special tokens visible, trained tokens in colour or, if `plain`, between
    brackets.
    """
    special, text = set(tokenizer.special_ids.values()), Text()
    pairs = [
        (int(token), bool(trained))
        for token, trained in zip(example.ids, example.mask, strict=True)
    ]
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        text.append(BEGIN if plain and trained else "")
        for is_special, tokens in groupby(
            (token for token, _ in run), key=lambda token: token in special
        ):
            style = (
                ("green" if trained else "")
                if not is_special
                else ("bold green" if trained else "magenta")
            )
            text.append(visible(tokenizer.decode(list(tokens), skip_special=False)), style)
        text.append(END if plain and trained else "")
    return text


def legend(out: Console) -> None:
    if out.is_terminal and not out.no_color:
        out.print(
            Text.assemble(
                "--- ",
                ("trained", "green"),
                ", not trained, ",
                ("special tokens", "magenta"),
                " ",
                ("and trained ones", "bold green"),
            )
        )
    else:
        out.print(f"--- {BEGIN}trained{END}, not trained")


def table(
    audit: Audit, tokenizer: Tokenizer, seq_len: int, *, what: str, truncate: str = "right"
) -> Table:
    """The audit as a table, with problems in red; `what` is audited: `chats`, `documents`, `sides`
    of preferences or rated `answers`. `truncate`: what `prepare` does with long ones.
    """
    made, chats = Table("what", "found", title="audit", title_justify="left"), what != "documents"
    examples, cut = audit.examples, audit.cut(seq_len, truncate) if chats else Audit([])
    made.add_row("looked at", f"{len(examples) - audit.added:,} {what}, {audit.tokens:,} tokens")
    if audit.added:
        made.add_row(
            "cut after an earlier answer",
            f"{audit.added:,} texts: the template writes it otherwise once others follow",
        )
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    made.add_row("template", tokenizer.template_identity or "none")
    made.add_row("BOS at the beginning", _bos(audit, tokenizer))
    made.add_row(
        *(_end_of_turn(audit, tokenizer, cut) if chats else _end_of_document(audit, tokenizer))
    )
    if silent := sum(example.silent for example in examples):
        told = f"{silent:,}: these teach to say nothing; take them out of the chats"
        made.add_row("empty assistant turns", Text(told, "yellow"))
    share = (audit.trained - cut.trained) / max(1, audit.tokens - cut.tokens)
    told = f"; {cut.tokens:,} tokens are cut away, {cut.trained:,} of them to be trained"
    told = told if cut.tokens else ""
    made.add_row("trained", f"{share:.1%} of the tokens{told}")
    empty = audit.without_targets()
    long = [example for example in examples if len(example.ids) > seq_len]
    made.add_row("without anything trained", Text(f"{empty:,}", "red" if empty else ""))
    if chats:
        lost = audit.without_targets(seq_len) - empty
        told = f"{len(long):,} of {len(examples):,}; of these {lost:,} lose all that is trained"
        if truncate != "right":
            done = {"left": "cut off at the beginning", "drop": "left out"}[truncate]
            told, lost = f"{len(long):,} of {len(examples):,}; they are {done}", 0
        made.add_row(
            f"longer than data.seq_len={seq_len:,}",
            Text(told, "red" if lost else "yellow" if long else ""),
        )
    return made


def _bos(audit: Audit, tokenizer: Tokenizer) -> Text:
    if tokenizer.special.bos is None:
        return Text("the tokenizer has no BOS")
    counts = audit.leading(tokenizer.special.bos)
    double = sum(count for times, count in counts.items() if times > 1)
    words = [
        f"{name} in {count:,}"
        for name, count in (("none", counts[0]), ("one", counts[1]), ("two or more", double))
        if count
    ]
    return Text(", ".join(words), "red" if double else "")


def _end_of_document(audit: Audit, tokenizer: Tokenizer) -> tuple[str, Text]:
    ended = ending_in_eos(audit, tokenizer)
    return "EOS at the end", Text(
        f"trained in {ended:,} of {len(audit.examples):,} documents",
        "red" if ended < len(audit.examples) else "green",
    )


def ending_in_eos(audit: Audit, tokenizer: Tokenizer) -> int:
    """Number of examples that end with EOS."""
    return sum(
        bool(len(example.ids)) and int(example.ids[-1]) == tokenizer.special.eos
        for example in audit.examples
    )


def _end_of_turn(audit: Audit, tokenizer: Tokenizer, cut: Audit) -> tuple[str, Text]:
    end, turns = end_of_turn(tokenizer), sum(example.turns for example in audit.examples)
    if end is None:
        return "end-of-turn token", Text(
            "none: the template writes no special token after what the assistant says, so a model"
            " does not learn to stop",
            "red",
        )
    ended, lost = (one.ended(tokenizer.special_ids[end]) for one in (audit, cut))
    told = f"{end} trained in {ended - lost:,} of {turns:,} assistant turns"
    told += f", {lost:,} are cut away" if lost else ""
    if tokenizer.special_ids[end] != tokenizer.special.eos:
        told += (
            f"; it is not the tokenizer's EOS ({tokenizer.named.get('eos_token', 'none')}), so"
            " generation must be told to stop at it"
        )
    return "end-of-turn token", Text(
        told, "red" if ended < turns else "yellow" if lost or "must be told" in told else "green"
    )


def counts(audit: Audit, tokenizer: Tokenizer, seq_len: int, what: str) -> dict[str, Any]:
    """What the table of the audit tells."""
    examples, bos = audit.examples, tokenizer.special.bos
    told: dict[str, Any] = {
        "what": what,
        "examples": len(examples),
        "added": audit.added,
        "tokens": audit.tokens,
        "trained_tokens": audit.trained,
        "leading_bos": None if bos is None else dict(sorted(audit.leading(bos).items())),
        "without_targets": audit.without_targets(),
        "seq_len": seq_len,
        "longer": sum(len(example.ids) > seq_len for example in examples),
        "without_targets_cut": audit.without_targets(seq_len),
        "refused": dict(audit.refused),
    }
    if what == "documents":
        return {**told, "ends_in_eos": ending_in_eos(audit, tokenizer)}
    end = end_of_turn(tokenizer)
    trained = None if end is None else audit.ended(tokenizer.special_ids[end])
    turns = sum(example.turns for example in examples)
    silent = sum(example.silent for example in examples)
    return {
        **told,
        "end_of_turn": {"token": end, "trained": trained, "turns": turns, "silent": silent},
    }


def with_what(tokenizer: Tokenizer) -> dict[str, Any]:
    """What the examples are encoded with."""
    return {"tokenizer": tokenizer.identity(), "template": tokenizer.template_identity}
