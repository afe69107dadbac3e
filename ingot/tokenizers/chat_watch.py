"""Whether a chat template looks into the contents of messages: it is run on contents that report
whatever asks something of them. Where it joins, trims and prints them only, its text is the same
for any others; where it also asks whether they hold, begin or end with a text, for all others that
do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot.tokenizers.chat_render import FIRST_MARK, environment_of, rendered

Shape = tuple[tuple[str, bool], ...]
"""For each message its role and whether it has a content."""

Question = tuple[str, int, str]
"""A key of `QUESTIONS`, the number of a content (2i as it is, 2i + 1 without outer whitespace), and
the text that was asked for.
"""
QUESTIONS: Mapping[str, Callable[[str, str], bool]] = {
    "__contains__": str.__contains__,
    "startswith": str.startswith,
    "endswith": str.endswith,
    "strip": lambda content, characters: content.strip(characters) != content,
    "lstrip": lambda content, characters: content[0] in characters,
    "rstrip": lambda content, characters: content[-1] in characters,
}
"""What a template may ask of a content, and whether the answer is yes: stripping changes it."""


@dataclass(frozen=True)
class Skeleton:
    """The text of a chat with a mark in place of each content: chr(FIRST_MARK + 2i) as it is, one
    more without outer whitespace. `times`: what the template was told of the time, by pattern.
    `asked`: what it asked of contents and was answered no.
    """

    text: str
    times: Mapping[str, str]
    asked: tuple[Question, ...]


def _watched(name: str) -> Callable[..., Any]:
    def look(self: _Unseen, *_: Any, **__: Any) -> Any:
        self._watch.seen.append(name)
        raise TypeError(f"{name} looks into a content")

    return look


OF_JINJA = {"_loop_vars", "_block_vars"}
"""What compiled templates pass beside the arguments of a function."""
UNWATCHED = {
    *dir(object),
    "__getnewargs__",
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
}
_Watched: Any = type(
    "_Watched", (str,), {name: _watched(name) for name in dir(str) if name not in UNWATCHED}
)


class _Unseen(_Watched):  # type: ignore[misc]
    """A content that can be joined with text, trimmed, printed, and is not empty. The answer to
    `QUESTIONS` is no, and noted; whatever else is asked of it is noted and fails, as a sandbox may
    swallow the failure.
    """

    _watch: _WatchedEnvironment

    @classmethod
    def of(cls, text: str, watch: _WatchedEnvironment) -> _Unseen:
        made = cls(text)
        made._watch = watch
        return made

    def __add__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(self) + _plain(other), self._watch)

    def __radd__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(other) + _plain(self), self._watch)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def __contains__(self, text: str) -> bool:
        return self._note("__contains__", text)

    def startswith(self, text: str) -> bool:
        return self._note("startswith", text)

    def endswith(self, text: str) -> bool:
        return self._note("endswith", text)

    def lstrip(self, chars: str) -> _Unseen:
        self._note("lstrip", chars)
        return self

    def rstrip(self, chars: str) -> _Unseen:
        self._note("rstrip", chars)
        return self

    def strip(self, chars: str | None = None) -> _Unseen:
        if chars is not None:
            self._note("strip", chars)
            return self
        self._check_alone("strip")
        return _Unseen.of(chr(ord(_plain(self)) | 1), self._watch)

    def _note(self, question: str, text: str) -> bool:
        if type(text) is not str or not text:
            self._watch.seen.append(question)
            raise TypeError(f"{question} does not ask for a text")
        self._check_alone(question)
        self._watch.asked.append((question, ord(_plain(self)) - FIRST_MARK, text))
        return False

    def _check_alone(self, question: str) -> None:
        if len(_plain(self)) != 1:
            self._watch.seen.append(question)
            raise TypeError(f"{question} looks into a content that was joined with text")


def _plain(text: str) -> str:
    """The characters, as a str and nothing more."""
    return str.__str__(text)


class _WatchedEnvironment(ImmutableSandboxedEnvironment):
    """Notes in `seen` each function that a template calls and that might look into a content
    without asking it, in `times` what the template is told of the time, in `asked` what it asks of
    contents.
    """

    seen: list[str]
    times: dict[str, str]
    asked: list[Question]

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        own = getattr(function, "__self__", None)
        # A text that is no content, asked for such texts, cannot tell of one.
        plain = type(own) is str and all(type(text) is str for text in args)
        plain = plain and not set(kwargs) - OF_JINJA
        if (
            own.__class__ is not _Unseen
            and not plain
            and function
            not in (
                self.globals["namespace"],
                self.globals["strftime_now"],
                self.globals["range"],
            )
        ):
            self.seen.append(str(function))
        found = super().call(context, function, *args, **kwargs)
        if function is self.globals["strftime_now"]:
            self.times[args[0]] = found
        return found


def skeleton_of(template: str, named: Mapping[str, str], shape: Shape) -> Skeleton | None:
    """What the template writes around the contents of a chat of this shape; None if it looks into
    one.

    Raises:
        WrongInput: the template refuses such a chat.
    """
    compiled, environment = _watched_template(template)
    environment.seen.clear()
    environment.times.clear()
    environment.asked.clear()
    chat = [
        {
            "role": role,
            "content": _Unseen.of(chr(FIRST_MARK + 2 * number), environment) if said else "",
        }
        for number, (role, said) in enumerate(shape)
    ]
    text = rendered(lambda: compiled, chat, named)
    return (
        None
        if environment.seen
        else Skeleton(text, dict(environment.times), tuple(dict.fromkeys(environment.asked)))
    )


@functools.lru_cache(maxsize=16)
def _watched_template(template: str) -> tuple[jinja2.Template, _WatchedEnvironment]:
    environment: Any = environment_of(_WatchedEnvironment)
    environment.seen, environment.times, environment.asked = [], {}, []
    tables: tuple[tuple[dict[str, Any], set[str]], ...] = (
        (environment.filters, {"trim", "length", "first", "last"}),
        (environment.tests, {"defined", "undefined", "none", "string", "mapping"}),
    )
    for table, kept in tables:
        for name in set(table) - kept:
            table[name] = functools.partial(_noted, environment.seen, name)
    return environment.from_string(template), environment


def _noted(seen: list[str], name: str, *_: Any, **__: Any) -> None:
    seen.append(name)
    raise TypeError(f"{name} may look into a content")


@functools.lru_cache(maxsize=16)
def joins_only(template: str) -> bool:
    """Whether no construct of a template makes a plain text of a content and lets it look into that
    later: what a macro or a block returns, `~`, `%`, and the search for one text in another.
    """
    tree = environment_of().parse(template)
    hidden = (nodes.Concat, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
    known = (nodes.Const, nodes.List, nodes.Tuple)
    return (
        next(tree.find_all(hidden), None) is None
        and all(isinstance(node.right, nodes.Const) for node in tree.find_all(nodes.Mod))
        and all(
            isinstance(node.expr, nodes.Const)
            or all(
                operand.op not in ("in", "notin") or isinstance(operand.expr, known[1:])
                for operand in node.ops
            )
            for node in tree.find_all(nodes.Compare)
        )
    )
