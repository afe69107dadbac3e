"""What passes between the two sandboxes: framed JSON of plain data. Everything else stays where it
is and is named by a handle. What is read may have been written by an enemy: it becomes plain data,
or it is refused.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MOST_BYTES = 8_000_000
"""Of one message."""
SMALL = 2**53


class BadMessage(BaseException):
    """The other side is gone, or wrote what is no message. No `Exception`: tests that catch all
    must not catch this.
    """


class Channel:
    """One message at a time over two pipes: four bytes of length, then JSON."""

    def __init__(self, inbox: int, outbox: int) -> None:
        self._inbox, self._outbox = inbox, outbox

    def send(self, message: Any) -> None:
        """Raises BadMessage if it is too long or the other side is gone."""
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise BadMessage(f"a message of {len(data)} bytes")
        view = memoryview(struct.pack(">I", len(data)) + data)
        try:
            while view:
                view = view[os.write(self._outbox, view) :]
        except OSError as error:
            raise BadMessage(str(error)) from None

    def receive(self) -> Any:
        """Raises BadMessage for the end, for what is too long and for what is no JSON."""
        (length,) = struct.unpack(">I", self._read(4))
        if length > MOST_BYTES:
            raise BadMessage(f"a message of {length} bytes")
        try:
            return json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise BadMessage(str(error)) from None

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self._inbox, min(count, 1 << 16))
            if not part:
                raise BadMessage("the other side is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value as JSON; `other` gives the JSON of what is no plain data.

    Subclasses of plain types become these, as equality sees them: a Counter is a dict.
    """
    if value is None or isinstance(value, bool | float | str):
        return value if value is None or isinstance(value, bool) else _base(value)
    if isinstance(value, int):
        return int(value) if -SMALL < value < SMALL else {"t": "int", "v": hex(value)}
    if isinstance(value, list):
        return [encode(each, other) for each in value]
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return {"t": kind.__name__, "v": [encode(part, other) for part in parts(value)]}
    if isinstance(value, bytes | bytearray):
        return {"t": "bytes", "v": value.decode("latin-1")}
    if isinstance(value, Decimal):
        return {"t": "Decimal", "v": str(value)}
    return other(value)


def _base(value: float | str) -> float | str:
    return float(value) if isinstance(value, float) else str.__str__(value)


_PARTS: dict[type, Callable[[Any], Any]] = {
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    dict: lambda value: [part for pair in dict.items(value) for part in pair],
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    Fraction: lambda value: (value.numerator, value.denominator),
    deque: deque.__iter__,
}
_MAKE: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "Fraction": lambda parts: Fraction(*parts),
    "deque": deque,
}


def decode(message: Any, other: Callable[[Any], Any]) -> Any:
    """The value of a message; `other` gives what a handle stands for.

    Raises:
        BadMessage: it is no value that `encode` writes.
    """
    try:
        return _decode(message, other)
    except Exception as error:  # whatever reading it raises, it was written by an enemy
        raise BadMessage(f"{type(error).__name__}: {error}") from None


def _decode(message: Any, other: Callable[[Any], Any]) -> Any:
    if isinstance(message, list):
        return [_decode(each, other) for each in message]
    if not isinstance(message, dict):
        return message
    if "t" not in message:
        return other(message)
    kind, value = message["t"], message["v"]
    if kind == "int":
        return int(value, 16)
    if kind == "bytes":
        return value.encode("latin-1")
    if kind == "Decimal":
        return Decimal(value)
    return _MAKE[kind]([_decode(each, other) for each in value])
