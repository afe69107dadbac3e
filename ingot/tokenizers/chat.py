"""Encodes chats and marks which tokens are trained: the assistant's turns with their end-of-turn
tokens.

The ids are those of the rendered chat; only the template can produce special tokens. The text of
many chats is encoded in one call: a rendered chat is split at its special tokens, and what lies
between is plain text.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.chat_render import ChatFormat, any_of_pattern, mask_look_alikes, unmask
from ingot.tokenizers.chat_spans import render_with_spans, turn_format
from ingot.tokenizers.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
EncodeBatch = Callable[[Sequence[str]], TokenBatch]
Ids = npt.NDArray[np.int32]
PROBE = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "c d"},
    {"role": "user", "content": "e"},
]


def encode_chats(
    tokenizer: Tokenizer,
    chats: Sequence[Messages],
    encode_batch: EncodeBatch,
    trained_from: Sequence[int] | None = None,
) -> tuple[Ids, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The ids of all chats, concatenated; a mask with 1 for each id that is trained; and the number
    of ids of each chat.

    A token that begins before the assistant's turn and ends in it is not trained.

    Args:
        encode_batch: ids of texts, the same as the tokenizer's own.
        trained_from: for each chat the number of its first message that is trained, if that is the
        assistant's; None: all are.

    Raises:
        WrongInput: there is no template, it refuses a chat, or it is not clear which part of the
        text is the assistant's.
    """
    form = tokenizer.chat_format
    whole = not _is_split_exact(tokenizer, form)
    plan = _EncodingPlan(tokenizer, form)
    firsts = [0] * len(chats) if trained_from is None else trained_from
    layouts = [
        plan.add(chat, first, whole=whole) for chat, first in zip(chats, firsts, strict=True)
    ]
    plan.encode(encode_batch)
    made = [plan.chat(layout) for layout in layouts]
    lengths = np.array([len(ids) for ids, _ in made], np.int64)
    return (
        np.concatenate([ids for ids, _ in made]) if made else np.empty(0, np.int32),
        np.concatenate([trained for _, trained in made]) if made else np.empty(0, np.uint8),
        lengths,
    )


def end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The special token that the template writes right after an assistant's turn; None if there is
    none.
    """
    return turn_format(tokenizer.chat_format).end


def stop_tokens(tokenizer: Tokenizer) -> list[int]:
    """The ids at which generation stops: EOS, and the template's end-of-turn token if that is
    another one.
    """
    end = end_of_turn(tokenizer) if tokenizer.template else None
    found = [tokenizer.special.eos, tokenizer.special_ids[end] if end is not None else None]
    return sorted({token for token in found if token is not None})


@dataclass(frozen=True)
class _EncodedPiece:
    """A special token, or a text with the places in it where training begins and ends. `text` is
    the number of the text in the plan.
    """

    token: int | None
    text: int
    trained: bool
    """Whether its first token is trained."""
    switches: list[int]
    """For each place at which that changes, the number of the text that ends there."""


class _EncodingPlan:
    """The distinct texts of a batch of chats, encoded once each, and how the chats are put together
    from their ids.
    """

    def __init__(self, tokenizer: Tokenizer, form: ChatFormat) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._special = any_of_pattern(tuple(form.special)) if form.special else None
        self._numbers: dict[tuple[bool, str], int] = {}
        self._ids: list[Ids] = []

    def add(self, chat: Messages, first: int, *, whole: bool) -> list[_EncodedPiece]:
        """Render a chat that is trained from message `first` on. `whole`: encode its text in one
        piece with the reference, unless it contains look-alikes of special tokens.
        """
        masked, originals = mask_look_alikes(_checked(chat), list(self._form.special))
        found = render_with_spans(self._form, masked, first)
        edges = [edge for span in found.spans for edge in span]
        if whole and not originals:
            return [self._text(found.text, 0, edges, {}, control=True)]
        pieces, place = [], 0
        for number, piece in enumerate(
            self._special.split(found.text) if self._special else [found.text]
        ):
            if number % 2:
                pieces.append(
                    _EncodedPiece(self._form.special[piece], -1, _is_inside(place, edges), [])
                )
            elif piece:
                pieces.append(self._text(piece, place, edges, originals, control=False))
            place += len(piece)
        return pieces

    def _text(
        self,
        text: str,
        place: int,
        edges: list[int],
        originals: Mapping[str, str],
        *,
        control: bool,
    ) -> _EncodedPiece:
        within = [edge - place for edge in edges if place < edge < place + len(text)]
        prefixes = [self._number(unmask(text[:edge], originals), control) for edge in within]
        return _EncodedPiece(
            None, self._number(unmask(text, originals), control), _is_inside(place, edges), prefixes
        )

    def _number(self, text: str, control: bool) -> int:
        return self._numbers.setdefault((control, text), len(self._numbers))

    def encode(self, encode_batch: EncodeBatch) -> None:
        plain = [text for control, text in self._numbers if not control]
        flat, offsets = (
            encode_batch(plain) if plain else (np.empty(0, np.int32), np.zeros(1, np.int64))
        )
        bounds = itertools.pairwise(offsets)
        for control, text in self._numbers:
            if control:
                self._ids.append(
                    np.array(
                        self._form.control.encode(text, add_special_tokens=False).ids, np.int32
                    )
                )
            else:
                begin, end = next(bounds)
                self._ids.append(flat[begin:end])

    def chat(self, pieces: list[_EncodedPiece]) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """Ids of one chat, and which are trained."""
        ids = [
            np.array([piece.token], np.int32) if piece.token is not None else self._ids[piece.text]
            for piece in pieces
        ]
        trained = [
            self._trained(piece, len(tokens)) for piece, tokens in zip(pieces, ids, strict=True)
        ]
        return np.concatenate(ids) if ids else np.empty(0, np.int32), (
            np.concatenate(trained) if trained else np.empty(0, np.uint8)
        )

    def _trained(self, piece: _EncodedPiece, count: int) -> npt.NDArray[np.uint8]:
        if not piece.switches:
            return np.full(count, piece.trained, np.uint8)
        trained, now, place = np.zeros(count, np.uint8), piece.trained, 0
        for switch in [
            *(self._first_after(piece.text, prefix) for prefix in piece.switches),
            count,
        ]:
            trained[place:switch] = now
            now, place = not now, max(place, switch)
        return trained

    def _first_after(self, text: int, prefix: int) -> int:
        """Index of the first token of a text that begins at the end of the prefix or later."""
        ids, before = self._ids[text], self._ids[prefix]
        same = min(len(ids), len(before))
        differ = np.flatnonzero(ids[:same] != before[:same])
        if not len(differ) and same == len(before):
            return same
        # A token crosses the end of the prefix: the next one begins where the decoded text is as
        # long as the prefix.
        wanted = len(self._decode(before))
        first = int(differ[0]) if len(differ) else same
        return next(
            (count for count in range(first, len(ids)) if len(self._decode(ids[:count])) >= wanted),
            len(ids),
        )

    def _decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids, skip_special=False)


def _is_inside(place: int, edges: list[int]) -> bool:
    """Whether a place lies inside one of the spans given by their ascending edges."""
    return bisect.bisect_right(edges, place) % 2 == 1


def _checked(chat: Messages) -> Messages:
    if not chat or any(not isinstance(message.get("role"), str) for message in chat):
        raise WrongInput(
            "a chat is a list of one or more messages, each with a `role`; give at least one"
        )
    return chat


def _is_split_exact(tokenizer: Tokenizer, form: ChatFormat) -> bool:
    """Whether splitting a chat at its special tokens gives the same ids: not where these absorb
    whitespace, or where only the start of a text gets a prefix.
    """
    try:
        text = form.render(PROBE)
    except WrongInput:
        return True
    pieces = any_of_pattern(tuple(form.special)).split(text) if form.special else [text]
    cut = [
        token
        for number, piece in enumerate(pieces)
        for token in ([form.special[piece]] if number % 2 else tokenizer.encode(piece))
    ]
    return cut == form.control.encode(text, add_special_tokens=False).ids
