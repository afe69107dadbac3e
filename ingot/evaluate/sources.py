"""Which source held-out documents are of, and the metrics of each beside those of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ingot.base.reports import Metric
from ingot.config.sections.data import SourceSettings
from ingot.data.batches.rows import Rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.column import Column
from ingot.data.columns.manifest import PreparedSource, set_identity
from ingot.data.sources.source_file import without_query

Chosen = npt.NDArray[np.bool_]
"""Which of some units are those of one source."""

MAX_NAME = 40
"""Characters of a source's name in a metric."""


def source_of_documents(
    columns: Sequence[Column], sources: Sequence[PreparedSource]
) -> npt.NDArray[np.int64]:
    """The number of the source of each document that has tokens, [documents]; `columns` are those
    of `open_columns`.
    """
    of_part = np.repeat(np.arange(len(sources)), [len(source.parts) for source in sources])
    return np.repeat(
        of_part, [np.count_nonzero(column.lengths(0, len(column))) for column in columns]
    )


def source_of_rows(rows: Rows | Samples, count: int) -> npt.NDArray[np.int64]:
    """The number of the source of each of the first `count` rows, of which none has two."""
    return np.repeat(np.arange(len(rows.sizes)), rows.sizes)[:count]


def of_each_source(
    sources: Sequence[PreparedSource],
    of: npt.NDArray[np.int64],
    measure: Callable[[Chosen, str], dict[str, Metric]],
) -> dict[str, Metric]:
    """`NAME/METRIC/SOURCE` of each source, where there are several: what is learnt of one may be
    forgotten of another, which their sum does not show.

    Args:
        of: the number of the source of each unit that is measured.
        measure: from those of one source, and the identity of its documents, to their metrics.
    """
    found = dict[str, Metric]()
    for number, (source, called) in enumerate(zip(sources, source_names(sources), strict=True)):
        chosen = of == number
        if len(sources) > 1 and chosen.any():
            made = measure(chosen, set_identity([source]))
            found |= {f"{name}/{called}": metric for name, metric in made.items()}
    return found


def source_names(sources: Sequence[PreparedSource | SourceSettings]) -> list[str]:
    """How metrics call sources: by the last part of what a recipe says, or by their numbers, from
    1, where that is long, not of one source alone, or one of these numbers.
    """
    last = [without_query(source.source).rstrip("/").rpartition("/")[2] for source in sources]
    numbers = [str(number) for number in range(1, len(last) + 1)]
    return [
        number if len(name) > MAX_NAME or last.count(name) > 1 or name in numbers else name
        for name, number in zip(last, numbers, strict=True)
    ]
