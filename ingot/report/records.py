"""The records of a run's finished steps, for reports: those about the model that lies there now."""

from __future__ import annotations

from pathlib import Path

from ingot.base.reports import PipelineStepRecord, did_not_end, read_record
from ingot.report.metrics import is_number

ABOUT_MODEL = ("evaluate", "gate", "register", "deploy", "serve", "predict")
"""Steps about a model that is there already."""
STEP_ORDER = ("ingest", "prepare", "train", *ABOUT_MODEL)


def read_records(folder: Path) -> tuple[list[PipelineStepRecord], set[str]]:
    """The records in order, and the verbs of ABOUT_MODEL whose records are left out: they read what
    a step before them made earlier, as where the gate since keeps the live model, or a training
    was begun since.
    """
    found = (
        [read_record(folder, path.stem) for path in sorted(folder.glob("*.json"))]
        if folder.is_dir()
        else []
    )
    place = {step: number for number, step in enumerate(STEP_ORDER)}
    timed = [record for record in found if record is not None and is_number(record.seconds)]
    timed.sort(key=lambda record: place.get(str(record.step), len(place)))
    made: dict[str, str | None] = {str(record.step): record.outputs for record in timed}
    if did_not_end(folder, "train"):
        made["train"] = None
    earlier = set[str]()
    for record in timed:
        knobs = record.knobs if isinstance(record.knobs, dict) else {}
        read = {verb: knobs[f"from {verb}"] for verb in made if f"from {verb}" in knobs}
        if record.step in ABOUT_MODEL and any(
            verb in earlier or made[verb] != outputs for verb, outputs in read.items()
        ):
            earlier.add(record.step)
    return [record for record in timed if str(record.step) not in earlier], earlier


def left_out(doubt: str | None, earlier: set[str]) -> list[str]:
    """Why the model's lineage or its measures are not told, though they are there."""
    if doubt is not None:
        return [f"{doubt}; it, and what was measured and decided of it, is left out here"]
    if "evaluate" in earlier:
        return [
            "reports/evaluate.json is about a model that lay here before, and is left out; `ingot"
            " evaluate` measures this one"
        ]
    return []
