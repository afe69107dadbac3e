"""Made-up documents: `numbers:3` is a source of three shards with five records each."""

from __future__ import annotations

from collections.abc import Iterator

from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources.kind import SourceKind
from ingot.data.sources.source_file import SourceFile


class Numbers(SourceKind):
    """Finds shards by arithmetic and reads their records in the workers."""

    yields_records = True

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        count = int(source.source.partition(":")[2])
        return [
            SourceFile(
                source.source, f"numbers-{n}", "records", {"path": source.source, "shard": n}
            )
            for n in range(count)
        ]

    def fetch(self, file: SourceFile) -> None:
        """Nothing lies elsewhere."""

    def read(
        self, file: SourceFile, extractor: DocumentExtractor
    ) -> Iterator[ParsedDocument | BadRecord]:
        for row in range(1, 6):
            record = {"body": f"number {file.stamp['shard']}-{row}" if row != 3 else None}
            yield extractor.extract(row, record)
