"""Reads everything in a run folder for reports. Missing files give empty values, unreadable ones
are named in `notes`; nothing raises.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml
from pydantic import ValidationError

from ingot.base.errors import IngotError
from ingot.base.heartbeat import Heartbeat, read_beats
from ingot.base.lock import lock_holder
from ingot.base.reports import (
    EvaluationReport,
    Metric,
    PipelineStepRecord,
    read_record,
    read_report,
)
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.config.shape import parameter_count
from ingot.report.formatting import median
from ingot.report.goodput import Goodput, goodput

CURVES = (
    "train/loss",
    "validation/loss",
    "train/lr",
    "train/tokens_per_s",
    "train/mfu",
    "train/grad_norm",
)
RATE = "train/examples_per_s"
STEP_ORDER = (
    "ingest",
    "prepare",
    "train",
    "evaluate",
    "gate",
    "register",
    "deploy",
    "serve",
    "predict",
)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Series:
    """One curve: values over increasing steps, all finite."""

    steps: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True)
class MetricsRead:
    """What is taken of `metrics.jsonl`; see `RunView`."""

    curves: Mapping[str, Series] = field(default_factory=lambda: {key: Series() for key in CURVES})
    peak_bytes: float | None = None
    rows_per_s: float | None = None


@dataclass(frozen=True)
class RunView:
    """The contents of a run folder, as reports need them."""

    name: str
    root: Path
    curves: Mapping[str, Series]
    records: list[PipelineStepRecord]
    """Records of finished pipeline steps, in pipeline order."""
    events: list[dict[str, Any]]
    goodput: Goodput | None
    """The wall time of the last training run; None where none has begun."""
    recipe_text: str
    recipe: dict[str, Any]
    evaluation: EvaluationReport | None
    examples: list[Path]
    """Parquet files with the result of each task item, `reports/examples/TASK.parquet`."""
    gate: dict[str, Any] | None
    answer: dict[str, Any] | None
    """The served model's answer, `reports/predict.json`."""
    lineage: dict[str, Any]
    """`model/ingot.json`."""
    plan: dict[str, Any] | None
    """What `ingot plan --keep` said, `reports/plan.json`."""
    peak_bytes: float | None
    """The highest memory of any rank: of its device, or of its process on a CPU."""
    rows_per_s: float | None
    """Training rows a second, the median of the logged steps."""
    parameters: int | None
    running: bool
    changed: float
    """When the folder last changed, seconds since the epoch."""
    notes: list[str]
    """One sentence for each file that could not be read."""

    def knob(self, path: str) -> Any:
        """The value at a dotted path of the recipe, or None."""
        value: Any = self.recipe
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def record(self, step: str) -> PipelineStepRecord | None:
        return next((record for record in self.records if record.step == step), None)

    def metric(self, name: str) -> Metric | None:
        """The first metric of the evaluation whose key is `name` or ends in it."""
        if self.evaluation is None:
            return None
        return next(
            (
                metric
                for key, metric in self.evaluation.metrics.items()
                if key == name or key.endswith(f"/{name}")
            ),
            None,
        )

    def within(self, path: str) -> str:
        """`path` relative to the run folder, if it is inside."""
        return str(path).removeprefix(f"{self.root}/")

    @property
    def steps_done(self) -> int:
        return int(max((series.steps[-1] for series in self.curves.values() if series), default=0))

    @property
    def state(self) -> str:
        """A few words about what the run is doing, or how it ended."""
        last: dict[str, Any] = next(
            (
                event
                for event in reversed(self.events)
                if event.get("kind") in ("start", "stop", "finish", "failure")
            ),
            {},
        )
        if self.running:
            return "running"
        cause = str(last.get("cause") or "no reason noted")
        # A step that succeeded later has a record again.
        if last.get("kind") == "failure" and self.record(cause.partition(":")[0]) is None:
            return f"failed: {cause}"
        if last.get("kind") in ("start", "stop") and self.record("train") is None:
            return f"stopped at step {self.steps_done:,}"
        return f"done up to {self.records[-1].step}" if self.records else "nothing done yet"


def read_run(run: RunFolder) -> RunView:
    """Read `run`; any of its files may be missing or damaged."""
    notes: list[str] = []

    def read_or_note(path: Path, read: Callable[[Path], Value]) -> Value | None:
        if not path.is_file():
            return None
        try:
            return read(path)
        except (
            IngotError,
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            yaml.YAMLError,
        ) as error:
            notes.append(
                f"{path.relative_to(run.root)} could not be read:"
                f" {str(error) or type(error).__name__}"
            )
            return None

    recipe_text = read_or_note(run.recipe, lambda path: path.read_text(encoding="utf-8")) or ""
    recipe = (
        read_or_note(
            run.recipe, lambda path: _mapping(yaml.safe_load(path.read_text(encoding="utf-8")))
        )
        or {}
    )
    evaluation = read_or_note(
        run.reports / "evaluate.json", lambda path: _sanitized(read_report(path))
    )
    metrics = read_or_note(run.metrics, _read_metrics) or MetricsRead()
    events = read_or_note(run.events, lambda path: list(read_lines(path))) or []
    running = any(
        lock_holder(run.root, name) not in (None, os.getpid()) for name in ("lock", "run-lock")
    )
    return RunView(
        name=str(recipe.get("name") or run.root.resolve().name),
        root=run.root,
        curves=metrics.curves,
        records=_records(run.steps),
        events=events,
        goodput=goodput(events, _last_beat(run), alive=running),
        recipe_text=recipe_text,
        recipe=recipe,
        evaluation=evaluation,
        examples=sorted((run.reports / "examples").glob("*.parquet")) if evaluation else [],
        gate=read_or_note(run.reports / "gate.json", _read_json),
        answer=read_or_note(run.reports / "predict.json", _read_json),
        lineage=read_or_note(run.model / "ingot.json", _read_json) or {},
        plan=read_or_note(run.plan, _read_json),
        peak_bytes=metrics.peak_bytes,
        rows_per_s=metrics.rows_per_s,
        parameters=read_or_note(
            run.model / "config.json", lambda path: parameter_count(_read_json(path))
        ),
        running=running,
        changed=_changed(run),
        notes=notes,
    )


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where a mapping is expected")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    return _mapping(json.loads(path.read_bytes()))


def _sanitized(report: EvaluationReport) -> EvaluationReport:
    """The report without baselines and samples of the wrong type."""
    baselines = {
        str(name): float(value)
        for name, value in dict(report.baselines).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    samples = [
        {str(key): str(text) for key, text in sample.items()}
        for sample in report.samples
        if isinstance(sample, dict)
    ]
    return EvaluationReport(
        report.model_hash,
        report.tokenizer_hash,
        report.metrics,
        baselines,
        samples,
        report.base,
        report.schema,
    )


def _read_metrics(path: Path) -> MetricsRead:
    """Read `metrics.jsonl`; of a step that was logged twice the last line counts."""
    points: dict[str, dict[float, float]] = {key: {} for key in (*CURVES, RATE)}
    peak: float | None = None
    for line in read_lines(path):
        step = line.get("step")
        if not _is_number(step):
            continue
        for key, found in points.items():
            value = line.get(key)
            if _is_number(value):
                found[float(step)] = float(value)
        for key, value in line.items():
            if key.startswith("memory/rank") and _is_number(value):
                peak = max(peak or 0.0, float(value) * 1e9)
    rates = list(points.pop(RATE).values())
    curves = {
        key: Series(sorted(found), [found[step] for step in sorted(found)])
        for key, found in points.items()
    }
    return MetricsRead(curves, peak, median(rates) if rates else None)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _records(folder: Path) -> list[PipelineStepRecord]:
    found = (
        [read_record(folder, path.stem) for path in sorted(folder.glob("*.json"))]
        if folder.is_dir()
        else []
    )
    place = {step: number for number, step in enumerate(STEP_ORDER)}
    whole = [record for record in found if record is not None and _is_number(record.seconds)]
    return sorted(whole, key=lambda record: place.get(str(record.step), len(place)))


def _last_beat(run: RunFolder) -> Heartbeat | None:
    """The last heartbeat of rank 0 of the last attempt, on whichever node it ran."""
    paths = sorted(run.heartbeats.glob("*")) if run.heartbeats.is_dir() else []
    beats = [beat for path in paths for beat in read_beats(path) if beat.rank == 0]
    return max(
        beats,
        key=lambda beat: (beat.attempt, beat.wall if math.isfinite(beat.wall) else 0.0),
        default=None,
    )


def _changed(run: RunFolder) -> float:
    times = [
        path.stat().st_mtime
        for path in (run.root, run.recipe, run.metrics, run.events, *run.steps.glob("*.json"))
        if path.exists()
    ]
    return max(times, default=0.0)


def non_default_knobs(view: RunView) -> list[tuple[str, str]]:
    """Knobs that differ from their defaults, by dotted path; sources are always included."""
    sources = view.knob("data.train")
    try:
        plain = Recipe.model_validate(
            {
                "name": view.name,
                "data": {"train": [{"source": source["source"]} for source in sources]},
            }
        )
    except (ValidationError, TypeError, KeyError):
        return []
    defaults = flatten(plain.model_dump(mode="json"))
    is_source = re.compile(r"data\.(train|validation)\.\d+\.source").fullmatch
    return [
        (path, value)
        for path, value in flatten(view.recipe).items()
        if is_source(path) or defaults.get(path) != value
    ]


def flatten(value: Any, path: str = "") -> dict[str, str]:
    """Dotted path -> value as text for each leaf; a list without sections is a leaf."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else (
            enumerate(value)
            if isinstance(value, list) and any(isinstance(v, dict) for v in value)
            else ()
        )
    )
    leaves: dict[str, str] = {}
    for key, item in inner:
        leaves |= flatten(item, f"{path}.{key}" if path else str(key))
    if not leaves and path:
        return {
            path: (
                value
                if isinstance(value, str)
                else json.dumps(value, default=str, ensure_ascii=False)
            )
        }
    return leaves
