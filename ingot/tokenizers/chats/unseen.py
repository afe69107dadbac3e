"""What stands in for the contents of a chat while a template is watched: text that can be joined,
trimmed and written as JSON, and that notes whatever else is asked of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.tokenizers.chats.render import FIRST_MARK, to_json

LAST_MARK = 0x10FFEF
Value = str | Mapping[str, Any]
"""What a chat says in one place: a text, or the arguments of a tool call."""

QUESTIONS: Mapping[str, Callable[[str, str], bool]] = {
    "__contains__": str.__contains__,
    "__eq__": str.__eq__,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "strip": lambda content, characters: content.strip(characters) != content,
    "lstrip": lambda content, characters: content[0] in characters,
    "rstrip": lambda content, characters: content[-1] in characters,
}
"""What a template may ask of a content, and whether the answer is yes: stripping changes it."""


@dataclass(frozen=True)
class Slot:
    """The place of a value in the text of a chat, and how the template writes it there: without
    whitespace at one end or both, or as JSON with some settings.
    """

    value: int
    left: bool = False
    right: bool = False
    settings: tuple[tuple[str, Any], ...] | None = None

    def text(self, values: Sequence[Value]) -> str:
        """What the template writes in a chat with these values."""
        value = values[self.value]
        if self.settings is not None:
            return to_json(value, **dict(self.settings))
        text = str(value)
        if self.left:
            return text.strip() if self.right else text.lstrip()
        return text.rstrip() if self.right else text


Question = tuple[str, Slot, str]
"""A key of `QUESTIONS`, of what it was asked, and the text that was asked for."""


@dataclass
class Watch:
    """The slots of a chat, each with a private-use character as its mark, and what a template did
    with them: `seen` names what may have looked into a value, `asked` are questions that were
    answered with no, `times` is what the template was told of the time, by pattern.
    """

    seen: list[str] = field(default_factory=list)
    asked: list[Question] = field(default_factory=list)
    times: dict[str, str] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    _marks: dict[Slot, str] = field(default_factory=dict)

    def mark(self, slot: Slot) -> str:
        if slot not in self._marks:
            mark = FIRST_MARK + len(self.slots)
            if mark > LAST_MARK:
                raise self.looked("a chat with so many contents")
            self._marks[slot] = chr(mark)
            self.slots.append(slot)
        return self._marks[slot]

    def slot(self, mark: str) -> Slot:
        return self.slots[ord(mark) - FIRST_MARK]

    def text(self, text: str, length: int | None = None) -> Any:
        """A text with marks; one without is returned as it is."""
        if all(map(_is_plain, text)):
            return text
        made = Unseen(text)
        made._watch, made._length = self, length
        return made

    def mapping(self, value: int) -> UnseenMapping:
        made = UnseenMapping()
        made._watch, made._value = self, value
        return made

    def looked(self, how: str) -> TypeError:
        """The error for something that may have looked into a value. It is noted, as a sandbox may
        swallow it.
        """
        self.seen.append(how)
        return TypeError(f"{how} looks into a content")


def _watched(name: str) -> Callable[..., Any]:
    def look(self: Any, *_: Any, **__: Any) -> Any:
        raise self._watch.looked(name)

    return look


UNWATCHED = {
    *dir(object),
    "__getnewargs__",
    "__class_getitem__",
} - {
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__format__",
    "__repr__",
    "__str__",
}


def _watching(kind: type) -> Any:
    """A subclass all of whose methods look."""
    names = {*dir(kind)} - UNWATCHED
    return type(f"_Watched{kind.__name__}", (kind,), {name: _watched(name) for name in names})


class UnseenMapping(_watching(dict)):  # type: ignore[misc]
    """The arguments of a tool call, which are not empty and can be written as JSON."""

    _watch: Watch
    _value: int

    def __bool__(self) -> bool:
        return True


class Unseen(_watching(str)):  # type: ignore[misc]
    """A text with marks, which is not empty. The answer to `QUESTIONS` is no, and noted."""

    _watch: Watch
    _length: int | None
    __hash__ = _watched("__hash__")

    def __add__(self, other: str) -> Any:
        return self._watch.text(plain(self) + plain(other))

    def __radd__(self, other: str) -> Any:
        return self._watch.text(plain(other) + plain(self))

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        if self._length is None:
            raise self._watch.looked("__len__")
        return self._length

    def __eq__(self, other: object) -> bool:
        if other is self or not isinstance(other, str) or (type(other) is str and not other):
            return other is self
        return self._note("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            raise TypeError("a text has no keys")
        text = plain(self)
        if not isinstance(key, slice) or key.step is not None:
            raise self._watch.looked("__getitem__")
        # Plain characters may be cut off at the ends, as far as these are known.
        begin, end = key.start or 0, len(text) if key.stop is None else len(text) + key.stop
        known = 0 <= begin <= end and (key.stop is None or key.stop < 0)
        if not known or not all(map(_is_plain, text[:begin] + text[end:])):
            raise self._watch.looked("__getitem__")
        return self._watch.text(text[begin:end])

    def __contains__(self, text: str) -> bool:
        return self._note("__contains__", text)

    def startswith(self, *texts: Any) -> bool:
        return self._note("startswith", *texts)

    def endswith(self, *texts: Any) -> bool:
        return self._note("endswith", *texts)

    def split(self, *texts: Any, **settings: Any) -> list[Unseen]:
        self._note("__contains__", *texts, *settings)
        return [self]

    def replace(self, *texts: Any) -> Unseen:
        self._note("__contains__", *texts[:1])
        return self

    def lstrip(self, chars: str | None = None) -> Any:
        return self._stripped("lstrip", chars, left=True)

    def rstrip(self, chars: str | None = None) -> Any:
        return self._stripped("rstrip", chars, right=True)

    def strip(self, chars: str | None = None) -> Any:
        return self._stripped("strip", chars, left=True, right=True)

    def _stripped(
        self, how: str, chars: str | None, *, left: bool = False, right: bool = False
    ) -> Any:
        if chars is not None:
            self._note(how, chars)
            return self
        text = plain(self)
        # No value is white space alone, so no more than the first and the last can lose any.
        if left:
            text = text.lstrip()
            text = self._trimmed(text[0], left=True) + text[1:]
        if right:
            text = text.rstrip()
            text = text[:-1] + self._trimmed(text[-1], right=True)
        return self._watch.text(text)

    def _trimmed(self, mark: str, *, left: bool = False, right: bool = False) -> str:
        """The mark of the same value without whitespace at an end; other characters stay."""
        if _is_plain(mark) or (slot := self._watch.slot(mark)).settings is not None:
            return mark
        return self._watch.mark(replace(slot, left=slot.left or left, right=slot.right or right))

    def _note(self, question: str, *texts: Any) -> bool:
        mark = plain(self)
        if len(mark) != 1 or [type(text) for text in texts] != [str] or not texts[0]:
            raise self._watch.looked(question)
        self._watch.asked.append((question, self._watch.slot(mark), texts[0]))
        return False


def plain(text: str) -> str:
    """The characters, as a str and nothing more."""
    return str.__str__(text)


def _is_plain(character: str) -> bool:
    return not FIRST_MARK <= ord(character) <= LAST_MARK


def json_of(value: Any, watch: Watch, **settings: Any) -> Any:
    """What `tojson` writes, with marks for values in it."""
    if isinstance(value, UnseenMapping):
        return watch.text(watch.mark(Slot(value._value, settings=_sorted(settings))))
    if isinstance(value, Unseen):
        mark = plain(value)
        slot = watch.slot(mark) if len(mark) == 1 and not _is_plain(mark) else None
        if slot is None or slot != Slot(slot.value):
            raise watch.looked("tojson")
        return watch.text(watch.mark(replace(slot, settings=_sorted(settings))))
    if not _holds_unseen(value):
        return to_json(value, **settings)
    # Without these settings the text of a whole is that of its parts.
    if (
        settings.get("indent") is not None
        or settings.get("separators")
        or settings.get("sort_keys")
    ):
        raise watch.looked("tojson")
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise watch.looked("tojson")
        pairs = [
            f"{json.dumps(key, ensure_ascii=bool(settings.get('ensure_ascii')))}: "
            + plain(json_of(item, watch, **settings))
            for key, item in value.items()
        ]
        return watch.text("{" + ", ".join(pairs) + "}")
    items = [plain(json_of(item, watch, **settings)) for item in value]
    return watch.text("[" + ", ".join(items) + "]")


def _holds_unseen(value: Any) -> bool:
    if isinstance(value, Unseen | UnseenMapping):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_unseen, (*value.keys(), *value.values())))
    return isinstance(value, list | tuple) and any(map(_holds_unseen, value))


def _sorted(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))
