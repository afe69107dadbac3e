"""The documents of a data set on the Hugging Face hub, streamed."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.base.errors import Failed
from ingot.data.hubsets import in_short, open_split
from ingot.data.items import Bad, Item
from ingot.data.sourcefile import SourceFile
from ingot.data.tables import batch_items, columns_of
from ingot.data.wanted import Wanted

BATCH_ROWS = 1000


def hub_items(file: SourceFile, wanted: Wanted) -> Iterator[Item | Bad]:
    """The documents of one share; rows count from 1 within it.

    Raises:
        WrongInput: the wanted column is missing, or is no text.
        Failed: the connection breaks down.
    """
    where, row, columns = file.stamp, 0, list[str]()
    share = (
        open_split(where, file.path)
        .shard(num_shards=where["shares"], index=where["share"])
        .with_format("arrow")
    )
    tables = iter(share.iter(batch_size=BATCH_ROWS))
    while True:
        try:
            table = next(tables, None)
        except (
            Exception
            # whatever the library, or one of its readers, makes of a lost connection or a bad file
        ) as error:
            raise Failed(
                f"{file.path} broke down after row {row} ({type(error).__name__}:"
                f" {in_short(error)}); run the same command again"
            ) from error
        if table is None:
            return
        if not row:
            columns = columns_of(table.schema, file.path, wanted)
        for batch in (table.select(columns) if columns else table).to_batches():
            yield from batch_items(batch, row, wanted)
            row += batch.num_rows
