"""Puts the ids of many chats together: their distinct texts are encoded in one call, and all chats
of one layout are laid out as one array.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ingot.base.errors import WrongInput
from ingot.base.exact_json import compact_json
from ingot.tokenizers.backend import TokenBatch
from ingot.tokenizers.chats.chat import Chat
from ingot.tokenizers.chats.layouts import ChatLayout, LayoutKey, Part
from ingot.tokenizers.chats.render import (
    any_of_pattern,
    has_look_alikes,
    mask_look_alikes,
    strings_in,
    unmask,
)
from ingot.tokenizers.chats.shapes import Shape, shape_of
from ingot.tokenizers.chats.spans import RenderedChat, trained_texts
from ingot.tokenizers.chats.unseen import QUESTIONS, Value
from ingot.tokenizers.tokenizer import Tokenizer

EncodeBatch = Callable[[Sequence[str]], TokenBatch]
Ids = npt.NDArray[np.int32]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.uint8]
Filling = tuple[str, int, str, tuple[Part, ...]]
"""A text of a chat: what is before a content, its number, what is after it, and more parts."""


class ChatPlan:
    """The texts of a batch of chats, and the pieces that they are put together from, all in a row.
    A chat is one text, or several where its answers cannot all be trained in one.

    A piece is a number: that of its text, or -1 - id of a special token. A switch is a place in a
    piece where it becomes trained, or no longer is: the piece, and the text that ends there.
    """

    def __init__(self, tokenizer: Tokenizer, *, whole: bool) -> None:
        """`whole`: encode the text of a chat in one piece with the reference, unless it contains
        look-alikes of special tokens.
        """
        self._tokenizer, self._form, self._whole = tokenizer, tokenizer.chat_format, whole
        special = self._form.special
        self._special = any_of_pattern(tuple(special)) if special else None
        self._texts: list[str] = []
        self._control: list[int] = []
        """The numbers of texts in which special tokens are special."""
        self._groups: dict[LayoutKey, _LayoutGroup] = {}
        self._places: list[int] = []
        """Of each piece of a rendered chat its place among all."""
        self._pieces: list[int] = []
        self._trained: list[bool] = []
        self._switches: list[tuple[int, int]] = []
        self._ends: list[int] = []
        """Where the pieces of each text of a chat end."""
        self._count = 0
        self.counts: list[int] = []
        """Of each chat the number of its texts."""
        self.messages: list[int] = []
        """Of each text how many of the chat's messages the template writes so."""
        self.rendered = 0
        """How many chats were rendered for themselves: their layout was not known, or is not
        exact.
        """

    def add(self, chats: Sequence[Chat], firsts: Sequence[int]) -> None:
        """Plan chats, each trained from one of its messages on.

        Raises:
            WrongInput: the template refuses a chat, or a turn is not found in it.
        """
        chats = [self._form.as_read(chat) for chat in chats]
        shaped = [None if self._whole else shape_of(chat.messages) for chat in chats]
        # What looks alike is masked, also from trimming.
        doubtful = self._looks_alike([value for found in shaped if found for value in found[1]])
        for chat, found, first in zip(chats, shaped, firsts, strict=True):
            group = found and self._group(found[0], first, chat)
            if (
                not found
                or not group
                or (doubtful and self._looks_alike(found[1]))
                or (texts := group.filled(found[1])) is None
            ):
                self._add_rendered(chat, first)
            else:
                group.starts.append(self._count)
                group.firsts.append(len(self._texts))
                self._texts += texts
                self._count += len(group.pieces)
                self._ends.append(self._count)
                self.counts.append(1)
                self.messages.append(len(chat))

    def _looks_alike(self, values: Sequence[Value]) -> bool:
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            texts = list(strings_in(values))
        return has_look_alikes(texts, self._special)

    def _group(self, shape: Shape, first: int, chat: Chat) -> _LayoutGroup | None:
        key = shape, first, "" if chat.tools is None else compact_json(chat.tools)
        group = self._groups.get(key)
        if group is None and (layout := self._tokenizer.chat_layouts.find(*key)):
            group = self._groups[key] = _LayoutGroup(layout, self._number, self._special)
        return group

    def _add_rendered(self, chat: Chat, first: int) -> None:
        messages = chat.messages
        if not messages or any(not isinstance(one.get("role"), str) for one in messages):
            raise WrongInput(
                "a chat is a list of one or more messages, each with a `role`; give at least one"
            )
        self.rendered += 1
        (masked, tools), originals = mask_look_alikes(
            [messages, chat.tools], list(self._form.special)
        )
        texts = trained_texts(self._form.with_tools(tools), masked, first)
        for text in texts:
            self._add_pieces(text, originals)
            self._ends.append(self._count)
            self.messages.append(text.messages)
        self.counts.append(len(texts))

    def _add_pieces(self, found: RenderedChat, originals: Mapping[str, str]) -> None:
        edges = [edge for span in found.spans for edge in span]
        if self._whole and not originals:
            self._control.append(len(self._texts))
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
        self._append(self._number(unmask(text, originals)), _is_inside(place, edges))
        for edge in edges:
            if place < edge < place + len(text):
                if control:
                    self._control.append(len(self._texts))
                prefix = self._number(unmask(text[: edge - place], originals))
                self._switches.append((self._count - 1, prefix))

    def _append(self, piece: int, trained: bool) -> None:
        self._places.append(self._count)
        self._pieces.append(piece)
        self._trained.append(trained)
        self._count += 1

    def _number(self, text: str) -> int:
        self._texts.append(text)
        return len(self._texts) - 1

    def encode(self, encode_batch: EncodeBatch) -> tuple[Ids, Mask, Indices]:
        """Ids of all texts, which of them are trained, and the number of ids of each text."""
        pieces, trained = np.empty(self._count, np.int64), np.empty(self._count, np.uint8)
        pieces[self._places], trained[self._places] = self._pieces, self._trained
        switches = [np.array(self._switches, np.int64).reshape(-1, 2)]
        for group in self._groups.values():
            switches.append(group.lay_out(pieces, trained))
        by_piece = np.concatenate(switches)
        by_piece = by_piece[np.argsort(by_piece[:, 0], kind="stable")]
        texts = _EncodedTexts(self._tokenizer, self._texts, self._control, encode_batch)
        ids, mask, ends = texts.put_together(pieces, trained, by_piece)
        return ids, mask, np.diff(np.append(0, ends)[self._ends], prepend=0)


class _LayoutGroup:
    """The chats of one layout in a batch.

    Of each piece `pieces` has the special token, or the number of a text that all chats have, or
    where `own` is 1 the number of a text among those of one chat.
    """

    def __init__(
        self,
        layout: ChatLayout,
        number: Callable[[str], int],
        special: re.Pattern[str] | None,
    ) -> None:
        self.starts: list[int] = []
        """Of each chat the place of its first piece."""
        self.firsts: list[int] = []
        """Of each chat the number of its first text."""
        self._fillings: list[Filling] = []
        self._slots, self._asked, self._special = layout.slots, layout.asked, special
        self._as_json = [
            number for number, slot in enumerate(layout.slots) if slot.settings is not None
        ]
        found = [
            (-1 - piece.token, 0) if piece.token is not None else self._text(piece.parts, number)
            for piece in layout.pieces
        ]
        self.pieces, self._own = np.array(found, np.int64).reshape(-1, 2).T
        self._trained = np.array([piece.trained for piece in layout.pieces], np.uint8)
        self._switches = np.array(
            [
                (place, *self._text(prefix, number))
                for place, piece in enumerate(layout.pieces)
                for prefix in piece.switches
            ],
            np.int64,
        ).reshape(-1, 3)

    def _text(self, parts: Sequence[Part], number: Callable[[str], int]) -> tuple[int, int]:
        """A text that all chats have, or one of each chat; its number, and 1 for the latter."""
        at = next((at for at, part in enumerate(parts) if not isinstance(part, str)), None)
        if at is None:
            return number("".join(map(str, parts))), 0
        rest = tuple(parts[at + 1 :])
        after = str(rest[0]) if rest and isinstance(rest[0], str) else ""
        more = rest[1:] if after else rest
        self._fillings.append(("".join(map(str, parts[:at])), int(parts[at]), after, more))
        return len(self._fillings) - 1, 1

    def filled(self, values: Sequence[Value]) -> list[str] | None:
        """The texts of one chat; None if the layout is not that of a chat with these values."""
        if any(
            QUESTIONS[question](slot.text(values), text) for question, slot, text in self._asked
        ):
            return None
        said = [slot.text(values) for slot in self._slots]
        # Writing values as JSON puts characters beside each other that were not.
        if self._as_json and has_look_alikes([said[n] for n in self._as_json], self._special):
            return None
        return [
            before + said[number] + after + (_joined(more, said) if more else "")
            for before, number, after, more in self._fillings
        ]

    def lay_out(self, pieces: Indices, trained: Mask) -> Indices:
        """Write the pieces of the group's chats to their places among all; returns the switches,
        [S, 2].
        """
        starts, firsts = np.array(self.starts, np.int64), np.array(self.firsts, np.int64)
        places = starts[:, None] + np.arange(len(self.pieces))
        pieces[places] = self.pieces + firsts[:, None] * self._own
        trained[places] = self._trained
        place, text, own = self._switches.T
        found = np.empty((len(starts), len(place), 2), np.int64)
        found[:, :, 0] = starts[:, None] + place
        found[:, :, 1] = text + firsts[:, None] * own
        return found.reshape(-1, 2)


class _EncodedTexts:
    """The ids of all texts of a batch: those of text i are `lengths[i]` ids of `ids` from
    `begins[i]` on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        control: Sequence[int],
        encode_batch: EncodeBatch,
    ) -> None:
        self._decode = tokenizer.decode
        special = set(control)
        plain = [text for number, text in enumerate(texts) if number not in special]
        numbers = {text: number for number, text in enumerate(dict.fromkeys(plain))}
        flat, offsets = (
            encode_batch(list(numbers))
            if numbers
            else (np.empty(0, np.int32), np.zeros(1, np.int64))
        )
        encode = tokenizer.chat_format.control.encode
        alone = [
            np.array(encode(texts[number], add_special_tokens=False).ids, np.int32)
            for number in control
        ]
        bounds = np.append(offsets, offsets[-1] + np.cumsum([len(ids) for ids in alone]))
        index = np.array([numbers.get(text, 0) for text in texts], np.int64)
        index[list(control)] = len(numbers) + np.arange(len(control))
        self.ids: Ids = np.concatenate([flat, *alone])
        self.begins: Indices = bounds[index].astype(np.int64)
        self.lengths: Indices = bounds[index + 1].astype(np.int64) - self.begins

    def put_together(
        self, pieces: Indices, trained: Mask, switches: Indices
    ) -> tuple[Ids, Mask, Indices]:
        """The ids of all pieces, which of them are trained, and where each piece ends."""
        special = -1 - pieces[pieces < 0]
        source = np.append(self.ids, np.arange(int(special.max(initial=-1)) + 1, dtype=np.int32))
        begins, lengths = len(self.ids) - 1 - pieces, np.ones(len(pieces), np.int64)
        is_text = pieces >= 0
        begins[is_text] = self.begins[pieces[is_text]]
        lengths[is_text] = self.lengths[pieces[is_text]]
        ends = np.cumsum(lengths)
        count = int(ends[-1]) if len(ends) else 0
        ids = source[np.repeat(begins - (ends - lengths), lengths) + np.arange(count)]
        mask = np.repeat(trained, lengths)
        if len(switches):
            mask ^= self._toggles(pieces, ends - lengths, ends, switches)
        return ids, mask, ends

    def _toggles(self, pieces: Indices, begins: Indices, ends: Indices, switches: Indices) -> Mask:
        """For each id 1 if it is trained otherwise than the first one of its piece."""
        piece, prefix = switches.T
        firsts = self._firsts_after(pieces[piece], prefix)
        # Of several switches in a piece none is before an earlier one.
        room = int(ends[-1]) + 1
        firsts = np.maximum.accumulate(piece * room + firsts) - piece * room
        toggles = np.zeros(room, np.uint8)
        np.bitwise_xor.at(toggles, begins[piece] + firsts, np.uint8(1))
        np.bitwise_xor.at(toggles, ends[piece], np.uint8(1))
        return np.bitwise_xor.accumulate(toggles)[:-1]

    def _firsts_after(self, texts: Indices, prefixes: Indices) -> Indices:
        """For each text the index of its first token that begins at the end of a prefix or later:
        as many as the prefix has tokens, if the text begins with these.
        """
        sizes = self.lengths[prefixes]
        whole = np.flatnonzero(sizes <= self.lengths[texts])
        counts = sizes[whole]
        ends = np.cumsum(counts)
        place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        differ = (
            self.ids[np.repeat(self.begins[texts[whole]], counts) + place]
            != self.ids[np.repeat(self.begins[prefixes[whole]], counts) + place]
        )
        seen = np.append(0, np.cumsum(differ))
        found = np.full(len(texts), -1, np.int64)
        alike = whole[seen[ends] == seen[ends - counts]]
        found[alike] = sizes[alike]
        for number in np.flatnonzero(found < 0).tolist():
            found[number] = self._first_after(int(texts[number]), int(prefixes[number]))
        return found

    def _first_after(self, text: int, prefix: int) -> int:
        """The same where a token crosses the end of the prefix: the next one begins where the
        decoded text is as long as the prefix.
        """
        ids, before = self._ids_of(text), self._ids_of(prefix)
        same = min(len(ids), len(before))
        differ = np.flatnonzero(ids[:same] != before[:same])
        wanted = len(self._decode(before, skip_special=False))
        first = int(differ[0]) if len(differ) else same
        return next(
            (
                count
                for count in range(first, len(ids))
                if len(self._decode(ids[:count], skip_special=False)) >= wanted
            ),
            len(ids),
        )

    def _ids_of(self, text: int) -> Ids:
        begin = int(self.begins[text])
        return self.ids[begin : begin + int(self.lengths[text])]


def _joined(parts: Sequence[Part], said: Sequence[str]) -> str:
    return "".join([part if isinstance(part, str) else said[part] for part in parts])


def _is_inside(place: int, edges: list[int]) -> bool:
    """Whether a place lies inside one of the spans given by their ascending edges."""
    return bisect.bisect_right(edges, place) % 2 == 1
