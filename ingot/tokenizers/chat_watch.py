"""Whether a chat template looks into the contents of messages: it is run on contents that report
whatever asks something of them, and where it joins, trims and prints them only, its text is the
same for any others.
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


@dataclass(frozen=True)
class Skeleton:
    """The text of a chat with a mark in place of each content: chr(FIRST_MARK + 2i) as it is, one
    more without outer whitespace. `times`: what the template was told of the time, by pattern.
    """

    text: str
    times: Mapping[str, str]


def _watched(name: str) -> Callable[..., Any]:
    def look(self: _Unseen, *_: Any, **__: Any) -> Any:
        self._seen.append(name)
        raise TypeError(f"{name} looks into a content")

    return look


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
    """A content that can be joined with text, trimmed, printed, and is not empty. Whatever else is
    asked of it is noted in `_seen` and fails, as a sandbox may swallow the failure.
    """

    _seen: list[str]

    @classmethod
    def of(cls, text: str, seen: list[str]) -> _Unseen:
        made = cls(text)
        made._seen = seen
        return made

    def __add__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(self) + _plain(other), self._seen)

    def __radd__(self, other: str) -> _Unseen:
        return _Unseen.of(_plain(other) + _plain(self), self._seen)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return True

    def strip(self, chars: str | None = None) -> _Unseen:
        text = _plain(self)
        if chars is not None or len(text) != 1:
            self._seen.append("strip")
            raise TypeError("a joined content cannot be trimmed unseen")
        return _Unseen.of(chr(ord(text) | 1), self._seen)


def _plain(text: str) -> str:
    """The characters, as a str and nothing more."""
    return str.__str__(text)


class _WatchedEnvironment(ImmutableSandboxedEnvironment):
    """Notes in `seen` each function that a template calls and that might look into a content
    without asking it, and in `times` what the template is told of the time.
    """

    seen: list[str]
    times: dict[str, str]

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__self__", None).__class__ is not _Unseen and function not in (
            self.globals["namespace"],
            self.globals["strftime_now"],
            self.globals["range"],
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
    chat = [
        {
            "role": role,
            "content": _Unseen.of(chr(FIRST_MARK + 2 * number), environment.seen) if said else "",
        }
        for number, (role, said) in enumerate(shape)
    ]
    text = rendered(lambda: compiled, chat, named)
    return None if environment.seen else Skeleton(text, dict(environment.times))


@functools.lru_cache(maxsize=16)
def _watched_template(template: str) -> tuple[jinja2.Template, _WatchedEnvironment]:
    environment: Any = environment_of(_WatchedEnvironment)
    environment.seen, environment.times = [], {}
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
