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

from ingot.rewards.sandbox.operations import ALONE, BETWEEN, COMPARISONS, IN_PLACE, become
from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

ABSENT = object()
ELSEWHERE = ("redirect_stdout", "redirect_stderr", "patch", "asyncio", "unittest")
"""What tests may import that replaces, watches or runs things of their own process alone."""
STREAMS = ("stdin", "stdout", "stderr")
HIDDEN = ("__doc__", "__module__", "__annotations__", "__defaults__")
"""What every object has, and so a stand-in of its own."""
CHANGING = ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add")
CHANGING += ("discard", "update", "setdefault", "popitem")
"""Methods by which tests change a list, a set or a dict."""


class CannotJudge(BaseException):
    """The tests cannot be run on an answer in another process; the message says why."""


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


class Lent:
    """A copy of a list, a set or a dict that is part of an object of the answer's."""

    def __init__(self, value: Any, handle: int) -> None:
        self.value, self._handle = value, handle
        self._known = _items_of(value)

    def is_changed(self) -> bool:
        """Whether the tests have changed it since they were last asked."""
        if _are_same(self.value, self._known):
            return False
        self._known = _items_of(self.value)
        return True

    @property
    def message(self) -> Any:
        return [{"h": self._handle}, encode(self.value, _message_of)]


def _items_of(value: Any) -> Any:
    """What a container held, to be compared with what it holds later, by identity: whether two
    stand-ins are equal would have to be asked.
    """
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    return [_items_of(each) for each in value] if isinstance(value, list | tuple | set) else value


def _are_same(value: Any, known: Any) -> bool:
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple | set):
        return (
            isinstance(known, list)
            and len(value) == len(known)
            and all(map(_are_same, value, known))
        )
    return value is known


class StandIn:
    """An object of the answer's process. It equals no plain data, whatever its class says of
    itself: what the tests expect never reaches that process, where it could be answered by itself.
    """

    def __init__(self, answer: Answer, handle: int) -> None:
        self.__dict__.update(_answer=answer, _handle=handle)

    def __getattribute__(self, name: str) -> Any:
        if name in HIDDEN:
            raise CannotJudge(f"a test reads {name} of an object of the answer's")
        return object.__getattribute__(self, name)

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

    def __exit__(self, kind: type | None, *error: object) -> None:
        if kind is not None and kind is not AssertionError:
            raise CannotJudge("a test ends a block of the answer's by an exception")
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
    if _name not in COMPARISONS:
        _method = f"__r{_name}__"
        setattr(StandIn, _method, _between(_name, _method, turned=True))
for _name in IN_PLACE:
    setattr(StandIn, f"__{_name}__", _between(_name, f"__{_name}__", turned=False))


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
    return {
        node.id
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        else getattr(node, "name", None)
        for node in nodes
    } | {getattr(node, "rest", None) for node in nodes}


class Names(dict[str, Any]):
    """The names of the tests. What is plain data of the answer is a copy, of which the answer may
    have changed its own since: it is asked for anew, unless tests have one of that name.
    """

    def __init__(self, answer: Answer, found: dict[str, Any], own: set[str | None]) -> None:
        super().__init__(found, __name__="tests")
        self._answer = answer
        self._copies = {
            name
            for name, value in found.items()
            if name not in own and not isinstance(value, StandIn | type)
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
