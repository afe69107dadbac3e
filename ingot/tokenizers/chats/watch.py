"""Whether a chat template looks into the contents of messages: it is run on contents that report
whatever asks something of them. Where it joins, trims and prints them only, its text is the same
for any others; where it also asks whether they hold, begin or end with a text, for all others that
do not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ingot.base.errors import WrongInput
from ingot.tokenizers.chats.chat import Messages, Tools
from ingot.tokenizers.chats.render import environment_of, rendered
from ingot.tokenizers.chats.unseen import Unseen, UnseenMapping, Watch, json_of

OF_JINJA = {"_loop_vars", "_block_vars"}
"""What compiled templates pass beside the arguments of a function."""
FILTERS = {"trim", "length", "first", "last", "list", "default", "d", "string", "map"}
FILTERS |= {"select", "reject", "selectattr", "rejectattr"}
TESTS = {"defined", "undefined", "none", "string", "mapping", "number", "integer", "float"}
TESTS |= {"boolean", "true", "false", "iterable", "equalto", "eq", "==", "ne", "!="}
"""What asks for the kind of a value alone, or asks the value itself."""
OF_MAPPINGS = {"get", "items", "keys", "values"}


class _WatchedEnvironment(ImmutableSandboxedEnvironment):
    """Notes each function that a template calls and that might look into a content without asking
    it, and what the template is told of the time.
    """

    watch: Watch

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Visible().visit(super()._parse(source, name, filename))
        tree.set_lineno(1).set_environment(self)
        return tree

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_blind(function, args, kwargs):
            self.watch.seen.append(str(function))
        found = super().call(context, function, *args, **kwargs)
        if function is self.globals["strftime_now"]:
            self.watch.times[args[0]] = found
        return self.watch.text(found) if type(found) is str else found

    def _is_blind(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function cannot look into a content, unless the content notes it."""
        own = getattr(function, "__self__", None)
        if own.__class__ is Unseen or isinstance(function, Macro):
            return True
        if function is self.globals["namespace"]:
            return not args
        # A text that is no content, asked for such texts, cannot tell of one.
        if any(isinstance(value, Unseen | UnseenMapping) for value in (*args, *kwargs.values())):
            return False
        if type(own) is str:
            return all(type(text) is str for text in args) and not set(kwargs) - OF_JINJA
        return (type(own) is dict and function.__name__ in OF_MAPPINGS) or function in (
            self.globals["strftime_now"],
            self.globals["raise_exception"],
            self.globals["range"],
        )


def skeleton_of(
    template: str,
    named: Mapping[str, str],
    chat: Messages,
    watch: Watch,
    *,
    generation_prompt: bool,
    tools: Tools | None,
) -> str | None:
    """What the template writes around the values of a chat, which stand in it as unseen ones of
    `watch`. None if it looks into one.

    Raises:
        WrongInput: the template refuses such a chat.
    """
    compiled, environment = _watched_template(template)
    environment.watch = watch
    try:
        text = rendered(
            lambda: compiled, chat, named, generation_prompt=generation_prompt, tools=tools
        )
    except WrongInput:
        if watch.seen:
            return None
        raise
    return None if watch.seen else text


@functools.lru_cache(maxsize=16)
def _watched_template(template: str) -> tuple[jinja2.Template, _WatchedEnvironment]:
    environment: Any = environment_of(_WatchedEnvironment)
    environment.watch = Watch()
    for table, kept in ((environment.filters, FILTERS), (environment.tests, TESTS)):
        for name in set(table) - kept:
            table[name] = functools.partial(_noted, environment, name)
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **settings: json_of(
        value, environment.watch, ensure_ascii=ensure_ascii, **settings
    )
    environment.filters[CONTENT] = lambda text: environment.watch.text(text)
    environment.filters[HOLDS] = functools.partial(_holds, environment)
    environment.filters[PERCENT] = functools.partial(_percent, environment)
    environment.tests["iterable"] = functools.partial(_is_iterable, environment.tests["iterable"])
    return environment.from_string(template), environment


CONTENT, HOLDS, PERCENT = "(content)", "(holds)", "(percent)"
"""Filters that no template can name."""


class _Visible(NodeTransformer):
    """Replaces what makes a plain text of a content, or looks into one without asking it, by
    filters that do the same and tell of it.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        texts: list[nodes.Expr] = [_filtered("string", self.visit(part)) for part in node.nodes]
        return functools.reduce(nodes.Add, texts)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        if node.filter is None:
            node.filter = _filtered(CONTENT, None)
        return node

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:
        return _filtered(PERCENT, self.visit(node.left), self.visit(node.right))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            return node
        found = _filtered(HOLDS, node.ops[0].expr, node.expr)
        return found if node.ops[0].op == "in" else nodes.Not(found)


def _filtered(name: str, value: nodes.Expr | None, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


def _holds(environment: _WatchedEnvironment, whole: Any, part: Any) -> bool:
    if isinstance(part, Unseen) and isinstance(whole, str):
        raise environment.watch.looked("in")
    return part in whole


def _percent(environment: _WatchedEnvironment, left: Any, right: Any) -> Any:
    if isinstance(left, str) and not type(left) is type(right) is str:
        raise environment.watch.looked("%")
    return left % right


def _is_iterable(test: Any, value: Any) -> bool:
    return isinstance(value, Unseen | UnseenMapping) or test(value)


def _noted(environment: _WatchedEnvironment, name: str, *_: Any, **__: Any) -> None:
    raise environment.watch.looked(name)


@functools.lru_cache(maxsize=16)
def joins_only(template: str) -> bool:
    """Whether no construct of a template makes a plain text of a content where that is not seen."""
    tree = environment_of().parse(template)
    hidden = (nodes.CallBlock, nodes.FilterBlock)
    return (
        next(tree.find_all(hidden), None) is None
        and all(node.filter is None for node in tree.find_all(nodes.AssignBlock))
        and all(
            len(node.ops) == 1 or all(operand.op not in ("in", "notin") for operand in node.ops)
            for node in tree.find_all(nodes.Compare)
        )
    )
