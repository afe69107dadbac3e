"""Reads the file of a SentencePiece model: protocol buffers, as far as it needs them.

The library itself tells neither the kind of its model nor how it normalises; the file does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ingot.base.errors import WrongInput

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class PieceModel:
    """What decides about ids."""

    pieces: list[Piece]
    kind: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def read_model(data: bytes, where: str) -> PieceModel:
    """The model in a file.

    Raises:
        WrongInput: it is no SentencePiece model, or is cut.
    """
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as error:
        raise WrongInput(
            f"{where} is neither tiktoken ranks nor a whole SentencePiece model ({error}); fetch"
            " the file again"
        ) from None


def _model(data: bytes) -> PieceModel:
    pieces, trainer, normalizer = list[Piece](), dict[int, int | bytes](), dict[int, int | bytes]()
    for field, value in _fields(data):
        if field in (1, 2, 3) and not isinstance(value, bytes):
            raise ValueError(f"field {field} is no message")
        if isinstance(value, bytes) and field == 1:
            entry = dict(_fields(value))
            score = entry.get(2, b"\0\0\0\0")
            pieces.append(
                Piece(
                    _bytes(entry.get(1, b"")).decode(),
                    struct.unpack("<f", _bytes(score))[0],
                    _number(entry.get(3, NORMAL)),
                )
            )
        elif isinstance(value, bytes) and field == 2:
            trainer = dict(_fields(value))
        elif isinstance(value, bytes) and field == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    prefix, extra, escape = (bool(_number(normalizer.get(field, 1))) for field in (3, 4, 5))
    return PieceModel(
        pieces,
        _number(trainer.get(3, UNIGRAM)),
        _bytes(normalizer.get(2, b"")),
        prefix,
        extra,
        escape,
        whitespace_as_suffix=bool(_number(trainer.get(24, 0))),
    )


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number where bytes belong")
    return value


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number belongs")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by number: a number, or bytes (also the four and eight of fixed
    width).
    """
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        if wire == 0:
            number, place = _varint(data, place)
            yield key >> 3, number
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"byte {place} begins no field")
        size = {1: 8, 5: 4}.get(wire, 0)
        if wire == 2:
            size, place = _varint(data, place)
        if place + size > len(data):
            raise ValueError("the file ends early")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError(f"byte {place} is in no number")
