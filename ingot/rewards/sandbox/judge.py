"""Inside the sandbox of the tests: runs them, with what they need of the answer as stand-ins that
ask its sandbox. All comparisons are made here, on plain data: an answer that prints "passed", ends
its process, replaces builtins or returns an object that equals everything proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from typing import Any

from ingot.rewards.sandbox.operations import become
from ingot.rewards.sandbox.stand_in import CannotJudge, Lent, StandIn, message_of
from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

ABSENT = object()
ELSEWHERE = ("redirect_stdout", "redirect_stderr", "patch", "asyncio", "unittest")
"""What tests may import that replaces, watches or runs things of their own process alone."""
LARGE = 1000
"""Items of a list that is copied once."""
STREAMS = ("stdin", "stdout", "stderr")
CHANGING = {
    *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "discard"),
    *("update", "setdefault", "popitem"),
}
"""Methods by which tests change a list, a set or a dict."""


class Answer:
    """The answer's sandbox as the judge sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[Exception]] = {}
        self._objects: dict[int, StandIn] = {}
        self._lent: list[Lent] = []
        self.lends = False
        """Whether tests change lists, sets or dicts that may be part of an object."""

    def start(self) -> None:
        """Let the code run."""
        if self._channel.receive() != "ready":
            raise BadMessage("it is not ready")
        self._channel.send("run")

    def look_up(self, name: str) -> Any:
        """What the code calls by this name; ABSENT if it has no such name."""
        reply = self._ask({"name": name})
        return ABSENT if "absent" in reply else self._value(reply)

    def do(self, what: str, on: Any, *given: Any, **named: Any) -> Any:
        """Have the answer's process do an operation on one of its objects."""
        request = {
            "do": what,
            "on": encode(on, message_of),
            "with": [encode(each, message_of) for each in given],
            "named": {name: encode(each, message_of) for name, each in named.items()},
        }
        reply = self._ask(request)
        if "error" in reply:
            raise self._exception(reply)
        value = self._value(reply)
        for each, after in zip((*given, *named.values()), reply.get("after", ()), strict=False):
            become(each, decode(after, self._stand_in))
        return value

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply; the answer first learns what the tests have changed of what they were lent."""
        changed = [lent.message for lent in self._lent if lent.is_changed()]
        # A copy that nobody else holds any more can change no further.
        self._lent = [lent for lent in self._lent if sys.getrefcount(lent.value) > 2]
        self._channel.send({**request, "changed": changed} if changed else request)
        reply = self._channel.receive()
        if not isinstance(reply, dict):
            raise BadMessage("no reply")
        return reply

    def _value(self, reply: dict[str, Any]) -> Any:
        if "value" not in reply:
            raise BadMessage("a reply without a value")
        value = decode(reply["value"], self._stand_in)
        number = reply.get("h")
        if self.lends and isinstance(number, int) and isinstance(value, list | dict | set):
            self._lent.append(Lent(value, number))
        return value

    def _stand_in(self, message: dict[str, Any]) -> Any:
        if "exception" in message:
            return self._class(*map(str, message["exception"]))
        number = int(message["h"])
        return self._objects.setdefault(number, StandIn(self, number))

    def _class(self, name: str, *above: str) -> type[Exception]:
        """A class that tests can catch, for an exception that the code defines; `above` are the
        names of the classes that it is derived from.
        """
        base = Exception
        for each in reversed(above):
            if (known := _builtin(each)) is not None:
                base = known if issubclass(known, base) else base
            elif not hasattr(builtins, each):
                base = self._exceptions.setdefault(each, type(each, (base,), {}))
        return self._exceptions.setdefault(name, type(name, (base,), {}))

    def _exception(self, reply: dict[str, Any]) -> Exception:
        names, says = reply["error"], str(reply.get("says", ""))
        for name in names if isinstance(names, list) else ():
            if name in self._exceptions:
                return self._exceptions[name](says)
            if (known := _builtin(str(name))) is not None:
                try:
                    return known(says)
                except TypeError:  # such as UnicodeDecodeError, which wants five arguments
                    continue
        return RuntimeError(says)


def _builtin(name: str) -> type[Exception] | None:
    """Python's own exception of this name."""
    known = getattr(builtins, name, None)
    return known if isinstance(known, type) and issubclass(known, Exception) else None


def run_judge(channel: Channel, tests: str, host: Channel) -> None:
    """Run the tests; the one verdict goes to the host."""
    try:
        verdict = _judge(Answer(channel), tests, host)
    except CannotJudge as error:
        verdict = {"refused": str(error)}
    host.send(verdict)


def _judge(answer: Answer, text: str, host: Channel) -> dict[str, Any]:
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CannotJudge(f"the tests are no Python ({error})") from None
    _check_imports(body)
    _check_reach(body)
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    body += [ast.parse(f"{each.name}()").body[0] for each in functions if _is_test_function(each)]
    tests, wanted = sum(map(_is_test, body)), _names_of_the_answer(body)
    if not tests or not wanted:
        raise CannotJudge(
            "the tests test nothing: there is no assert, no call and no function test_..., or they"
            " use no name of the answer"
        )
    answer.lends = _changes(body)
    try:
        answer.start()
    except BadMessage:
        raise CannotJudge("the sandbox of the answer does not start") from None
    host.send("started")
    passed, whole = 0, True
    try:
        looked = ((name, answer.look_up(name)) for name in wanted)
        found = {name: value for name, value in looked if value is not ABSENT}
        names = Names(answer, found, _bound(body))
        for statement in body:
            holds = _holds(statement, names)
            passed += holds and _is_test(statement)
            whole = whole and holds
    except BadMessage:
        whole = False
    return {"passed": passed, "tests": tests, "whole": whole}


def _holds(statement: ast.stmt, names: dict[str, Any]) -> bool:
    try:
        exec(compile(ast.Module([statement], []), "<tests>", "exec"), names)
    except (BadMessage, CannotJudge):
        raise
    except BaseException:
        return False
    return True


def _check_imports(body: list[ast.stmt]) -> None:
    """Raises CannotJudge for modules that are not in the sandbox."""
    for node in (each for statement in body for each in ast.walk(statement)):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in named:
            if name.split(".")[0] not in sys.stdlib_module_names:
                raise CannotJudge(f"the tests import {name}; only the standard library is there")


def _check_reach(body: list[ast.stmt]) -> None:
    """Raises CannotJudge for tests that replace or watch what only they would see."""
    for node in (each for statement in body for each in ast.walk(statement)):
        used = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            used = next((one.name for one in node.names if _top(one.name) in ELSEWHERE), "")
        elif isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            replaced = of == "sys" and node.attr in STREAMS and isinstance(node.ctx, ast.Store)
            if replaced or (of, node.attr) == ("random", "seed") or node.attr in ELSEWHERE[:2]:
                used = f"{of}.{node.attr}".lstrip(".")
        if used:
            raise CannotJudge(f"the tests use {used}, which does not reach the answer's process")


def _top(module: str) -> str:
    return module.partition(".")[0]


def _changes(body: list[ast.stmt]) -> bool:
    """Whether tests may change a list, a set or a dict in place."""
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.AugAssign):
            return True
        if isinstance(node, ast.Attribute) and node.attr in CHANGING:
            return True
    return False


def _bound(body: list[ast.stmt]) -> set[str | None]:
    """Names that tests give a value of their own, anywhere."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    assigned = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store))
    found = {node.id for node in assigned if isinstance(node, ast.Name)}
    found |= {one.asname or _top(one.name) for one in nodes if isinstance(one, ast.alias)}
    # Of functions and classes, of what is caught, and of what is matched.
    return found | {getattr(node, key, None) for node in nodes for key in ("name", "rest")}


class Names(dict[str, Any]):
    """The names of the tests. What is plain data of the answer is a copy, of which the answer may
    have changed its own since: it is asked for anew, unless tests have one of that name or it is
    large.
    """

    def __init__(self, answer: Answer, found: dict[str, Any], own: set[str | None]) -> None:
        super().__init__(found, __name__="tests")
        self._answer = answer
        self._copies = {
            name
            for name, value in found.items()
            if name not in own and not isinstance(value, StandIn | type)
            if not hasattr(value, "__len__") or len(value) <= LARGE
        }

    def __getitem__(self, name: str) -> Any:
        if name not in self._copies:
            return super().__getitem__(name)
        found = self._answer.look_up(name)
        if found is ABSENT:
            raise KeyError(name)
        return found


def _is_test_function(function: ast.FunctionDef) -> bool:
    given = function.args
    return function.name.startswith("test_") and not (
        given.args or given.posonlyargs or given.kwonlyargs
    )


def _is_test(statement: ast.stmt) -> bool:
    """Whether a statement counts as a test: it asserts, or calls something that is no builtin."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        return not (isinstance(called, ast.Name) and hasattr(builtins, called.id))
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _names_of_the_answer(body: list[ast.stmt]) -> list[str]:
    """The names that tests may mean of the answer: those that they use and do not define. Never one
    of Python's own or of the standard library's, or an answer could bring an `abs` of its own.
    """
    nodes = [node for statement in body for node in ast.walk(statement)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    defined = {
        name
        for node in body
        for name in (
            [alias.asname or alias.name.split(".")[0] for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else []
        )
    }
    own = {*dir(builtins), *sys.stdlib_module_names}
    return sorted(name for name in used - defined - own if not name.startswith("__"))
