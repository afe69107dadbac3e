"""Documents to records: the one pure function of `prepare`, the same wherever it runs.

A record is the same row of every column of its objective. For pretraining: BOS where the tokenizer puts one, the text, EOS.
For chats: the chat as its template writes it, and beside it which tokens are trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.config.data import COLUMNS
from ingot.data.chats import from_messages
from ingot.tokenizers.chat import encode_chats
from ingot.tokenizers.tokenizer import Tokenizer

# Named in the fingerprint of what was prepared; raise it when the same documents would give other records.
RECORDS = {"pretrain": "pretrain-1", "sft": "sft-1"}

EncodeBatch = Callable[[Sequence[str]], tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]


@dataclass(frozen=True)
class Records:
    """Records one after the other: the elements of each column, and how many each record has, the same in all columns.

    `bytes` is the size of the texts that are learnt to be written: of a chat only what the assistant says.
    """

    columns: dict[str, npt.NDArray[Any]]
    lengths: npt.NDArray[np.int64]
    bytes: int
    digest: int
    """Sum of the SHA-256 of the documents, so that the set of texts counts and not how they are cut into batches."""

    def record(self, index: int) -> dict[str, npt.NDArray[Any]]:
        end = int(self.lengths[: index + 1].sum())
        return {name: column[end - int(self.lengths[index]) : end] for name, column in self.columns.items()}


def encode_records(objective: str, tokenizer: Tokenizer, encode_batch: EncodeBatch, texts: Sequence[str]) -> Records:
    """The records of some documents. `encode_batch` gives the ids of texts, the same as the tokenizer's own.

    Raises:
        WrongInput: the chat template refuses a chat.
    """
    data = [text.encode() for text in texts]
    digest = sum(int.from_bytes(hashlib.sha256(document).digest()) for document in data)
    if objective == "pretrain":
        flat, lengths = encode_documents(tokenizer, texts, encode_batch)
        return Records(dict(zip(COLUMNS[objective], (flat,), strict=True)), lengths, sum(map(len, data)), digest)
    chats = [from_messages(text) for text in texts]
    flat, mask, lengths = encode_chats(tokenizer, chats, encode_batch)
    said = sum(len(message["content"].encode()) for chat in chats for message in chat if message["role"] == "assistant")
    return Records(dict(zip(COLUMNS[objective], (flat, mask), strict=True)), lengths, said, digest)


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], encode_batch: EncodeBatch | None = None
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`Tokenizer.encode_document` of each text: all ids one after the other, and how many each text has."""
    flat, offsets = (encode_batch or tokenizer.encode_batch)(texts)
    before, after = tokenizer.before, tokenizer.after
    lengths = np.diff(offsets) + (len(before) + len(after))
    ends = np.cumsum(lengths)
    framed = np.empty(len(flat) + len(texts) * (len(before) + len(after)), np.int32)
    inner = np.ones(len(framed), np.bool_)
    for position, tokens in ((ends - lengths, before), (ends - len(after), after)):
        for shift, token in enumerate(tokens):
            framed[position + shift] = token
            inner[position + shift] = False
    framed[inner] = flat
    return framed, lengths


def identity(objective: str, tokenizer_identity: str) -> dict[str, Any]:
    """What decides about records beside the documents."""
    return {"records": RECORDS[objective], "tokenizer": tokenizer_identity}
