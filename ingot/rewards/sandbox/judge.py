"""Inside the sandbox of the tests: runs them, with what they need of the answer as stand-ins that
ask its sandbox. All comparisons are made here, on plain data: an answer that prints "passed", ends
its process, replaces builtins or returns an object that equals everything proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

ABSENT = object()


class CannotJudge(BaseException):
    """The tests cannot be run on an answer in another process; the message says why."""


class Answer:
    """The answer's sandbox as the judge sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[Exception]] = {}

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
            "on": encode(on, _message_of),
            "with": [encode(each, _message_of) for each in given],
            "named": {name: encode(each, _message_of) for name, each in named.items()},
        }
        reply = self._ask(request)
        if "error" in reply:
            raise self._exception(reply)
        value = self._value(reply)
        for each, after in zip(given, reply.get("after", ()), strict=False):
            _become(each, decode(after, self._stand_in))
        return value

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._channel.send(request)
        reply = self._channel.receive()
        if not isinstance(reply, dict):
            raise BadMessage("no reply")
        return reply

    def _value(self, reply: dict[str, Any]) -> Any:
        if "value" not in reply:
            raise BadMessage("a reply without a value")
        return decode(reply["value"], self._stand_in)

    def _stand_in(self, message: dict[str, Any]) -> Any:
        if "exception" in message:
            return self._class(str(message["exception"]))
        return StandIn(self, int(message["h"]))

    def _class(self, name: str) -> type[Exception]:
        """A class that tests can catch, for an exception that the code defines."""
        return self._exceptions.setdefault(name, type(name, (Exception,), {}))

    def _exception(self, reply: dict[str, Any]) -> Exception:
        names, says = reply["error"], str(reply.get("says", ""))
        for name in names if isinstance(names, list) else ():
            if name in self._exceptions:
                return self._exceptions[name](says)
            known = getattr(builtins, str(name), None)
            if isinstance(known, type) and issubclass(known, Exception):
                try:
                    return known(says)
                except TypeError:  # such as UnicodeDecodeError, which wants five arguments
                    continue
        return RuntimeError(says)


class StandIn:
    """An object of the answer's process. It equals no plain data, whatever its class says of
    itself, and there is no arithmetic between it and plain data.
    """

    def __init__(self, answer: Answer, handle: int) -> None:
        self.__dict__.update(_answer=answer, _handle=handle)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._answer.do("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._answer.do("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._answer.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._answer.do("set item", self, key, value)

    def __len__(self) -> int:
        return int(self._answer.do("length", self))

    def __iter__(self) -> Iterator[Any]:
        items = self._answer.do("iterate", self)
        if not isinstance(items, StandIn):
            raise TypeError("it is no iterator")
        while True:
            try:
                yield self._answer.do("next", items)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._answer.do("next", self)

    def __contains__(self, item: Any) -> bool:
        return self._answer.do("contains", self, item) is True

    def __bool__(self) -> bool:
        return self._answer.do("truth", self) is True

    def __str__(self) -> str:
        return str(self._answer.do("text", self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self._answer.do("equal", self, other) is True

    def __lt__(self, other: object) -> Any:
        return (
            self._answer.do("less", self, other) if isinstance(other, StandIn) else NotImplemented
        )

    def __add__(self, other: object) -> Any:
        return self._answer.do("add", self, other) if isinstance(other, StandIn) else NotImplemented

    def __hash__(self) -> int:
        return hash(("an object of the answer", self._handle))

    def __mro_entries__(self, bases: Any) -> NoReturn:
        raise CannotJudge("a test derives a class from one of the answer's")

    def __reduce__(self) -> NoReturn:
        raise CannotJudge("a test copies an object of the answer's")


def _message_of(value: Any) -> Any:
    """The message for what is no plain data."""
    if isinstance(value, StandIn):
        return {"h": value._handle}
    raise CannotJudge(
        f"a test gives the answer a {type(value).__name__}; only plain data and the answer's own"
        " objects can pass between the two processes"
    )


def _become(mine: Any, theirs: Any) -> None:
    """Change an argument as the answer has changed its copy."""
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)


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
    functions = [each for each in body if isinstance(each, ast.FunctionDef)]
    body += [ast.parse(f"{each.name}()").body[0] for each in functions if _is_test_function(each)]
    tests, wanted = sum(map(_is_test, body)), _names_of_the_answer(body)
    if not tests or not wanted:
        raise CannotJudge(
            "the tests test nothing: there is no assert, no call and no function test_..., or they"
            " use no name of the answer"
        )
    try:
        answer.start()
    except BadMessage:
        raise CannotJudge("the sandbox of the answer does not start") from None
    host.send("started")
    passed, whole = 0, True
    try:
        names: dict[str, Any] = {"__name__": "tests"}
        names |= {name: found for name in wanted if (found := answer.look_up(name)) is not ABSENT}
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
