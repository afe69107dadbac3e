"""The rows of a BigQuery query as documents."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ingot.base.markers import fingerprint
from ingot.base.progress import say
from ingot.cloud.bigquery import query_rows
from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import SourceFile

SCHEME = "bigquery:"


def find_query(source: SourceSettings) -> list[SourceFile]:
    """A query as one file whose identity is its text: changes of the tables cannot be detected."""
    sql = source.source.removeprefix(SCHEME).strip()
    return [SourceFile(sql, f"bigquery-{fingerprint(sql)}", "bigquery", {"path": source.source})]


def warn_of_query(file: SourceFile) -> None:
    """Warn of what a query cannot guarantee."""
    say(
        "warning: changed tables behind a bigquery: source are not seen; read them again with"
        " `--again`"
    )
    if not re.search(r"\border\s+by\b", file.path, re.IGNORECASE):
        say(
            "warning: the query has no ORDER BY, so its rows may come in another order next time,"
            " and documents have other identities"
        )


def query_documents(
    file: SourceFile, extractor: DocumentExtractor
) -> Iterator[ParsedDocument | BadRecord]:
    """The documents of the result, page by page; rows count from 1.

    Raises:
        WrongInput: the query is wrong or not allowed, the column is missing, or the package is.
        Failed: BigQuery cannot be reached.
    """
    for row, record in enumerate(query_rows(file.path, project=file.project), start=1):
        if row == 1:
            extractor.check("the result of the query", list(record))
        yield extractor.extract(row, record)


class BigQuerySource(SourceKind):
    """`bigquery:SQL`: the rows of a query."""

    yields_records = True

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        return find_query(source)

    def fetch(self, file: SourceFile) -> None:
        warn_of_query(file)

    def read(
        self, file: SourceFile, extractor: DocumentExtractor
    ) -> Iterator[ParsedDocument | BadRecord]:
        return query_documents(file, extractor)
