"""Inside the sandbox of the answer: runs its code, then does what the judge asks for. It knows
neither the tests nor the verdict, and the code may take this process over: whatever it writes, to
the judge it is data.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "length": len,
    "iterate": iter,
    "next": next,
    "contains": operator.contains,
    "truth": bool,
    "text": str,
    "equal": operator.eq,
    "less": operator.lt,
    "add": operator.add,
}
ABSENT = {"absent": True}


class Held:
    """The code's names, and its objects that the judge knows by number."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
        self._objects: list[Any] = []

    def handle(self, value: Any) -> dict[str, Any]:
        """The message that names an object: an exception's class by its name too."""
        self._objects.append(value)
        found = {"h": len(self._objects) - 1}
        if isinstance(value, type) and issubclass(value, Exception):
            return found | {"exception": value.__name__}
        return found

    def find(self, message: Any) -> Any:
        return self._objects[message["h"]]


def run_answer(channel: Channel, program: str) -> None:
    """Say that the sandbox stands; then run the code and serve the judge until it is gone."""
    channel.send("ready")
    held = Held()
    channel.receive()
    # The code may raise SystemExit, or anything: what it defined until then stands.
    with contextlib.suppress(BaseException):
        exec(compile(program, "<answer>", "exec"), held.names)
    with contextlib.suppress(BadMessage):
        while True:
            channel.send(_serve(held, channel.receive()))


def _serve(held: Held, request: dict[str, Any]) -> Any:
    """Do one thing: look a name up, call something, or an operation."""
    try:
        if "name" in request:
            if request["name"] not in held.names:
                return ABSENT
            return {"value": encode(held.names[request["name"]], held.handle)}
        subject = decode(request["on"], held.find)
        given = [decode(each, held.find) for each in request["with"]]
        named = {name: decode(each, held.find) for name, each in request["named"].items()}
        if request["do"] != "call":
            return {"value": encode(OPERATIONS[request["do"]](subject, *given), held.handle)}
        value = {"value": encode(subject(*given, **named), held.handle)}
        # What the code did to a list that it was given is to be seen by the test.
        after = [encode(each, held.handle) for each in given]
        return value | ({"after": after} if after != request["with"] else {})
    except BaseException as error:
        names = [each.__name__ for each in type(error).__mro__]
        with contextlib.suppress(BaseException):
            return {"error": names, "says": str(error)[:500]}
        return {"error": names, "says": ""}
