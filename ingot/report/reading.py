"""Reads the files of a run for reports: what cannot be read is noted, and what is about an earlier
model is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ingot.base.errors import IngotError, one_line
from ingot.base.reports import EvaluationReport, PipelineStepRecord, did_not_end, read_record
from ingot.base.runfolder import RunFolder
from ingot.config.models.lineage import read_lineage
from ingot.report.metrics import is_number

Value = TypeVar("Value")
ABOUT_MODEL = ("evaluate", "gate", "register", "deploy", "serve", "predict")
"""Steps about a model that is there already."""
STEP_ORDER = ("ingest", "prepare", "train", *ABOUT_MODEL)
NOT_ENDED = "of a training that did not end"
"""In place of what a training made: no step read that, not even one that found no record of it."""


def read_records(folder: Path) -> tuple[list[PipelineStepRecord], set[str]]:
    """The records in order, and the verbs of ABOUT_MODEL whose records are left out: they read what
    a training or one of them made earlier, as where the gate since keeps the live model, or where a
    training was begun and has not ended. Data that were prepared since make no other model.
    """
    found = (
        [read_record(folder, path.stem) for path in sorted(folder.glob("*.json"))]
        if folder.is_dir()
        else []
    )
    place = {step: number for number, step in enumerate(STEP_ORDER)}
    timed = [record for record in found if record is not None and is_number(record.seconds)]
    timed.sort(key=lambda record: place.get(str(record.step), len(place)))
    made = {str(record.step): record.outputs for record in timed}
    if did_not_end(folder, "train"):
        made["train"] = NOT_ENDED
    earlier = set[str]()
    for record in timed:
        knobs = record.knobs if isinstance(record.knobs, dict) else {}
        about = [verb for verb in ("train", *ABOUT_MODEL) if verb in made]
        read = {verb: knobs[f"from {verb}"] for verb in about if f"from {verb}" in knobs}
        if record.step in ABOUT_MODEL and any(
            verb in earlier or made[verb] != outputs for verb, outputs in read.items()
        ):
            earlier.add(record.step)
    return [record for record in timed if str(record.step) not in earlier], earlier


def other_model(run: RunFolder, report: EvaluationReport | None) -> str | None:
    """That the evaluation in `run` is not about its model, and about which, in words; None where it
    is, or there is none. Whatever tells figures of a run asks this first.
    """
    if report is None:
        return None
    records, earlier = read_records(run.steps)
    evaluated = next((one.knobs for one in records if one.step == "evaluate"), {})
    named = mapping(evaluated.get("knobs", {})).get("evaluate.model")
    made, measured = read_lineage(run.model), report.model_hash
    if did_not_end(run.steps, "train"):
        is_own = False
    elif made is None:
        is_own = not run.metrics.exists() or any(one.step == "train" for one in records)
    else:
        is_own = made.get("model_hash", measured) == measured
    if is_own and "evaluate" not in earlier:
        return None
    told = f"{named}, not about the model of this run" if named else "a model that lay here before"
    return f"reports/evaluate.json is about {told}"


def left_out(doubt: str | None, other: str | None) -> list[str]:
    """Why the model's lineage or its measures are not told, though they are there."""
    if doubt is not None:
        told = "it, and what was measured and decided of it, is left out here"
        return [f"{doubt}; {told} until `ingot train` has brought that to its end"]
    if other is not None:
        return [
            f"{other}, and is left out; `ingot evaluate` without evaluate.model measures this one"
        ]
    return []


class Reading:
    """Reads files of a run; those that cannot be read are noted, and None."""

    def __init__(self, root: Path) -> None:
        self._root, self.notes = root, list[str]()

    def __call__(self, path: Path, read: Callable[[Path], Value]) -> Value | None:
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
            self.notes.append(
                f"{path.relative_to(self._root)} could not be read:"
                f" {one_line(error) or type(error).__name__}"
            )
            return None


def mapping(value: Any) -> dict[str, Any]:
    """`value`, which must be one: damaged files hold other things."""
    if not isinstance(value, dict):
        what = "nothing" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{what} where a mapping is expected")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return mapping(json.loads(path.read_bytes()))


def sanitized(report: EvaluationReport) -> EvaluationReport:
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
