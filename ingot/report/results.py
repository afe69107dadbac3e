"""What a step of a run came to, typed: the objects that the Python interface returns and that
`--json` prints (docs/JSON.md). Everything is read from the run's own files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ingot.base.errors import EXIT_KEEP, Failed
from ingot.base.reports import Metric, PipelineStepRecord, read_report
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import read_lines
from ingot.config.models.lineage import is_of_another

Result = TypeVar("Result", bound="StepResult")


@dataclass(frozen=True)
class StepResult:
    """What all steps have. `unchanged`: nothing had to be done; `seconds` are then those
    of the time when it was. `result` is the phrase of the table, `where` what to look at.
    """

    verb: str
    run: Path
    result: str
    where: Path
    seconds: float
    unchanged: bool
    exit_code: int

    paths: ClassVar[tuple[str, ...]] = ("run", "where")
    """The fields that are paths."""

    @classmethod
    def read(
        cls: type[Result], run: RunFolder, record: PipelineStepRecord, *, unchanged: bool
    ) -> Result:
        """The result of the step that `record` is of, from the files of its run."""
        return cls(
            record.step,
            run.root,
            record.result,
            Path(record.where),
            record.seconds,
            unchanged,
            record.exit_code,
            **cls._details(run, record),
        )

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        return {}

    @classmethod
    def parse(cls: type[Result], value: Mapping[str, Any], root: Path) -> Result:
        """The result that was printed as JSON by a process whose folder was `root`."""
        known = {each.name for each in fields(cls)}
        given = {name: item for name, item in value.items() if name in known}
        for name in cls.paths:
            given[name] = given[name] and root / given[name]
        return cls(**given)


@dataclass(frozen=True)
class IngestResult(StepResult):
    """Raw documents. `skipped`: records that could not be read, by reason."""

    documents: int
    bytes: int
    skipped: dict[str, int]
    folder: Path

    paths = ("run", "where", "folder")

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        splits = _read(run.raw / "manifest.json")["splits"]
        sources = [source for split in splits.values() for source in split]
        skipped: dict[str, int] = {}
        for source in sources:
            for reason, count in source["bad"].items():
                skipped[reason] = skipped.get(reason, 0) + count
        return {
            "documents": sum(source["documents"] for source in sources),
            "bytes": sum(source["bytes"] for source in sources),
            "skipped": skipped,
            "folder": run.raw,
        }


@dataclass(frozen=True)
class PrepareResult(StepResult):
    """Token columns. `tokens` and `documents` by split (`train`, `validation`)."""

    tokens: dict[str, int]
    documents: dict[str, int]
    vocab_size: int
    columns: Path
    tokenizer: Path

    paths = ("run", "where", "columns", "tokenizer")

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        manifest = _read(run.columns / "manifest.json")
        totals = manifest["totals"].items()
        return {
            "tokens": {split: total["tokens"] for split, total in totals},
            "documents": {split: total["documents"] for split, total in totals},
            "vocab_size": manifest["vocab_size"],
            "columns": run.columns,
            "tokenizer": run.tokenizer,
        }


@dataclass(frozen=True)
class TrainResult(StepResult):
    """The exported model. `step`: of the weights in it; `loss` and `validation_loss`: the last ones
    measured, as the objective counts them; `adapter`: the folder of a LoRA run's adapter.
    """

    step: int
    parameters: int
    loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    model: Path
    adapter: Path | None
    metrics: Path

    paths = ("run", "where", "model", "adapter", "metrics")

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        made, last = _read(run.model / "ingot.json"), dict[str, Any]()
        has_adapter = run.adapter.is_dir() and not is_of_another(run.adapter, run.model)
        for line in read_lines(run.metrics):
            last |= line
        return {
            "step": made["step"],
            "parameters": made["parameters"],
            "loss": last.get("train/loss"),
            "validation_loss": last.get("validation/loss"),
            "tokens_per_s": last.get("train/tokens_per_s"),
            "model": run.model,
            "adapter": run.adapter if has_adapter else None,
            "metrics": run.metrics,
        }


@dataclass(frozen=True)
class EvaluateResult(StepResult):
    """The metrics with their 95 % intervals, by `TASK/metric`; `base`: those of the model that
    training started from, where asked for.
    """

    metrics: dict[str, Metric]
    baselines: dict[str, float]
    base: dict[str, Metric]
    samples: list[dict[str, str]]
    report: Path

    paths = ("run", "where", "report")

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        path = run.reports / "evaluate.json"
        report = read_report(path)
        return {
            "metrics": report.metrics,
            "baselines": report.baselines,
            "base": report.base,
            "samples": report.samples,
            "report": path,
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any], root: Path) -> EvaluateResult:
        read = {
            name: {key: Metric(**metric) for key, metric in value[name].items()}
            for name in ("metrics", "base")
        }
        return super().parse({**value, **read}, root)


@dataclass(frozen=True)
class GateResult(StepResult):
    """The gate's decision, `deploy` or `keep`, and each metric that was compared."""

    decision: str
    reason: str
    comparisons: list[dict[str, Any]]
    report: Path

    paths = ("run", "where", "report")

    @property
    def deploy(self) -> bool:
        return self.exit_code != EXIT_KEEP

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        path = run.reports / "gate.json"
        decided = _read(path)
        return {
            "decision": decided["decision"],
            "reason": decided["reason"],
            "comparisons": decided["metrics"],
            "report": path,
        }


@dataclass(frozen=True)
class RegisterResult(StepResult):
    """The registered version; `live`: whether it is the one that is served by its name."""

    name: str
    version: int
    live: bool

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        found = re.fullmatch(r"(?P<name>.+) v(?P<version>\d+), (?P<state>.+)", record.result)
        if found is None:
            raise Failed(
                f"the record of register in {run.steps} says {record.result!r}; run it again"
            )
        live = found["state"] == "live"
        return {"name": found["name"], "version": int(found["version"]), "live": live}


@dataclass(frozen=True)
class ServeResult(StepResult):
    """The served model's answer to `serve.prompt`."""

    prompt: str
    completion: str

    @classmethod
    def _details(cls, run: RunFolder, record: PipelineStepRecord) -> dict[str, Any]:
        answer = _read(run.reports / "predict.json")
        return {"prompt": answer["prompt"], "completion": answer["completion"]}


RESULTS: dict[str, type[StepResult]] = {
    "ingest": IngestResult,
    "prepare": PrepareResult,
    "train": TrainResult,
    "evaluate": EvaluateResult,
    "gate": GateResult,
    "register": RegisterResult,
    "serve": ServeResult,
}
"""The result of each step of `ingot run`."""


@dataclass(frozen=True)
class RunResult:
    """The results of all steps that were done, in order, by verb. The gate may have ended the run
    early, with the live model kept.
    """

    run: Path
    page: Path
    steps: dict[str, StepResult] = field(default_factory=dict)

    def __getitem__(self, verb: str) -> StepResult:
        return self.steps[verb]


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Failed(f"{path} cannot be read ({error}); run the step again") from None
    return value
