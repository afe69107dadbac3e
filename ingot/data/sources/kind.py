"""The face of a kind of source: what stands behind `SCHEME:...` in `data.train[].source`.

A new kind is one class with this face, named in the table of `ingot/config/doors.py` or by an entry
point `source.SCHEME` in the group `ingot.plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources.source_file import SourceFile


class SourceKind:
    """Finds the files or shards of one kind of source, and reads those that are no files.

    An instance is made for each use, without arguments: it keeps nothing between calls, and workers
    make their own.
    """

    yields_records: ClassVar[bool] = False
    """Whether `read` gives the documents; else `SourceFile.path` is a file of `SourceFile.format`,
    which ingot reads itself.
    """
    checks_changes: ClassVar[bool] = False
    """Whether `find` is cheap and local, so that `prepare` may ask whether the source changed."""

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        """The files or shards of a source, in the order in which they are read. No content is read.

        Each has a name, unique in its source, which stands in the identities of its documents, and
        a `stamp` (plain JSON values) that differs when its content does. `format` is `records`
        where `read` gives the documents. Without `bytes` in the stamp a shard is a task of its own.

        Args:
            knob: the place in the recipe, for errors.

        Raises:
            WrongInput: there is no such source.
            Failed: it cannot be reached.
        """
        raise NotImplementedError

    def fetch(self, file: SourceFile) -> None:
        """Called once before `file` is read, in the process of the command: downloads it, or warns
        of what its stamp cannot show.
        """

    def read(
        self, file: SourceFile, extractor: DocumentExtractor
    ) -> Iterator[ParsedDocument | BadRecord]:
        """The documents of one file or shard, in a worker; rows count from 1. A record (a dict of
        JSON values) becomes a document by `extractor.extract(row, record)`.

        Raises:
            WrongInput: the records lack the columns that the recipe names.
            Failed: the source cannot be reached.
        """
        raise NotImplementedError
