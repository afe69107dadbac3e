"""Documents to records: the one pure function of `prepare`, the same wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.tokenizers.tokenizer import Tokenizer

# Named in the fingerprint of what was prepared; raise it when the same documents would give other records.
RECORDS = "pretrain-1"


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """`Tokenizer.encode_document` of each text: all ids one after the other, and how many each text has."""
    flat, offsets = tokenizer.encode_batch(texts)
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


def identity(tokenizer_identity: str) -> dict[str, Any]:
    """What decides about records beside the documents."""
    return {"records": RECORDS, "tokenizer": tokenizer_identity}
