"""The JSON files in `reports/`: the record of each finished pipeline step, by which the next `run`
knows that nothing changed, and the evaluation report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from ingot.base.errors import Failed, WrongInput
from ingot.base.runfolder import RunFolder
from ingot.base.storage import write_atomic


@dataclass(frozen=True)
class VerbOutcome:
    """The result of a verb, for the command line.

    `result` is one short phrase for the table, `where` the path to look at, `outputs` a fingerprint
    of what was made (equal outputs leave later steps unchanged), `files` the paths (relative to the
    run folder) that must keep their sizes for the step to count as done, or only be there where the
    size is None, `parts` fingerprints of what a later step may read of it alone.
    """

    result: str
    where: str
    outputs: str
    files: Mapping[str, int | None] = field(default_factory=dict)
    exit_code: int = 0
    parts: dict[str, str] = field(default_factory=dict)


def file_sizes(root: Path, paths: Iterable[Path]) -> dict[str, int]:
    """The `files` of a `VerbOutcome`: each path relative to `root`, with its size in bytes."""
    return {str(path.relative_to(root)): path.stat().st_size for path in paths}


EXAMPLES_SUFFIX = ".parquet"


def examples_file(task: str) -> str:
    """The name of the file with all items of an evaluation task, which no other task has."""
    return task.replace("%", "%25").replace("/", "%2F") + EXAMPLES_SUFFIX


def task_of(examples: str) -> str:
    """The task whose items such a file holds."""
    return unquote(examples.removesuffix(EXAMPLES_SUFFIX))


@dataclass(frozen=True)
class PipelineStepRecord:
    """The record of a finished step: fingerprints of its `inputs` and `outputs`, and its result.

    `knobs` keeps the values behind the fingerprint, so that a change can be named. `files` are
    paths relative to the run folder with their sizes, None where any will do; a missing or resized
    one invalidates the record.
    """

    step: str
    inputs: str
    outputs: str
    seconds: float
    result: str
    where: str
    knobs: dict[str, Any] = field(default_factory=dict)
    files: Mapping[str, int | None] = field(default_factory=dict)
    exit_code: int = 0
    parts: dict[str, str] = field(default_factory=dict)

    def of(self, parts: Iterable[str]) -> str | dict[str, str | None]:
        """The fingerprint of these `parts` of the output, or of all of it if none are named."""
        return {part: self.parts.get(part) for part in parts} or self.outputs


BEGUN = '{"begun": true}\n'
"""In place of the record of a step that is at work, or was when it was stopped."""


def begin_record(folder: Path, step: str) -> None:
    """Replace the record of `step`, which from here on no longer describes the files; durably: a
    crash of the machine must not bring it back.
    """
    write_atomic(folder / f"{step}.json", BEGUN)


def did_not_end(folder: Path, step: str) -> bool:
    """Whether `step` was begun and has not ended: what it made before may be there, or half of what
    it makes now. A folder without any record, such as a node's, tells nothing.
    """
    try:
        return (folder / f"{step}.json").read_text(encoding="utf-8") == BEGUN
    except (FileNotFoundError, ValueError):
        return False


def write_record(folder: Path, record: PipelineStepRecord) -> None:
    write_atomic(
        folder / f"{record.step}.json",
        json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n",
    )


def read_record(folder: Path, step: str) -> PipelineStepRecord | None:
    """The record of `step`; None if there is none, or this version cannot read it."""
    try:
        record = PipelineStepRecord(**json.loads((folder / f"{step}.json").read_bytes()))
        if not _is_sound(record):
            return None
        return replace(record, where=_where_now(record.where, folder.parent.parent))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def _is_sound(record: PipelineStepRecord) -> bool:
    """Whether what is compared name by name has names."""
    known: Any = record.knobs
    if not isinstance(known, dict):
        return False
    parts = (known.get(part, {}) for part in ("knobs", "folders", "outside"))
    return all(isinstance(part, dict) for part in (record.files, *parts))


def _where_now(where: str, root: Path) -> str:
    """Where that lies in the run folder `root` now, which may have been moved, renamed or copied
    since; what is not in it stays as it is.
    """
    if "://" in where:
        return where
    parts = Path(where).parts
    tails = (root.joinpath(*parts[begin:]) for begin in range(1, len(parts)))
    inside = next((path for path in tails if path.exists()), None)
    if inside is None or (Path(where).exists() and inside.samefile(where)):
        return where
    return str(inside)


Stamps = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class FormerRecord:
    """The record of a step before it is done again, and the recipe and what was decided beside it:
    put back where it is refused and nothing was changed. A mistyped knob ends a training before its
    first step, and takes nothing from the one before. `made`: the stamps of all that steps make.
    """

    run: RunFolder
    texts: dict[Path, bytes]
    made: Stamps

    @classmethod
    def of(cls, run: RunFolder, verb: str) -> FormerRecord | None:
        """None where the step was not done before, or did not end."""
        if read_record(run.steps, verb) is None:
            return None
        files = (run.recipe, run.layout, run.micro_batch, run.steps / f"{verb}.json")
        texts = {file: file.read_bytes() for file in files if file.is_file()}
        return cls(run, texts, _made(run))


def put_back(former: FormerRecord | None) -> None:
    """Say again what was said before, unless something was made since; the record last."""
    if former is not None and _made(former.run) == former.made:
        for file, text in former.texts.items():
            write_atomic(file, text)


def _made(run: RunFolder) -> Stamps:
    """Size, time and number of each file but those that tell of attempts, whatever these made."""
    tell = {
        *(run.recipe, run.events, run.heartbeats, run.logs, run.root / "jobs", run.tensorboard),
        *(run.steps, run.reports / "index.html", run.layout, run.micro_batch),
    }
    found: Stamps = {}
    for folder, inner, names in os.walk(run.root):
        inner[:] = [name for name in inner if Path(folder, name) not in tell]
        for file in (Path(folder, name) for name in names if not name.startswith(".")):
            if file not in tell:
                with contextlib.suppress(FileNotFoundError):  # of a reader that ends meanwhile
                    now = file.lstat()
                    found[str(file)] = now.st_size, now.st_mtime_ns, now.st_ino
    return found


def is_intact(root: Path, record: PipelineStepRecord) -> bool:
    """Whether every file of the record is still there, with its size where that is recorded."""
    for path, size in record.files.items():
        try:
            if size not in (None, (root / path).stat().st_size):
                return False
        except OSError:
            return False
    return True


SCHEMA = 1


@dataclass(frozen=True)
class Metric:
    """A metric with its 95 % confidence interval over `n` items of the set that `set_fingerprint`
    identifies. Both ends are None where the interval is not known.

    An interval without width is not known either: one item, or items that are all alike, say
    nothing of how far another draw of them would be.

    Raises:
        ValueError: one end is known and the other is not.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    direction: Literal["lower", "higher"]
    n: int
    set_fingerprint: str

    def __post_init__(self) -> None:
        if (self.ci_low is None) != (self.ci_high is None):
            raise ValueError(f"an interval from {self.ci_low} to {self.ci_high}")
        if self.ci_low == self.ci_high:
            object.__setattr__(self, "ci_low", None)
            object.__setattr__(self, "ci_high", None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends; None where the interval is not known."""
        if self.ci_low is None or self.ci_high is None:
            return None
        return self.ci_low, self.ci_high

    def interval_words(self, show: Callable[[float], str]) -> str:
        """`LOW to HIGH`, each by `show`, or that it is not known."""
        return " to ".join(map(show, self.interval)) if self.interval else "not known"

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.value, *(self.interval or ()))))


@dataclass(frozen=True)
class EvaluationReport:
    """`reports/evaluate.json`. Metric keys are `TASK/metric`; `baselines` are results of simple
    methods, for comparison or as the floor of a gate.

    `base`: the same metrics of the model that training started from, if requested. A baseline whose
    key begins with the key of a metric (`rouge/rouge1/first_line`) belongs to it; others
    (`gzip -9`) are bits per byte. `missing`: why a metric of a task is not there.
    """

    model_hash: str
    tokenizer_hash: str
    metrics: dict[str, Metric]
    baselines: dict[str, float] = field(default_factory=dict)
    samples: list[dict[str, str]] = field(default_factory=list)
    base: dict[str, Metric] = field(default_factory=dict)
    schema: int = SCHEMA
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def bits_per_byte(self) -> dict[str, float]:
        """Bits per byte of other methods on the held-out text, by name."""
        return {
            name: value
            for name, value in self.baselines.items()
            if name.rpartition("/")[0] not in self.metrics
        }

    def baselines_of(self, key: str) -> dict[str, float]:
        """The baselines of the metric `key`, by their short names."""
        if key.endswith("/bits_per_byte"):
            return self.bits_per_byte
        prefix = f"{key}/"
        return {
            name.removeprefix(prefix): value
            for name, value in self.baselines.items()
            if name.startswith(prefix)
        }

    def metric(self, name: str) -> tuple[str, Metric] | None:
        """The metric with the key `name`, or the only one whose key ends in `/name`; None if there
        is none.

        Raises:
            WrongInput: several keys end in `/name`.
        """
        if name in self.metrics:
            return name, self.metrics[name]
        keys = [key for key in self.metrics if key.endswith(f"/{name}")]
        if len(keys) > 1:
            raise WrongInput(
                f"metric `{name}` is one of {', '.join(sorted(keys))}; give the whole key"
            )
        return (keys[0], self.metrics[keys[0]]) if keys else None


def write_report(path: Path, report: EvaluationReport) -> None:
    """Write the report. Raises Failed if a number is not finite: such a model cannot be
    compared.
    """
    for key, metric in [
        *report.metrics.items(),
        *((f"base {key}", metric) for key, metric in report.base.items()),
    ]:
        if not metric.is_finite:
            interval = f"{metric.value} [{metric.ci_low}, {metric.ci_high}]"
            raise Failed(
                f"{key} is {interval}: the model gives numbers that are not finite; train it again"
                " with a lower train.optimizer.lr"
            )
    write_atomic(
        path, json.dumps(asdict(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )


def read_report(path: Path) -> EvaluationReport:
    """Read a report. Raises WrongInput if the file is missing, damaged, of a newer schema, or holds
    a number that is not finite.
    """
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise WrongInput(f"{path} does not exist; run `ingot evaluate` first") from None
    return parse_report(text, str(path))


def parse_report(text: bytes | str, where: str) -> EvaluationReport:
    """Parse the report in JSON `text`; `where` names it in errors, which are those of
    `read_report`.
    """
    try:
        value: dict[str, Any] = json.loads(text)
        if value.get("schema", 0) > SCHEMA:
            raise WrongInput(
                f"{where} has schema {value['schema']}, newer than this ingot's {SCHEMA}; upgrade"
                " ingot"
            )
        metrics, base = (
            {key: Metric(**item) for key, item in found.items()}
            for found in (value["metrics"], value.get("base", {}))
        )
        report = EvaluationReport(**{**value, "metrics": metrics, "base": base})
        for key, metric in [*report.metrics.items(), *report.base.items()]:
            if not metric.is_finite:
                raise WrongInput(f"{where}: {key} is {metric.value}; run `ingot evaluate` again")
            if metric.direction not in ("lower", "higher"):
                raise WrongInput(
                    f"{where}: the direction of {key} is {metric.direction!r}, not lower or higher;"
                    " run `ingot evaluate` again"
                )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WrongInput(
            f"{where} is not an evaluation report ({type(error).__name__}: {error}); run `ingot"
            " evaluate` again"
        ) from None
    return report
