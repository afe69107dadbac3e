"""The backend of SentencePiece models, BPE and unigram: Llama 2's `tokenizer.model`, T5's
`spiece.model`. Also reads their protocol buffers, since the library exposes neither the kind of a
model nor its normalisation.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import canonical_json
from ingot.tokenizers.backend import SpecialTokenSplitter, TokenBatch, flatten, without_special
from ingot.tokenizers.settings import added_tokens

UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True)
class VocabularyPiece:
    """One entry of the vocabulary; its id is its index."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a model file that decide about ids."""

    pieces: list[VocabularyPiece]
    kind: int
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool


def read_model(data: bytes, where: str) -> SentencePieceModel:
    """Parse a model file.

    Raises:
        WrongInput: it is no SentencePiece model, or is truncated.
    """
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as error:
        raise WrongInput(
            f"{where} is neither tiktoken ranks nor a whole SentencePiece model ({error}); fetch"
            " the file again"
        ) from None


def _model(data: bytes) -> SentencePieceModel:
    pieces = list[VocabularyPiece]()
    trainer = dict[int, int | bytes]()
    normalizer = dict[int, int | bytes]()
    for field, value in _fields(data):
        if field in (1, 2, 3) and not isinstance(value, bytes):
            raise ValueError(f"field {field} is no message")
        if isinstance(value, bytes) and field == 1:
            entry = dict(_fields(value))
            score = entry.get(2, b"\0\0\0\0")
            pieces.append(
                VocabularyPiece(
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
    return SentencePieceModel(
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
    """The fields of a protocol buffer message: their numbers, with an integer or bytes (for
    fixed-width values too).
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


class SentencePieceBackend:
    """The `sentencepiece` library on one of its models. It treats control symbols in a text as
    ordinary characters.

    BOS is put before a text if the model has one; if it has none but padding, as T5's, EOS is put
    after it. A special token that only the configuration names (T5's sentinels) gets its id from
    `added_tokens_decoder`.

    Raises:
        WrongInput: the file is damaged, sentencepiece is not installed, or the configuration adds
            tokens that only its own tokenizer.json can match in text.
    """

    converted: str | None = None
    """An equivalent tokenizer.json."""

    def __init__(self, data: bytes, config: Mapping[str, Any], where: str) -> None:
        self.model = read_model(data, where)
        self._processor = _processor(data, where)
        self.library = f"sentencepiece {importlib.metadata.version('sentencepiece')}"
        pieces = self.model.pieces
        self.ids = {
            piece.text: index
            for index, piece in enumerate(pieces)
            if piece.kind in (CONTROL, UNKNOWN)
        }
        self.ids |= _configured_tokens(
            config,
            len(pieces),
            {piece.text for piece in pieces if piece.kind == USER_DEFINED},
            where,
        )
        self.special = list(self.ids)
        self.lossy_reason = (
            "in SentencePiece a space is the character ▁, and its normalizer may change texts"
        )
        self.added = [piece.text for piece in pieces if piece.kind == USER_DEFINED]
        self._spelled = {index: text for text, index in self.ids.items()} | {
            index: piece.text for index, piece in enumerate(pieces)
        }
        self._index = {text: index for index, text in self._spelled.items()}
        self.vocab_size = max(self._spelled) + 1
        ids = {
            name: getattr(self._processor, f"{name}_id")() for name in ("bos", "eos", "pad", "unk")
        }
        self.named = {
            f"{name}_token": pieces[index].text for name, index in ids.items() if index >= 0
        }
        self.before = [ids["bos"]] if ids["bos"] >= 0 else []
        self.after = [ids["eos"]] if ids["bos"] < 0 <= min(ids["eos"], ids["pad"]) else []
        self.control = SpecialTokenSplitter(self.ids, self.encode)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return flatten([self._processor.encode(text) for text in texts])

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Ids between two special tokens are decoded separately."""
        special = set(self.ids.values()) - {self._processor.unk_id()}
        parts, run = list[str](), list[int]()
        for index in ids:
            if index not in special:
                run.append(index)
            elif not skip_special:
                parts += [self._decoded(run), self._spelled[index]]
                run = []
        return "".join([*parts, self._decoded(run)])

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(
            self._processor.decode([index for index in ids if 0 <= index < len(self.model.pieces)])
        )

    def token(self, index: int) -> str | None:
        return self._spelled.get(index)

    def token_id(self, text: str) -> int | None:
        return self._index.get(text)

    def plain_json(self) -> str | None:
        return None if self.converted is None else without_special(self.converted)

    def state(self) -> dict[str, Any]:
        model = self.model
        about = [[piece.text, piece.score, piece.kind] for piece in model.pieces]
        how = [
            model.kind,
            model.add_dummy_prefix,
            model.remove_extra_whitespaces,
            model.escape_whitespaces,
            model.whitespace_as_suffix,
        ]
        digest = hashlib.sha256(canonical_json([about, how]).encode() + model.charsmap).hexdigest()
        return {"sentencepiece": digest, "special": self.ids}


def _configured_tokens(
    config: Mapping[str, Any], begin: int, matched: set[str], where: str
) -> dict[str, int]:
    tokens = added_tokens(config)
    new = [token for token in tokens if token.id >= begin]
    wrong = [token.content for token in new if not token.special] + [
        token.content for token in tokens if token.special and token.content in matched
    ]
    if wrong:
        raise WrongInput(
            f"{where} adds {wrong[0]!r}, which SentencePiece and transformers match in text in"
            " different ways; give its tokenizer.json"
        )
    return {token.content: token.id for token in new}


def _processor(data: bytes, where: str) -> Any:
    try:
        import sentencepiece
    except ImportError:
        raise WrongInput(
            "a SentencePiece model needs sentencepiece; pip install sentencepiece"
        ) from None
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise WrongInput(
            f"{where} is no SentencePiece model ({str(error)[:100]}); fetch the file again"
        ) from None
