"""The verb `ingest`: reads every document of the recipe's sources once into `data/raw/`, without
cleaning or tokenising.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.base.errors import WrongInput
from ingot.base.markers import FileEntry
from ingot.base.progress import Progress, say
from ingot.base.reports import VerbOutcome, file_sizes
from ingot.base.storage import atomic_folder
from ingot.config.recipe import Recipe
from ingot.config.sections.data import SourceSettings
from ingot.data.documents.kinds import PLURALS, DocumentExtractor
from ingot.data.documents.records import EMPTY, FEW, refuse_many
from ingot.data.engines.local import LocalEngine
from ingot.data.raw.ingest_tasks import (
    IngestedTask,
    IngestStage,
    IngestTask,
    RecordTally,
    block_bytes,
    cut_into_tasks,
)
from ingot.data.raw.store import (
    GROUP_BYTES,
    GROUP_DOCUMENTS,
    MANIFEST,
    RawData,
    RawPart,
    RawSource,
    knobs_of,
    write_manifest,
)
from ingot.data.sources.find import fetch_files, recipe_sources, source_files, stamps_of
from ingot.data.sources.megatron import token_groups
from ingot.data.sources.source_file import SourceFile
from ingot.data.splits import Split

# Where the tasks' parts lie until all are done and get their final numbers.
TASKS = ".tasks"
# Below this size, starting processes takes longer than reading here.
ALONE_BYTES = 250_000_000
ONLY_TEXTS = ("text", "wikipedia", "megatron")
TABLES = ("csv", "tsv")


@dataclass(frozen=True)
class _Plan:
    """A source with its files and tasks."""

    split: Split
    source: SourceSettings
    files: list[SourceFile]
    tasks: list[IngestTask]


def ingest(recipe: Recipe) -> VerbOutcome:
    """Read all sources into Parquet parts. Starts from scratch each time: the same sources give
    byte-identical files. An earlier result stays until the new parts are complete.

    Raises:
        WrongInput: a source is missing, empty or has no such column; a file is damaged or cut
            short, but with `on_bad: skip_files`; with `on_bad: stop`, the first bad record; more
            of a source is skipped than `max_skipped`.
    """
    files = source_files(recipe, say)
    total = sum(
        file.bytes
        for sources in files.values()
        for source in sources
        for file in source
        if file.format != "megatron"
    )
    fetch_files(file for sources in files.values() for source in sources for file in source)
    plans = list(_plans(recipe, files, block_bytes(total)))
    folder = recipe.folder.raw
    tasks = [task for plan in plans for task in plan.tasks]
    with atomic_folder(folder) as made:
        (made / TASKS).mkdir()
        with Progress("ingest", total=-(-total // 10**6), unit="MB") as progress:
            work = IngestStage(made / TASKS, recipe.data.on_bad)
            with contextlib.closing(_engine(recipe, tasks, total)) as engine:
                engine.warm("ingot.data.raw.ingest_tasks")
                done = engine.run(work, tasks, progress) if tasks else []
        splits, entries = _gather(made, plans, done, recipe.data.max_skipped)
        shutil.rmtree(made / TASKS)
        write_manifest(made, splits, entries)
    raw = RawData(folder, splits)
    paths = [folder / MANIFEST, *(folder / entry.path for entry in entries)]
    return VerbOutcome(
        _in_words(raw), str(folder), raw.identity, file_sizes(recipe.folder.root, paths)
    )


def _plans(
    recipe: Recipe, files: dict[Split, list[list[SourceFile]]], block: int
) -> Iterator[_Plan]:
    number = 0
    for split, sources in recipe_sources(recipe).items():
        for place, (source, found) in enumerate(zip(sources, files[split], strict=True)):
            _check_formats(recipe, f"data.{split}[{place}]", source, found)
            extractor = DocumentExtractor.for_source(source, recipe.documents, recipe.labels)
            tasks = list[IngestTask]()
            if found[0].format != "megatron":
                for pieces in cut_into_tasks(found, block):
                    tasks.append(
                        IngestTask(
                            number, split, place, not tasks, pieces, extractor, source.fraction
                        )
                    )
                    number += 1
            yield _Plan(split, source, found, tasks)


def _check_formats(
    recipe: Recipe, knob: str, source: SourceSettings, files: Sequence[SourceFile]
) -> None:
    """Refuse formats that cannot hold this kind of document, and column names for formats with
    fixed columns.
    """
    unfit: tuple[str, ...] = () if recipe.documents == "text" else ONLY_TEXTS
    if recipe.documents == "masked":
        unfit = ("megatron",)  # tokens already, with those of decoders around them
    for file in files:
        if file.format in unfit:
            raise WrongInput(
                f"{knob}.source {source.source} holds {file.format} ({file.name}), and"
                f" objective.kind={recipe.objective.kind} trains on {PLURALS[recipe.documents]};"
                " give JSONL, JSON, Parquet, CSV, TSV or Arrow, or set `format`"
            )
        if source.names and file.format not in TABLES:
            raise WrongInput(
                f"{knob}.names is for CSV and TSV without a header line, and {source.source} holds"
                f" {file.format} ({file.name}); remove it"
            )


def _engine(recipe: Recipe, tasks: Sequence[IngestTask], total: int) -> LocalEngine:
    """Local processes, whatever engine `prepare` uses; only this process if there is little to
    read.
    """
    sized = all("bytes" in piece.file.stamp for task in tasks for piece in task.pieces)
    if sized and total < ALONE_BYTES:
        return LocalEngine(1)
    return LocalEngine(recipe.data.engine.workers if recipe.data.engine.kind == "local" else 0)


def _gather(
    folder: Path, plans: Sequence[_Plan], results: Sequence[IngestedTask], most: float
) -> tuple[dict[Split, list[RawSource]], list[FileEntry]]:
    """Move the tasks' parts to their final names; returns the result of each source and all files.
    `most`: the share of a source's records that may be skipped.
    """
    splits: dict[Split, list[RawSource]] = {}
    entries, remaining = list[FileEntry](), iter(results)
    for plan in plans:
        made = splits.setdefault(plan.split, [])
        if not plan.tasks:
            made.append(_tokens(plan))
            continue
        tally, parts = RecordTally(), list[RawPart]()
        first = sum(len(source.parts) for source in made if source.kind != "tokens")
        for done in (next(remaining) for _ in plan.tasks):
            tally.add(done.tally)
            for part, entry in done.parts:
                path = f"{plan.split}-{first + len(parts):05d}.parquet"
                os.replace(folder / TASKS / part.path, folder / path)
                parts.append(replace(part, path=path))
                entries.append(replace(entry, path=path))
        _tell(plan, tally, parts, most)
        groups = [group for part in parts for group in part.groups]
        stamps, seen = stamps_of(plan.files)
        made.append(
            RawSource(
                plan.source.source,
                knobs_of(plan.source),
                len(plan.files),
                sum(documents for documents, _ in groups),
                sum(size for _, size in groups),
                parts,
                dict(tally.bad.most_common()),
                tally.examples,
                stamps,
                plan.tasks[0].extractor.documents,
                seen,
                list(plan.tasks[0].extractor.labels),
            )
        )
    return splits, entries


def _tokens(plan: _Plan) -> RawSource:
    """The entry of a source of existing columns, which are not copied."""
    if plan.source.fraction < 1.0:
        raise WrongInput(
            f"{plan.source.source}: `fraction` cannot be used with existing columns; remove it, or"
            " give the texts"
        )
    found = [(file, *token_groups(file, GROUP_BYTES, GROUP_DOCUMENTS)) for file in plan.files]
    parts = [RawPart(file.path, digest, groups) for file, digest, groups in found]
    groups = [group for part in parts for group in part.groups]
    say(
        f"warning: {plan.source.source} is taken as it is: nothing in it tells which tokenizer made"
        " its ids; they must be this recipe's"
    )
    stamps, seen = stamps_of(plan.files)
    return RawSource(
        plan.source.source,
        knobs_of(plan.source),
        len(plan.files),
        sum(documents for documents, _ in groups),
        sum(size for _, size in groups),
        parts,
        {},
        [],
        stamps,
        "tokens",
        seen,
    )


NO_TEXT = (
    "save texts as UTF-8 (`iconv -f ENCODING -t UTF-8`), unpack archives, and turn other formats,"
    " such as PDF, into text"
)
"""What to do with files that are no text as ingot reads it."""
NOT_TEXT = {"invalid UTF-8", "not text"}
"""What is said of records of such files."""


def _tell(plan: _Plan, tally: RecordTally, parts: Sequence[RawPart], most: float) -> None:
    """Report skipped records; refuse a source without a single document, and one of which more than
    the share `most` is skipped.
    """
    name = plan.source.source
    for example in tally.examples[:FEW]:
        say(f"skipped {example}")
    if not tally.good and tally.keys:
        raise plan.tasks[0].extractor.missing_error(name, tally.keys)
    if not tally.good:
        files = f"{len(plan.files):,} file{'s' if len(plan.files) > 1 else ''}"
        raise WrongInput(
            f"{name} has no documents in {files} ({str(tally) or 'nothing is in there'});"
            f" {NO_TEXT if tally.bad.keys() & NOT_TEXT else 'check the path, `format` and `text`'}"
        )
    if not parts:
        raise WrongInput(
            f"{name}: fraction={plan.source.fraction} leaves none of its {tally.good:,} documents;"
            " raise it"
        )
    skipped, total = tally.bad.total(), tally.good + tally.bad.total()
    told = f"{name}: skipped {skipped:,} of {total:,} records ({tally})"
    lost = skipped - tally.bad[EMPTY]
    refuse_many(told, lost, total - tally.bad[EMPTY], most)
    if skipped > FEW:
        say(f"{told}; manifest.json names some")


def _in_words(raw: RawData) -> str:
    everything = [source for sources in raw.splits.values() for source in sources]
    skipped = sum(count for source in everything for count in source.bad.values())
    documents = sum(source.documents for source in everything)
    return f"{documents:,} documents, {raw.bytes / 1e6:,.1f} MB" + (
        f", {skipped:,} skipped" if skipped else ""
    )
