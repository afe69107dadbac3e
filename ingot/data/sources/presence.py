"""Which rows of a table have something in a column of files, such as images: these are asked for
nothing else, and as Python values they would fill the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ingot.base.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
else:
    np = lazy_import("numpy")
    pa, pc = lazy_import("pyarrow"), lazy_import("pyarrow.compute")
    pq = lazy_import("pyarrow.parquet")


def files_among(schema: pa.Schema, names: Collection[str]) -> list[str]:
    """The columns of these `names` that hold the bytes of files."""
    return [field.name for field in schema if field.name in names and _has_bytes(field.type)]


def smallest_leaf(file: pq.ParquetFile, name: str) -> str:
    """The part of a column that takes the fewest bytes: a path beside an image tells as well
    whether it is there.
    """
    groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    sizes = {
        leaf: sum(group.column(number).total_compressed_size for group in groups)
        for number in range(len(file.schema))
        if (leaf := file.schema.column(number).path) == name or leaf.startswith(f"{name}.")
    }
    return str(min(sizes, key=sizes.__getitem__))


def with_presence(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The batch with true in place of the values of these columns, and null where there is none or
    an empty list.
    """
    for name in names:
        there = _present(batch.column(name))
        told = pc.if_else(there, there, pa.scalar(None, pa.bool_()))
        batch = batch.set_column(batch.schema.names.index(name), name, told)
    return batch


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists, in whichever of Arrow's ways."""
    checks = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(check(kind) for check in checks)


def _has_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_bytes(field.type) for field in kind)
    if is_list(kind):
        return _has_bytes(kind.value_type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _present(values: pa.Array) -> pa.BooleanArray:
    if not is_list(values.type):
        return values.is_valid()
    # Not by list_parent_indices: it counts what lies beneath a null, and refuses a list view that
    # shares its values with another.
    rows, sizes = np.arange(len(values)), pc.list_value_length(values).fill_null(0)
    there = _present(pc.list_flatten(values)).to_numpy(zero_copy_only=False)
    return pa.array(np.isin(rows, np.repeat(rows, sizes)[there]))
