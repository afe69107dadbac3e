"""Inside the sandbox of the answer: runs its code, then does what the judge asks for. It knows
neither the tests nor the verdict, and the code may take this process over: whatever it writes, to
the judge it is data.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ingot.rewards.sandbox.operations import OPERATIONS, become
from ingot.rewards.sandbox.values import BadMessage, Channel, decode, encode

ABSENT = {"absent": True}
PARTS = ("attribute", "item")
"""Operations whose value stays a part of the object: a change of it is one of the object."""


class AnswerState:
    """The code's names, and its objects that the judge knows by number."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "answer", "__builtins__": __builtins__}
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def handle(self, value: Any) -> dict[str, Any]:
        """The message that names an object, always the same one: an exception's class by its name
        too.
        """
        number = self._numbers.setdefault(id(value), len(self._objects))  # which is held, and so
        if number == len(self._objects):  # no other object has its id
            self._objects.append(value)
        found = {"h": number}
        if isinstance(value, type) and issubclass(value, Exception):
            return found | {"exception": [each.__name__ for each in value.__mro__]}
        return found

    def find(self, message: Any) -> Any:
        return self._objects[message["h"]]

    def lent(self, value: Any) -> dict[str, Any]:
        """The reply that gives a value of which the test may change its copy."""
        reply = {"value": encode(value, self.handle)}
        return reply | (self.handle(value) if type(value) in (list, dict, set) else {})


def run_answer(channel: Channel, program: str) -> None:
    """Say that the sandbox stands; then run the code and serve the judge until it is gone."""
    channel.send("ready")
    state = AnswerState()
    channel.receive()
    # The code may raise SystemExit, or anything: what it defined until then stands.
    with contextlib.suppress(BaseException):
        exec(compile(program, "<answer>", "exec"), state.names)
    with contextlib.suppress(BadMessage):
        while True:
            channel.send(_serve(state, channel.receive()))


def _serve(state: AnswerState, request: dict[str, Any]) -> Any:
    """Do one thing: look a name up, call something, or an operation; before it, what the tests have
    changed of what they were lent.
    """
    try:
        for message, after in request.get("changed", ()):
            become(state.find(message), decode(after, state.find))
        if "name" in request:
            if request["name"] not in state.names:
                return ABSENT
            return state.lent(state.names[request["name"]])
        subject = decode(request["on"], state.find)
        given = [decode(each, state.find) for each in request["with"]]
        named = {name: decode(each, state.find) for name, each in request["named"].items()}
        if request["do"] != "call":
            value = OPERATIONS[request["do"]](subject, *given)
            if request["do"] in PARTS:
                return state.lent(value)
            return {"value": encode(value, state.handle)}
        reply = {"value": encode(subject(*given, **named), state.handle)}
        # What the code did to a list that it was given is to be seen by the test.
        after = [encode(each, state.handle) for each in (*given, *named.values())]
        before = [*request["with"], *request["named"].values()]
        return reply | ({"after": after} if after != before else {})
    except BaseException as error:
        names = [each.__name__ for each in type(error).__mro__]
        with contextlib.suppress(BaseException):
            return {"error": names, "says": str(error)[:500]}
        return {"error": names, "says": ""}
