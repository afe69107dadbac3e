"""What passes between the two sandboxes: plain data arrives as it was, and nothing that an enemy
writes is anything but data or refused.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.rewards.sandbox.values import MOST_BYTES, BadMessage, Channel, decode, encode

PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary(max_size=9)),
    *(st.text(st.characters(), max_size=9), st.fractions(), st.decimals(allow_nan=False)),
    st.complex_numbers(allow_nan=False),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9)),
)
KEYS = st.recursive(
    PLAIN, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=3
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
        *(st.lists(inner, max_size=4).map(tuple), st.sets(KEYS, max_size=4)),
        st.lists(inner, max_size=4).map(deque),
    ),
    max_leaves=8,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["t", "v", "h", "x"]), inner, max_size=3),
        st.fixed_dictionaries(
            {
                "t": st.sampled_from(
                    [
                        "int",
                        "tuple",
                        "set",
                        "dict",
                        "complex",
                        "range",
                        "Fraction",
                        "deque",
                        "bytes",
                        "Decimal",
                    ]
                ),
                "v": inner,
            }
        ),
    ),
    max_leaves=8,
)


class Unknown(Exception):
    """What a handle is for these tests."""


def no_handle(message: Any) -> Any:
    raise KeyError(message)


def no_object(value: Any) -> Any:
    raise Unknown


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    arrived = decode(json.loads(json.dumps(encode(value, no_object))), no_handle)
    assert arrived == value
    assert type(arrived) is type(value)
    # Of numbers also which kind and sign they are of; what holds a set may show it in another order.
    assert repr(arrived) == repr(value) or not isinstance(
        value, int | float | complex | str | bytes
    )


@settings(max_examples=300, deadline=None)
@given(JSON)
def test_any_message_is_plain_data_or_refused(message: Any) -> None:
    try:
        value = decode(message, no_handle)
    except BadMessage:
        return
    encode(value, no_object)  # nothing but plain data, or this raises


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    inbox, theirs = os.pipe()
    try:
        os.write(theirs, data)
        os.close(theirs)
        Channel(inbox, -1).receive()
    except BadMessage:
        pass
    finally:
        os.close(inbox)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MOST_BYTES + 1) + b"1",
        struct.pack(">I", 50_000) + b"[" * 50_000,
        struct.pack(">I", 6_000) + b"9" * 6_000,
    ],
)
def test_what_is_too_much_is_refused(data: bytes) -> None:
    inbox, theirs = os.pipe()
    os.write(theirs, data)
    os.close(theirs)
    with pytest.raises(BadMessage):
        Channel(inbox, -1).receive()
    os.close(inbox)


def test_an_enemys_classes_become_plain_or_stay_where_they_are() -> None:
    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Text(str):
        def __str__(self) -> str:
            return "other"

    assert type(decode(encode(Yes(3), no_object), no_handle)) is int
    assert encode(Text("own"), no_object) == "own"
    assert encode(deque([Fraction(1, 2), Decimal(1)]), no_object)["t"] == "deque"
    with pytest.raises(Unknown):
        encode(object(), no_object)
