"""Inside the sandbox of the tests: runs them, with what they need of the answer as stand-ins that
ask its sandbox. All comparisons are made here, on plain data: an answer that prints "passed", ends
its process, replaces builtins or returns an object that equals everything proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ingot.rewards.sandbox.operations import ALONE, BETWEEN, become
from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

ABSENT = object()
ELSEWHERE = (
    *("redirect_stdout", "redirect_stderr", "capsys", "capfd", "monkeypatch", "patch"),
    *("asyncio", "unittest"),
    *("__doc__", "__dict__", "__class__", "__module__", "__annotations__", "__defaults__"),
)
"""What tests can replace, watch, run or read in their own process alone."""


class CannotJudge(BaseException):
    """The tests cannot be run on an answer in another process; the message says why."""


class Answer:
    """The answer's sandbox as the judge sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exceptions: dict[str, type[Exception]] = {}
        self._objects: dict[int, StandIn] = {}
        self._lent: list[Lent] = []

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
        if isinstance(number := reply.get("h"), int) and isinstance(value, list | dict | set):
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
        kinds = (self._exceptions.get(each) or _builtin(each) for each in above)
        base = next((kind for kind in kinds if kind is not None), Exception)
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


class Lent:
    """A copy of a list, a set or a dict that is part of an object of the answer's."""

    def __init__(self, value: Any, handle: int) -> None:
        self.value, self._handle = value, handle
        self._known = encode(value, _message_of)

    def is_changed(self) -> bool:
        """Whether the tests have changed it since they were last asked."""
        before, self._known = self._known, encode(self.value, _message_of)
        return bool(self._known != before)

    @property
    def message(self) -> Any:
        return [{"h": self._handle}, self._known]


class StandIn:
    """An object of the answer's process. It equals no plain data, whatever its class says of
    itself: what the tests expect never reaches that process, where it could be answered by itself.
    """

    def __init__(self, answer: Answer, handle: int) -> None:
        self.__dict__.update(_answer=answer, _handle=handle)

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._answer.do("call", self, *given, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._answer.do("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._answer.do("set attribute", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._answer.do("delete attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._answer.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._answer.do("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._answer.do("delete item", self, key)

    def __len__(self) -> int:
        return int(self._answer.do("len", self))

    def __iter__(self) -> Iterator[Any]:
        return self._items("iter")

    def __reversed__(self) -> Iterator[Any]:
        return self._items("reversed")

    def _items(self, how: str) -> Iterator[Any]:
        items = self._answer.do(how, self)
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
        return self._answer.do("bool", self) is True

    def __format__(self, how: str) -> str:
        return str(self._answer.do("format", self, how))

    def __round__(self, *digits: int) -> Any:
        return self._answer.do("round", self, *digits)

    def __enter__(self) -> Any:
        return self._answer.do("enter", self)

    def __exit__(self, *error: object) -> None:
        self._answer.do("exit", self)

    def __instancecheck__(self, value: object) -> bool:
        """Whether `value` is of this class of the answer's."""
        if isinstance(value, StandIn):
            return self._answer.do("instance", value, self) is True
        if self._answer.do("is plain", self) is True:
            raise CannotJudge("a test asks for the class of plain data, which is a copy")
        return False

    def __subclasscheck__(self, kind: type) -> bool:
        return isinstance(kind, StandIn) and self._answer.do("subclass", kind, self) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self._answer.do("equal", self, other) is True

    def __hash__(self) -> int:
        return hash(self._answer.do("hash", self))

    def __mro_entries__(self, bases: Any) -> NoReturn:
        raise CannotJudge("a test derives a class from one of the answer's")

    def __reduce__(self) -> NoReturn:
        raise CannotJudge("a test copies an object of the answer's")

    def _with(self, name: str, other: Any, method: str, *, turned: bool = False) -> Any:
        """An operation between two objects of the answer's. With plain data there is none, since
        that may be what the tests expect.
        """
        if isinstance(other, StandIn):
            pair = (other, self) if turned else (self, other)
            return self._answer.do(name, *pair)
        if self._answer.do("has", self, method) is True:
            raise CannotJudge(
                f"a test has {method} between plain data and an object of the answer's"
            )
        return NotImplemented


def _alone(name: str, text: bool) -> Callable[[StandIn], Any]:
    def method(self: StandIn) -> Any:
        value = self._answer.do(name, self)
        return str(value) if text else value

    return method


def _between(name: str, method: str, *, turned: bool) -> Callable[[StandIn, Any], Any]:
    return lambda self, other: self._with(name, other, method, turned=turned)


for _name in ALONE:
    if not hasattr(StandIn, f"__{_name}__") or _name in ("str", "repr"):
        setattr(StandIn, f"__{_name}__", _alone(_name, _name in ("str", "repr")))
for _name in BETWEEN:
    setattr(StandIn, f"__{_name}__", _between(_name, f"__{_name}__", turned=False))
    if _name not in ("lt", "le", "gt", "ge"):
        _method = f"__r{_name}__"
        setattr(StandIn, _method, _between(_name, _method, turned=True))


def _message_of(value: Any) -> Any:
    """The message for what is no plain data."""
    if isinstance(value, StandIn):
        return {"h": value._handle}
    raise CannotJudge(
        f"a test gives the answer a {type(value).__name__}; only plain data and the answer's own"
        " objects can pass between the two processes"
    )


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
    try:
        answer.start()
    except BadMessage:
        raise CannotJudge("the sandbox of the answer does not start") from None
    host.send("started")
    passed, whole = 0, True
    try:
        names: dict[str, Any] = {"__name__": "tests"}
        names |= {name: found for name in wanted if (found := answer.look_up(name)) is not ABSENT}
        # Plain data is a copy, and the answer may have changed its own since.
        copies = {
            name: found
            for name in wanted
            if not isinstance(found := names.get(name), StandIn | type | None)
        }
        for statement in body:
            for name, found in copies.items():
                if names.get(name) is found:
                    names[name] = copies[name] = answer.look_up(name)
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
        names = {getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "arg", None)}
        for name in names.intersection(ELSEWHERE):
            raise CannotJudge(f"the tests use {name}, which does not reach the answer's process")


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
