"""The vectorised records are those of `encode_document`, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.data.records import encode_documents
from ingot.tokenizers.tokenizer import Tokenizer
from tests.tokenizers.small import bpe_files, unigram_files

TOKENIZERS = {
    "bos and eos": Tokenizer(bpe_files()), "eos": Tokenizer(bpe_files(add_bos_token=False)), "bos": Tokenizer(bpe_files(eos_token=None)),
    "neither": Tokenizer(bpe_files(add_bos_token=False, eos_token=None)), "unigram": Tokenizer(unigram_files()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=6))
def test_each_document_alone(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    flat, lengths = encode_documents(tokenizer, texts)
    assert [record.tolist() for record in np.split(flat, np.cumsum(lengths)[:-1])][: len(texts)] == [tokenizer.encode_document(text) for text in texts]
    assert len(flat) == lengths.sum()
