"""Runs all of cleaning: filters, exact duplicates, near-duplicates, contamination, in this order.

A document dropped by one step is ignored by the next, so the counts of the steps add up. All work
is done by the engine's workers, stage by stage, over files in `data/clean/`; this process holds a
few figures per task. A killed run resumes with the unfinished tasks; once all are done, the
intermediate files of the stages are removed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.base.markers import FileEntry, fingerprint, problems, read_marker, write_marker
from ingot.base.progress import Progress
from ingot.base.storage import disk_errors
from ingot.config.doors import CLEANING
from ingot.config.recipe import Recipe
from ingot.config.sections.data import Clean
from ingot.data.cleaning.arrays import Hashes
from ingot.data.cleaning.cleaned import CleaningResult
from ingot.data.cleaning.corpus import Corpus
from ingot.data.cleaning.exchange import HashBucket, NamedTask, TaskFigures, boot_id, run
from ingot.data.cleaning.folding import fold_identity
from ingot.data.cleaning.ngrams import bands
from ingot.data.cleaning.report import (
    CleaningReport,
    FateStage,
    RangeGroup,
    StepReport,
    examples,
    merged,
)
from ingot.data.cleaning.steps.contamination import (
    ContaminationStage,
    EvaluationNgrams,
    MergeNgrams,
    SearchNgrams,
    read_against,
    write_against,
)
from ingot.data.cleaning.steps.exact_duplicates import ExactDuplicateStage, SurveyStage
from ingot.data.cleaning.steps.filters import DocumentFilters
from ingot.data.cleaning.steps.near_duplicates import (
    ConnectStage,
    GatherStage,
    GroupStage,
    RouteStage,
    SignStage,
    VerifyStage,
)
from ingot.data.engines.engine import Engine, Stage
from ingot.data.raw.ranges import RawRange, ranges
from ingot.data.raw.store import RawData
from ingot.data.splits import Shares

MARKER = "clean.json"
CODE = 2
"""Raise it when the same knobs come to drop other documents, or more is told of them."""

BUCKET_ROWS = 2_000_000
MOST_BUCKETS = 4096
CANDIDATES = 200_000
SEALED_TOGETHER = 64


def clean(recipe: Recipe, raw: RawData, engine: Engine) -> CleaningResult:
    """Find which documents are kept. The result of an earlier run with the same inputs is reused.

    Raises:
        WrongInput: a library is missing, a language is unknown, the raw documents are damaged.
        Failed: the disk is full, or a worker died.
    """
    # A worker's working directory may differ from this process's.
    knobs, folder = recipe.data.clean, (recipe.folder.data / "clean").absolute()
    if (undropped := _undropped(knobs)) is not None:
        return undropped
    against = read_against(knobs) if knobs.against else None
    filters = DocumentFilters.of(knobs)
    inputs = _inputs(knobs, raw, Shares.of(recipe.data), against)
    fates, stages = _fates(folder, inputs), folder / f"stages-{inputs}-{boot_id()}"
    if (found := _found(folder, knobs, inputs, checksums=True)) is not None:
        _sweep(folder, fates.name)
        return found
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARKER).unlink(missing_ok=True)
        _sweep(folder, fates.name, stages.name)
    cleaning = _Cleaning.of(recipe, raw, engine, fates, stages, against)
    report, files = cleaning.all(filters)
    write_marker(
        folder, MARKER, {"kind": "clean", "inputs": inputs, "report": asdict(report)}, files
    )
    _sweep(folder, fates.name)
    return CleaningResult(fates, knobs.normalize, inputs, report, fold_identity())


def cleaned_as(recipe: Recipe, identity: str | None) -> CleaningResult | None:
    """The result of this identity that an earlier `clean` of the recipe had, without a look at what
    that was made of; None if it is not there. Without an identity only where no document is
    dropped.
    """
    knobs = recipe.data.clean
    undropped = _undropped(knobs)
    if undropped is not None:
        return undropped if identity in (None, undropped.identity) else None
    folder = (recipe.folder.data / "clean").absolute()
    return None if identity is None else _found(folder, knobs, identity)


def files_of(recipe: Recipe, cleaned: CleaningResult) -> list[Path]:
    """The files of a result, which tell the kept documents to whoever reads them later."""
    folder = recipe.folder.data / "clean"
    marker = None if cleaned.folder is None else read_marker(folder, MARKER)
    if marker is None:
        return []
    return [folder / MARKER, *(folder / entry["path"] for entry in marker["files"])]


def _undropped(knobs: Clean) -> CleaningResult | None:
    """The result where no step is asked for that drops documents, else None."""
    if knobs.model_copy(update={"normalize": "none"}).wanted:
        return None
    if not knobs.wanted:
        return CleaningResult.nothing()
    identity = fingerprint([CODE, knobs.normalize, fold_identity()])
    return CleaningResult(None, knobs.normalize, identity, CleaningReport(), fold_identity())


def _found(
    folder: Path, knobs: Clean, inputs: str, *, checksums: bool = False
) -> CleaningResult | None:
    """What lies in `folder` already, if it was made of these inputs."""
    marker = read_marker(folder, MARKER)
    if (
        marker is None
        or marker.get("inputs") != inputs
        or problems(folder, marker, checksums=checksums)
    ):
        return None
    report = CleaningReport.of(marker["report"])
    return CleaningResult(_fates(folder, inputs), knobs.normalize, inputs, report, fold_identity())


def _fates(folder: Path, inputs: str) -> Path:
    return folder / f"fates-{inputs}"


def _inputs(knobs: Clean, raw: RawData, shares: Shares, against: Hashes | None) -> str:
    """Fingerprint of everything that determines which documents are kept and in which files that is
    recorded.
    """
    asked = knobs.model_dump(mode="json")
    if against is not None:  # by its content, since files of the same name may be others
        asked["contamination"]["against"] = hashlib.sha256(against.tobytes()).hexdigest()
    versions = {"fold": fold_identity()}
    if knobs.languages:
        versions["py3langid"] = importlib.metadata.version("py3langid")
    for step in knobs.steps:
        versions[step.kind] = CLEANING.code_of(step.kind) or ""
    cuts = [[task.name, task.first, task.last, task.begin] for task in ranges(raw)]
    return fingerprint([CODE, asked, raw.identity, shares.identity(), versions, cuts])


def _sweep(folder: Path, *keep: str) -> None:
    """Remove leftovers of other runs, which may be gigabytes."""
    for path in folder.iterdir():
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_file() and path.name != MARKER:
            path.unlink(missing_ok=True)
    for partial in folder.rglob(".*.partial-*"):
        partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Cleaning:
    """All stages over one corpus."""

    knobs: Clean
    raw: RawData
    engine: Engine
    out: Path
    corpus: Corpus
    tasks: list[RawRange]
    documents: int
    against: Hashes | None
    """N-grams of evaluation documents that are in no split."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        raw: RawData,
        engine: Engine,
        out: Path,
        folder: Path,
        against: Hashes | None,
    ) -> _Cleaning:
        documents = {
            split: sum(source.documents for source in sources)
            for split, sources in raw.splits.items()
        }
        corpus = Corpus(
            raw.folder.absolute(),
            folder,
            recipe.data.clean.normalize,
            Shares.of(recipe.data),
            documents.get("validation", 0),
            fold_identity(),
        )
        tasks = [task for task in ranges(raw) if task.kind != "tokens"]
        total = sum(documents.values())
        return cls(recipe.data.clean, raw, engine, out, corpus, tasks, total, against)

    def all(self, filters: DocumentFilters) -> tuple[CleaningReport, list[FileEntry]]:
        """Run every step that the recipe asks for, then write the report and the files that record
        which documents are kept.
        """
        if not self.tasks:
            return CleaningReport(), []
        looked = self._run(
            "survey", SurveyStage(self.corpus, filters, self.knobs.exact), self.tasks
        )
        steps, notes = list[str](), dict[str, int]()
        if self.knobs.exact:
            notes["without text, compared with nothing for exact duplicates"] = sum(
                told["empty"] for told in looked
            )
            self._run("exact duplicates", ExactDuplicateStage(self.corpus), self._buckets(1))
            steps.append("exact")
        if self.knobs.fuzzy is not None:
            notes |= self._fuzzy(tuple(steps))
            steps.append("fuzzy")
        if self.knobs.contamination is not None:
            notes |= self._contamination(tuple(steps))
            steps.append("contamination")
        told, files = self._seal(tuple(steps))
        wanted = self._wanted()
        sums = {step: merged(told, step) for step in wanted}
        shown = examples(self.corpus, self.tasks, {step: sums[step]["examples"] for step in wanted})
        dropped = [
            StepReport(step, sums[step]["documents"], sums[step]["bytes"], shown[step])
            for step in wanted
        ]
        documents, size, outside = (
            sum(told[name] for told in looked) for name in ("documents", "bytes", "outside")
        )
        noted = {note: count for note, count in notes.items() if count}
        return CleaningReport(documents, size, dropped, noted, outside), files

    def _wanted(self) -> list[str]:
        """The requested steps, in order."""
        asked: dict[str, bool] = {
            "min_chars": self.knobs.min_chars > 0,
            "max_chars": self.knobs.max_chars is not None,
            "languages": bool(self.knobs.languages),
            **{step.name: True for step in self.knobs.steps},
            "exact": self.knobs.exact,
            "fuzzy": self.knobs.fuzzy is not None,
            "contamination": self.knobs.contamination is not None,
        }
        return [step for step, wanted in asked.items() if wanted]

    def _fuzzy(self, after: tuple[str, ...]) -> dict[str, int]:
        knobs = self.knobs.fuzzy
        assert knobs is not None
        corpus, buckets = self.corpus, self._buckets(bands(knobs.similarity, knobs.permutations)[0])
        signed = self._run(
            "near-duplicates: signatures", SignStage(corpus, knobs, after), self.tasks
        )
        self._run("near-duplicates: groups", GroupStage(corpus, knobs, after), buckets)
        connected = self._run(
            "near-duplicates: components",
            ConnectStage(corpus, knobs, after, self.documents),
            [HashBucket(0, 1)],
            larger=0,
        )
        parts = _cut(connected[0]["candidates"], CANDIDATES)
        self._run(
            "near-duplicates: candidates by component",
            RouteStage(corpus, knobs, after, len(parts)),
            buckets,
            larger=0,
        )
        self._run(
            "near-duplicates: candidates", GatherStage(corpus, knobs, after, len(parts)), self.tasks
        )
        verified = self._run(
            "near-duplicates: clusters", VerifyStage(corpus, knobs, after), parts, larger=0
        )
        return {
            "without words, compared with nothing for near-duplicates": sum(
                told["empty"] for told in signed
            ),
            "groups of near-duplicates too large to compare in full": sum(
                told["bounded"] for told in verified
            ),
        }

    def _contamination(self, after: tuple[str, ...]) -> dict[str, int]:
        knobs = self.knobs.contamination
        assert knobs is not None
        corpus = self.corpus
        holding = [
            task
            for task in self.tasks
            if task.split == "validation" or corpus.shares.validation is not None
        ]
        self._run("contamination: evaluation", EvaluationNgrams(corpus, knobs, after), holding)
        size, told = sum(task.bytes for task in holding), "n-grams of validation documents"
        if self.against is not None:
            write_against(ContaminationStage(corpus, knobs, after).folder, self.against)
            size, told = size + self.against.nbytes, "n-grams of evaluation documents"
        merged_grams = self._run(
            "contamination: n-grams",
            MergeNgrams(corpus, knobs, after, 1 + size // 10**9),
            [HashBucket(0, 1)],
            larger=0,
        )
        self._run(
            "contamination: search",
            SearchNgrams(corpus, knobs, after),
            [task for task in self.tasks if task.split == "train"],
        )
        return {told: merged_grams[0]["grams"]}

    def _seal(self, steps: tuple[str, ...]) -> tuple[list[TaskFigures], list[FileEntry]]:
        others = tuple(step.name for step in self.knobs.steps)
        few = [
            RangeGroup(number, tuple(self.tasks[begin : begin + SEALED_TOGETHER]))
            for number, begin in enumerate(range(0, len(self.tasks), SEALED_TOGETHER))
        ]
        told = [
            one
            for few_told in self._run(
                "seal", FateStage(self.corpus, steps, others, self.out), few, larger=0
            )
            for one in few_told["ranges"]
        ]
        return told, [FileEntry(*one["file"]) for one in told]

    def _buckets(self, rows: int) -> list[HashBucket]:
        """Buckets for `rows` rows per document."""
        return _cut(self.documents * rows, BUCKET_ROWS)

    def _run(
        self,
        title: str,
        work: Stage[Any, TaskFigures],
        tasks: Sequence[NamedTask],
        larger: int | None = None,
    ) -> list[TaskFigures]:
        """Run one stage. `larger=0` for a stage that does not read text, whose progress has no
        total in megabytes.
        """
        total = sum(task.bytes for task in tasks if isinstance(task, RawRange))
        with Progress(
            f"clean: {title}",
            total=-(-total // 10**6) if larger is None and total else None,
            unit="MB",
        ) as progress:
            return run(
                self.engine,
                work,
                self.corpus.folder / "done" / title.replace(": ", "-").replace(" ", "-"),
                tasks,
                progress,
            )


def _cut(rows: int, size: int) -> list[HashBucket]:
    count = min(1 + rows // size, MOST_BUCKETS)
    return [HashBucket(number, count) for number in range(count)]
