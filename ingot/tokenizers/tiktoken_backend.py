"""The backend of tiktoken ranks: the file that Llama 3 calls `tokenizer.model`, with one base64
token and its rank per line.

The file defines neither how text is split before merging nor the special tokens; both are Llama
3's, unless a configuration beside the file names the special tokens (`added_tokens_decoder`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.metadata
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ingot.base.errors import WrongInput
from ingot.tokenizers.backend import SpecialTokenSplitter, TokenBatch, flatten, without_special
from ingot.tokenizers.settings import added_tokens

# How Llama 3 splits text before merging: words with their leading space, up to three digits, runs
# of punctuation and of whitespace.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIALS = 256
# Special tokens by offset from the last rank; the offsets in between and after are reserved tokens,
# numbered without gaps.
LLAMA3 = {
    0: BOS,
    1: EOS,
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
# Classes of tokenizer_config.json for which a file of ranks is Llama 3's. Others split text in
# another way.
CLASSES = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "PreTrainedTokenizer",
    "LlamaTokenizer",
    "LlamaTokenizerFast",
)
# Where the library's splitting overflows the stack, runs of characters are split at this length, as
# Llama 3's own code does.
LONGEST_RUN = 25_000
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")


def is_ranks(data: bytes) -> bool:
    """Whether a file is of this kind, by its first line."""
    return _LINE.fullmatch(data[:1000].split(b"\n", 1)[0].rstrip(b"\r")) is not None


def read_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """Token -> rank.

    Raises:
        WrongInput: a line is damaged, or ranks or single bytes are missing.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise WrongInput(
                f"{where} is damaged in line {number}, which is no token in base64 and its rank;"
                " fetch the file again"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([byte]) not in ranks for byte in range(256)
    ):
        raise WrongInput(
            f"{where} has {len(ranks)} ranks that are not 0, 1, 2, ... with every single byte among"
            " them; fetch the file again"
        )
    return ranks


class TiktokenBackend:
    """The `tiktoken` library on a file of ranks, as Llama 3 uses it.

    Raises:
        WrongInput: the file is damaged, the configuration says that it is of another model, or
            tiktoken is not installed.
    """

    lossy_reason: str | None = None
    converted: str | None = None
    """An equivalent tokenizer.json."""

    def __init__(self, data: bytes, config: Mapping[str, Any], where: str) -> None:
        kind = config.get("tokenizer_class")
        if kind is not None and kind not in CLASSES:
            raise WrongInput(
                f"{where} has tiktoken ranks and tokenizer_class {kind}, whose way to cut text is"
                " not known; give its tokenizer.json"
            )
        self.ranks = read_ranks(data, where)
        self.ids = _special_tokens(len(self.ranks), config, where)
        self._encoding = _encoding(self.ranks, self.ids)
        self.library = f"tiktoken {importlib.metadata.version('tiktoken')}"
        self.special, self.added = list(self.ids), list[str]()
        self.vocab_size = max(len(self.ranks), *(index + 1 for index in self.ids.values()))
        self.named = {
            name: token
            for name, token in (("bos_token", BOS), ("eos_token", EOS))
            if token in self.ids
        }
        self.before, self.after = [self.ids[BOS]] if BOS in self.ids else [], list[int]()
        self.control = SpecialTokenSplitter(self.ids, self.encode)
        self._spelled = {index: text for text, index in self.ids.items()} | {
            rank: spell(token) for token, rank in self.ranks.items()
        }

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> TokenBatch:
        return flatten([self._encode(text) for text in texts])

    def _encode(self, text: str) -> Any:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            return np.concatenate(
                [
                    self._encoding.encode_to_numpy(piece, disallowed_special=())
                    for piece in _cut(text)
                ]
            )

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        known = [
            index
            for index in ids
            if index in self._spelled and not (skip_special and index >= len(self.ranks))
        ]
        return str(self._encoding.decode(known, errors="replace"))

    def token(self, index: int) -> str | None:
        return self._spelled.get(index)

    def token_id(self, text: str) -> int | None:
        return self.ids.get(text, self.ranks.get(unspell(text)))

    def plain_json(self) -> str | None:
        return None if self.converted is None else without_special(self.converted)

    def state(self) -> dict[str, Any]:
        ordered = b"".join(
            len(token).to_bytes(4) + token
            for token in sorted(self.ranks, key=self.ranks.__getitem__)
        )
        return {
            "tiktoken": hashlib.sha256(ordered).hexdigest(),
            "split": SPLIT,
            "special": self.ids,
        }


def _special_tokens(begin: int, config: Mapping[str, Any], where: str) -> dict[str, int]:
    given = {token.content: token.id for token in added_tokens(config) if token.special}
    if given:
        if min(given.values()) < begin:
            raise WrongInput(
                f"{where} has {begin} ranks, and its configuration names special tokens below; give"
                " the configuration of this file"
            )
        return given
    numbers = itertools.count()
    return {
        LLAMA3.get(place) or f"<|reserved_special_token_{next(numbers)}|>": begin + place
        for place in range(SPECIALS)
    }


def _encoding(ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    try:
        import tiktoken
    except ImportError:
        raise WrongInput(
            "a tokenizer.model of tiktoken ranks needs tiktoken; pip install tiktoken"
        ) from None
    return tiktoken.Encoding("ranks", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special)


def _cut(text: str) -> list[str]:
    """Split a text so that no run of whitespace or of other characters is longer than the library
    can handle.
    """
    pieces, begin, place = list[str](), 0, 0
    for _, run in itertools.groupby(text, str.isspace):
        length = sum(1 for _ in run)
        for cut in range(place + LONGEST_RUN, place + length, LONGEST_RUN):
            pieces.append(text[begin:cut])
            begin = cut
        place += length
    return [*pieces, text[begin:]]


def _letters() -> dict[int, str]:
    """One printable character for each byte, as GPT-2 chose them and every tokenizer.json of a
    byte-level BPE spells them.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = itertools.count(256)
    return {byte: chr(byte) if byte in printable else chr(next(others)) for byte in range(256)}


LETTERS = _letters()
_BYTES = {letter: byte for byte, letter in LETTERS.items()}


def spell(token: bytes) -> str:
    """Spell bytes as printable characters."""
    return "".join(LETTERS[byte] for byte in token)


def unspell(text: str) -> bytes:
    """The bytes that a text of such characters spells; b"" if it contains others."""
    return (
        bytes(_BYTES[letter] for letter in text)
        if all(letter in _BYTES for letter in text)
        else b""
    )
