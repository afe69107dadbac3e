"""Tables of raw documents are made of buffers: the same as pyarrow makes of lists."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingot.base.errors import WrongInput
from ingot.data.raw import store

TEXTS = ["", "copper", "für 金 🔥", "x" * 100_000, "\x00"]


def test_a_table_of_buffers_is_the_table_of_lists_byte_for_byte() -> None:
    data = [text.encode() for text in TEXTS]
    ids = [f"ä.jsonl:{number}" for number in range(len(TEXTS))]
    made = store._table(7, store._Group(ids, data, 0))
    made.validate(full=True)
    listed = pa.table([ids, pa.array([7] * len(ids), pa.int32()), TEXTS], schema=store.SCHEMA)
    assert made.equals(listed)
    files = [io.BytesIO(), io.BytesIO()]
    for file, table in zip(files, (made, listed), strict=True):
        pq.write_table(table, file, compression="lz4", use_dictionary=False)
    assert files[0].getvalue() == files[1].getvalue()


def test_more_than_arrow_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_BYTES", 10)
    store._strings([b"0123456789"])
    with pytest.raises(WrongInput, match="a document of 11 bytes"):
        store._strings([b"01234567890"])
