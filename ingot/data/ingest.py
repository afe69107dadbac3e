"""The verb `ingest`: every document of the recipe's sources, once, into `data/raw/`. Cleans and tokenises nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.base.errors import WrongInput
from ingot.base.fingerprint import fingerprint
from ingot.base.markers import FileEntry
from ingot.base.progress import Progress, say
from ingot.base.steprecord import Outcome, sizes
from ingot.base.storage import disk_errors, open_read
from ingot.config.recipe import Recipe
from ingot.config.work import Source
from ingot.data.items import Bad, missing_column
from ingot.data.raw import MANIFEST, Raw, RawSource, Text, knobs_of, write_manifest, write_parts
from ingot.data.readers import read_items
from ingot.data.sources import SourceFile, Split, recipe_sources, source_files, writable

EXAMPLES = 20
SHOWN = 3
# So many records without the column, and none with it, are a wrong column name rather than bad records.
UNDECIDED = 100


def ingest(recipe: Recipe) -> Outcome:
    """Read all sources into Parquet parts. Starts clean each time: the same sources give byte-identical files.

    Raises:
        WrongInput: a source is missing, empty or has no such column; with `on_bad: stop`, the first bad record.
    """
    files = source_files(recipe)
    folder = recipe.folder.raw
    with disk_errors(folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    total = sum(file.bytes for sources in files.values() for source in sources for file in source)
    splits: dict[Split, list[RawSource]] = {}
    entries: list[FileEntry] = []
    with Progress("ingest", total=-(-total // 10**6), unit="MB") as progress:
        reading = _Reading(progress, stop=recipe.data.on_bad == "stop")
        for split, sources in recipe_sources(recipe).items():
            splits[split] = []
            for number, (source, found) in enumerate(zip(sources, files[split], strict=True)):
                texts = reading.texts(source, found)
                written = list(write_parts(folder, split, number, texts, sum(len(made.parts) for made in splits[split])))
                entries += [entry for _, entry in written]
                groups = [group for part, _ in written for group in part.groups]
                splits[split].append(RawSource(
                    source.source, knobs_of(source), len(found), sum(documents for documents, _ in groups), sum(size for _, size in groups),
                    [part for part, _ in written], dict(reading.tally.bad.most_common()), reading.tally.examples,
                    fingerprint([file.stamp for file in found]),
                ))
                reading.finish(source, len(found))
    write_manifest(folder, splits, entries)
    raw = Raw(folder, splits)
    paths = [folder / MANIFEST, *(folder / entry.path for entry in entries)]
    return Outcome(_in_words(raw), str(folder), raw.identity, sizes(recipe.folder.root, paths))


def _in_words(raw: Raw) -> str:
    everything = [source for sources in raw.splits.values() for source in sources]
    skipped = sum(count for source in everything for count in source.bad.values())
    documents = sum(source.documents for source in everything)
    return f"{documents:,} documents, {raw.bytes / 1e6:,.1f} MB" + (f", {skipped:,} skipped" if skipped else "")


@dataclass
class _Tally:
    """What one source held: good records, bad ones by reason, some of these by place."""

    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    keys: tuple[str, ...] = ()
    """The keys of the last record in which the wanted one was missing."""

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in self.bad.most_common())


class _Reading:
    """Goes through the files of one source after the other, counting what is bad and showing how far it is."""

    def __init__(self, progress: Progress, *, stop: bool) -> None:
        self.tally = _Tally()
        self._progress, self._stop = progress, stop
        self._bytes = self._documents = 0

    def texts(self, source: Source, files: list[SourceFile]) -> Iterator[Text]:
        """(doc_id, text) of every good record of one source."""
        self.tally = _Tally()
        for file in files:
            try:
                with open_read(file.path) as stream:
                    for item in read_items(stream, file.path, file.format, source.text):
                        if isinstance(item, Bad):
                            self._count(item, file, source)
                            continue
                        self.tally.good += 1
                        self._documents += 1
                        if self._documents % 1000 == 0:
                            self._show(stream.tell())
                        yield f"{file.name}:{item.row}", item.text
            except OSError as error:
                self._count(Bad(1, "unreadable file", str(error)), file, source)
            self._bytes += file.bytes
            self._show(0)

    def _show(self, within: int) -> None:
        self._progress.update((self._bytes + within) // 10**6, documents=f"{self._documents:,}")

    def _count(self, bad: Bad, file: SourceFile, source: Source) -> None:
        tally, place = self.tally, f"{writable(file.path)}:{bad.row}"
        tally.keys = bad.keys or tally.keys
        tally.bad[bad.reason] += 1
        wrong_name = not tally.good and tally.bad[bad.reason] == tally.bad.total()
        if bad.keys and wrong_name and (self._stop or tally.bad.total() >= UNDECIDED):
            raise missing_column(place, source.text, bad.keys)
        if self._stop:
            raise WrongInput(f"{place}: {bad}; mend it, or set data.on_bad=skip")
        told = writable(f"{place}: {bad}")
        if len(tally.examples) < EXAMPLES:
            tally.examples.append(told)
        if tally.bad.total() <= SHOWN:
            say(f"skipped {told}")

    def finish(self, source: Source, files: int) -> None:
        """Tell what was skipped; refuse a source that gave nothing."""
        tally = self.tally
        if not tally.good and tally.keys:
            raise missing_column(source.source, source.text, tally.keys)
        if not tally.good:
            raise WrongInput(f"{source.source} has no documents in {files:,} files ({tally or 'all are empty'}); check the path, `format` and `text`")
        if tally.bad.total() > SHOWN:
            say(f"{source.source}: skipped {tally.bad.total():,} of {tally.good + tally.bad.total():,} ({tally}); manifest.json names some")
