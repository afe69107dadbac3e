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
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.chat_layouts import ChatLayout, Part, Shape, layout_of, shape_of
from ingot.tokenizers.chat_render import (
    ChatFormat,
    any_of_pattern,
    has_look_alikes,
    mask_look_alikes,
    unmask,
)
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
    for chat, first in zip(chats, firsts, strict=True):
        plan.add(chat, first, whole=whole)
    return plan.encode(encode_batch)


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


class _EncodingPlan:
    """The distinct texts of a batch of chats, encoded once each, and the pieces that the chats are
    put together from, all chats in a row.
    """

    def __init__(self, tokenizer: Tokenizer, form: ChatFormat) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._special = any_of_pattern(tuple(form.special)) if form.special else None
        self._layouts: dict[tuple[Shape, int], ChatLayout | None] = {}
        self._shapes: set[tuple[Shape | None, int]] = set()
        self._numbers: dict[tuple[bool, str], int] = {}
        self._ids: list[Ids] = []
        # Of each piece: the number of its text, or -1 - id of its special token; and whether its
        # first token is trained. Where that changes: the piece, and the number of the text that
        # ends there.
        self._pieces: list[int] = []
        self._trained: list[bool] = []
        self._switches: list[tuple[int, int]] = []
        self._ends: list[int] = []

    def add(self, chat: Messages, first: int, *, whole: bool) -> None:
        """Plan a chat that is trained from message `first` on. `whole`: encode its text in one
        piece with the reference, unless it contains look-alikes of special tokens.
        """
        _checked(chat)
        if whole or not self._add_by_layout(chat, first):
            self._add_rendered(chat, first, whole=whole)
        self._ends.append(len(self._pieces))

    def _add_by_layout(self, chat: Messages, first: int) -> bool:
        """Plan a chat without rendering it, where what its template writes is known for its
        shape.
        """
        shape = shape_of(chat)
        if shape is None or (shape, first) not in self._shapes:
            self._shapes.add((shape, first))  # a shape that comes once is not worth a layout
            return False
        if (shape, first) not in self._layouts:
            self._layouts[shape, first] = layout_of(self._form, shape, first)
        layout = self._layouts[shape, first]
        said = [message["content"] for message in chat]
        if (
            layout is None
            or any(said[number][0].isspace() for number in layout.unindented)
            or has_look_alikes(said, self._special)  # they are masked, also from trimming
        ):
            return False
        contents = [text for content in said for text in (content, content.strip())]
        for piece in layout.pieces:
            if piece.token is not None:
                self._append(-1 - piece.token, piece.trained)
                continue
            self._append(self._number(_filled(piece.parts, contents), False), piece.trained)
            for prefix in piece.switches:
                self._switch(_filled(prefix, contents), False)
        return True

    def _add_rendered(self, chat: Messages, first: int, *, whole: bool) -> None:
        masked, originals = mask_look_alikes(chat, list(self._form.special))
        found = render_with_spans(self._form, masked, first)
        edges = [edge for span in found.spans for edge in span]
        if whole and not originals:
            self._add_text(found.text, 0, edges, {}, control=True)
            return
        place = 0
        for number, piece in enumerate(
            self._special.split(found.text) if self._special else [found.text]
        ):
            if number % 2:
                self._append(-1 - self._form.special[piece], _is_inside(place, edges))
            elif piece:
                self._add_text(piece, place, edges, originals, control=False)
            place += len(piece)

    def _add_text(
        self,
        text: str,
        place: int,
        edges: list[int],
        originals: Mapping[str, str],
        *,
        control: bool,
    ) -> None:
        self._append(self._number(unmask(text, originals), control), _is_inside(place, edges))
        for edge in edges:
            if place < edge < place + len(text):
                self._switch(unmask(text[: edge - place], originals), control)

    def _append(self, piece: int, trained: bool) -> None:
        self._pieces.append(piece)
        self._trained.append(trained)

    def _switch(self, prefix: str, control: bool) -> None:
        self._switches.append((len(self._pieces) - 1, self._number(prefix, control)))

    def _number(self, text: str, control: bool) -> int:
        return self._numbers.setdefault((control, text), len(self._numbers))

    def encode(
        self, encode_batch: EncodeBatch
    ) -> tuple[Ids, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Ids of all chats, which of them are trained, and the number of ids of each chat."""
        plain = [text for control, text in self._numbers if not control]
        flat, offsets = (
            encode_batch(plain) if plain else (np.empty(0, np.int32), np.zeros(1, np.int64))
        )
        bounds = itertools.pairwise(offsets.tolist())
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
        return self._put_together()

    def _put_together(self) -> tuple[Ids, npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        pieces = np.array(self._pieces, np.int64)
        special = np.arange(max(0, -int(pieces.min(initial=0))), dtype=np.int32)
        source = np.concatenate([*self._ids, special])
        sizes = np.array([len(ids) for ids in self._ids], np.int64)
        begins = np.cumsum(sizes) - sizes
        is_text, text = pieces >= 0, np.maximum(pieces, 0)
        if len(sizes):
            starts = np.where(is_text, begins[text], int(sizes.sum()) - 1 - pieces)
            lengths = np.where(is_text, sizes[text], 1)
        else:
            starts, lengths = int(sizes.sum()) - 1 - pieces, np.ones(len(pieces), np.int64)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        ids = source[np.repeat(starts - (ends - lengths), lengths) + np.arange(total)]
        trained = np.repeat(np.array(self._trained, np.uint8), lengths)
        trained ^= self._changes(source, starts, lengths, ends)
        return ids, trained, np.diff(np.append(0, ends)[self._ends], prepend=0)

    def _changes(self, source: Ids, starts: Ids, lengths: Ids, ends: Ids) -> npt.NDArray[np.uint8]:
        """For each id 1 if it is trained otherwise than the first one of its piece."""
        toggles = np.zeros((int(ends[-1]) if len(ends) else 0) + 1, np.uint8)
        pieces, prefixes = np.array(self._switches, np.int64).reshape(-1, 2).T
        firsts = np.full(len(pieces), -1, np.int64)
        for prefix in np.unique(prefixes):
            before, where = self._ids[prefix], np.flatnonzero(prefixes == prefix)
            where = where[lengths[pieces[where]] >= len(before)]
            heads = source[starts[pieces[where], None] + np.arange(len(before))]
            firsts[where[(heads == before).all(axis=1)]] = len(before)
        for number in np.flatnonzero(firsts < 0):
            firsts[number] = self._first_after(self._pieces[pieces[number]], prefixes[number])
        last, place = -1, 0
        for piece, first in zip(pieces.tolist(), firsts.tolist(), strict=True):
            begin = int(ends[piece] - lengths[piece])
            place = max(place, first) if piece == last else first
            toggles[begin + place] ^= 1
            toggles[ends[piece]] ^= 1
            last = piece
        return np.bitwise_xor.accumulate(toggles)[:-1]

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


def _filled(parts: Sequence[Part], contents: Sequence[str]) -> str:
    return "".join([part if type(part) is str else contents[part] for part in parts])  # type: ignore[index]


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
