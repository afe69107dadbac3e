"""The interface of a kind of source: what implements `SCHEME:...` in `data.train[].source`.

A new kind is one class with this interface, registered in the table of `ingot/config/doors.py` or
by an entry point `source.SCHEME` in the group `ingot.plugins`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import DocumentExtractor
from ingot.data.documents.records import BadRecord, ParsedDocument
from ingot.data.sources.source_file import SourceFile


class SourceKind:
    """Finds the files or shards of one kind of source, and reads those that are not files.

    An instance is made for each use, without arguments: it has no state between calls, and workers
    make their own.
    """

    yields_records: ClassVar[bool] = False
    """Whether `read` yields the documents; otherwise `SourceFile.path` is a file of
    `SourceFile.format`, which ingot reads itself.
    """
    checks_changes: ClassVar[bool] = False
    """Whether `find` is cheap and local, so that `prepare` may ask whether the source changed."""

    def find(self, source: SourceSettings, knob: str) -> list[SourceFile]:
        """The files or shards of a source, in reading order. No content is read.

        Each has a name, unique in its source, which becomes part of its documents' identities, and
        a `stamp` (plain JSON values) that changes with its content. `format` is `records` if `read`
        yields the documents. Without `bytes` in the stamp a shard is a task of its own.

        Args:
            knob: the place in the recipe, for errors.

        Raises:
            WrongInput: there is no such source.
            Failed: it cannot be reached.
        """
        raise NotImplementedError

    def fetch(self, file: SourceFile) -> None:
        """Called once in the command's process before `file` is read: downloads it, or warns of
        what its stamp cannot detect.
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
