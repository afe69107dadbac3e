"""Where words begin in the ids of a text, as the tokenizer's own library cuts texts into words
before it cuts these into tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ingot.base.errors import WrongInput
from ingot.tokenizers.tiktoken_backend import LETTERS
from ingot.tokenizers.tokenizer import Tokenizer

Flags = npt.NDArray[np.bool_]
WordStarts = Callable[[npt.NDArray[Any]], Flags]
"""Whether a word begins at each of the ids of a text without special tokens, `[T]`. The first one
begins a word, also where it is the rest of one that a piece of a text was cut in.
"""
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def word_starts(tokenizer: Tokenizer) -> WordStarts:
    """What finds words in the ids of this tokenizer: of WordPiece those of BERT, of bytes (GPT-2,
    RoBERTa) what its expression cuts, of SentencePiece what spaces separate.

    Raises:
        WrongInput: it is not known from ids where its words begin.
    """
    if tokenizer.library.startswith("sentencepiece"):
        return _spaced(tokenizer)
    state = json.loads(tokenizer.plain_json() or "{}")
    cutting = [str(part["type"]) for part in _parts(state.get("pre_tokenizer"))]
    model = state.get("model") or {}
    if model.get("type") == "WordPiece" and "BertPreTokenizer" in cutting:
        prefix = str(model["continuing_subword_prefix"])
        return _listed(tokenizer, lambda token: not token.startswith(prefix))
    if cutting and cutting[-1] == "ByteLevel":
        return _cut_as_bytes(tokenizer)
    split = all(part.get("split", True) for part in _parts(state.get("pre_tokenizer")))
    if "Metaspace" in cutting and {*cutting} <= {"Metaspace", "WhitespaceSplit"} and split:
        return _spaced(tokenizer)
    how = ", ".join([str(model.get("type", "no model")), *cutting])
    raise _unknown(tokenizer, f"it cuts texts by {how}")


def _unknown(tokenizer: Tokenizer, reason: str) -> WrongInput:
    return WrongInput(
        f"{tokenizer.where}: where its words begin cannot be told from ids ({reason}), which"
        " objective.whole_word_mask asks for; set that to false, or take a tokenizer of WordPiece,"
        " byte-level BPE or SentencePiece"
    )


def _parts(cutting: Any) -> Iterator[dict[str, Any]]:
    """What a pre-tokenizer consists of, in order."""
    if isinstance(cutting, dict):
        if cutting.get("type") == "Sequence":
            for part in cutting["pretokenizers"]:
                yield from _parts(part)
        else:
            yield cutting


def _spaced(tokenizer: Tokenizer) -> WordStarts:
    """Words begin with a space, `▁`, which has to be a token's first character, if it is in one."""
    for index in range(tokenizer.vocab_size):
        token = tokenizer.token(index) or ""
        if SPACE in token.lstrip(SPACE) and index not in tokenizer.special_ids.values():
            raise _unknown(tokenizer, f"its token {token!r} has a space within")
    return _listed(tokenizer, lambda token: token.startswith(SPACE))


def _listed(tokenizer: Tokenizer, begins: Callable[[str], bool]) -> WordStarts:
    """Whether a word begins at a token is told by the token alone."""
    known = (tokenizer.token(index) or "" for index in range(tokenizer.vocab_size))
    table = np.fromiter(map(begins, known), np.bool_, tokenizer.vocab_size)
    return partial(_looked_up, table)


def _looked_up(table: Flags, ids: npt.NDArray[Any]) -> Flags:
    found: Flags = table[ids]
    found[:1] = True
    return found


def _cut_as_bytes(tokenizer: Tokenizer) -> WordStarts:
    """The bytes of the tokens are the text, which the library's own pre-tokenizer cuts again. Added
    tokens are words of their own.
    """
    letters = {letter: byte for byte, letter in LETTERS.items()}
    if lacking := sum(tokenizer.token_id(letter) is None for letter in letters):
        raise _unknown(tokenizer, f"its vocabulary lacks {lacking} of the 256 bytes")
    added = {tokenizer.token_id(text) for text in tokenizer.special_texts}
    spelled: list[bytes | None] = []
    for index in range(tokenizer.vocab_size):
        token = tokenizer.token(index) or ""
        plain = index not in added and all(letter in letters for letter in token)
        spelled.append(bytes(letters[letter] for letter in token) if plain else None)
    library = tokenizers.Tokenizer.from_str(tokenizer.plain_json() or "")
    return partial(_cut_again, spelled, library)


def _cut_again(
    spelled: list[bytes | None], library: tokenizers.Tokenizer, ids: npt.NDArray[Any]
) -> Flags:
    pieces = [spelled[index] for index in ids.tolist()]
    found = np.zeros(len(pieces), np.bool_)
    begin = 0
    for place, piece in enumerate([*pieces, None]):
        if piece is None:
            run = [part for part in pieces[begin:place] if part is not None]
            found[begin:place] = _words_in(run, library)
            found[place : place + 1] = True
            begin = place + 1
    found[:1] = True
    return found


def _words_in(pieces: list[bytes], library: tokenizers.Tokenizer) -> Flags:
    """Whether a word begins at each piece of a text's bytes. A character whose beginning was cut
    off is taken for a letter, one whose end was for a part of the word before it.
    """
    whole = b"".join(pieces)
    rest = next((at for at, byte in enumerate(whole[:4]) if byte & 0xC0 != 0x80), len(whole))
    text = "a" * (rest > 0) + whole[rest:].decode(errors="ignore")
    cut = library.pre_tokenizer.pre_tokenize_str(text)
    sizes = [len(text[begin:end].encode()) for _, (begin, end) in cut]
    words = np.cumsum([0, *sizes[:-1]])
    words[1:] += max(0, rest - 1)
    found: Flags = np.isin(np.cumsum([0, *map(len, pieces)])[:-1], words)
    found[:1] = True
    return found
