"""The record batches of Arrow streams and files, checked for damage, which Arrow itself does not
notice: it reads on beyond their end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

from ingot.base.lazy import lazy_import

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = lazy_import("pyarrow")

ARROW_FILE = b"ARROW1"


def arrow_batches(stream: IO[bytes]) -> Iterator[Any]:
    """The schema, then the record batches one by one."""
    is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
    stream.seek(0)
    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
    batches = (
        (reader.get_batch(number) for number in range(reader.num_record_batches))
        if is_file
        else reader
    )

    def chained() -> Iterator[Any]:
        yield reader.schema
        yield from batches
        if not is_file and stream.read(1):
            raise pa.ArrowInvalid("more follows behind what says that it is the end")

    return chained()


def whole(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch; values of a damaged one may lie beyond it, and reading them ends the process.
    Raises ArrowInvalid for those, and leaves alone what is not UTF-8, which is told by its row.
    """
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            column.view(_as_bytes(column.type)).validate(full=True)
    return batch


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes in place of texts, however deep: one that stays a text costs all rows."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):  # JSON, for one
        return _as_bytes(kind.storage_type)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_as_bytes(kind.key_type), _as_bytes(kind.item_type))
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _as_bytes(kind.value_type), kind.ordered)
    if types.is_run_end_encoded(kind):
        return pa.run_end_encoded(kind.run_end_type, _as_bytes(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_as_bytes(kind.value_type), kind.list_size)
    for is_such, list_of in (
        (types.is_list, pa.list_),
        (types.is_large_list, pa.large_list),
        (types.is_list_view, pa.list_view),
        (types.is_large_list_view, pa.large_list_view),
    ):
        if is_such(kind):
            return list_of(_as_bytes(kind.value_type))
    bytes_of = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    return bytes_of.get(kind, kind)
