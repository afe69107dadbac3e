"""What stands in the tests for an object of the answer's: whatever is done with it is done in the
answer's process, and plain data that is part of it is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

from ingot.rewards.sandbox.operations import ALONE, BETWEEN, COMPARISONS, IN_PLACE
from ingot.rewards.sandbox.values import encode

HIDDEN = ("__doc__", "__module__", "__annotations__", "__defaults__")
"""What every object has, and so a stand-in of its own."""


class CannotJudge(BaseException):
    """The tests cannot be run on an answer in another process; the message says why."""


class Process(Protocol):
    """The answer's process."""

    def do(self, what: str, on: Any, *given: Any, **named: Any) -> Any:
        """Have it do an operation on one of its objects."""


class StandIn:
    """An object of the answer's process. It equals no plain data, whatever its class says of
    itself: what the tests expect never reaches that process, where it could be answered by itself.
    """

    def __init__(self, answer: Process, handle: int) -> None:
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


def message_of(value: Any) -> Any:
    """The message for what is no plain data."""
    if isinstance(value, StandIn):
        return {"h": value._handle}
    raise CannotJudge(
        f"a test gives the answer a {type(value).__name__}; only plain data and the answer's own"
        " objects can pass between the two processes"
    )


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
        return [{"h": self._handle}, encode(self.value, message_of)]


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
