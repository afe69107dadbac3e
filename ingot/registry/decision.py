"""The gate's decision as it is written to `reports/gate.json`, and which evaluation it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.base.exact_json import read_object
from ingot.base.markers import fingerprint
from ingot.base.reports import EvaluationReport
from ingot.registry.gate import GateDecision
from ingot.registry.versions import RegisteredVersion

SCHEMA = 1
GATE = "gate.json"


def decision_record(
    decision: GateDecision, report: EvaluationReport, live: RegisteredVersion | None
) -> dict[str, Any]:
    """What is written of a decision about the model that `report` measured."""
    where = (
        f" (the live model lies in {live.where})"
        if live is not None and "ITS FOLDER" in decision.reason
        else ""
    )
    return {
        "schema": SCHEMA,
        "decision": decision.decision,
        "reason": decision.reason + where,
        "metrics": [asdict(comparison) for comparison in decision.comparisons],
        "rule": decision.rule.model_dump(mode="json"),
        "candidate": evaluation_identity(report),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def read_decision(path: Path) -> dict[str, Any] | None:
    """A written decision; None where there is none that this version can read."""
    value = read_object(path)
    if value is None or value.get("schema") != SCHEMA:
        return None
    if not {"decision", "reason", "candidate"} <= value.keys():
        return None
    return value if isinstance(value["candidate"], dict) else None


def is_about(decided: Mapping[str, Any], report: EvaluationReport) -> bool:
    """Is the decision about these numbers of this model?"""
    return bool(decided["candidate"] == evaluation_identity(report))


def model_identity(report: EvaluationReport) -> dict[str, str]:
    return {"model_hash": report.model_hash, "tokenizer_hash": report.tokenizer_hash}


def evaluation_identity(report: EvaluationReport) -> dict[str, str]:
    """The model and its metrics: a model that is measured again may be another to the gate."""
    return {**model_identity(report), "report": _numbers(report)}


def measured(report: EvaluationReport, model: Mapping[str, Any]) -> bool:
    """Is `model` (with its hashes) the one that `report` measured?"""
    return model_identity(report).items() <= model.items()


def _numbers(report: EvaluationReport) -> str:
    return fingerprint(asdict(report)["metrics"])
