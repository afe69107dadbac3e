"""A gate: the new model goes live where more metrics became better than worse."""

from __future__ import annotations

from typing import Literal

from ingot.base.reports import EvaluationReport
from ingot.config.sections.deployment import GateSettings
from ingot.registry.gate import GateDecision


class Majority(GateSettings):
    """Compares every metric that both models were measured by."""

    implementation = "count"
    kind: Literal["majority"] = "majority"
    """Which gate."""
    lead: int = 1
    """How many more metrics must be better than worse."""


def count(
    candidate: EvaluationReport, live: EvaluationReport | None, rule: Majority
) -> GateDecision:
    """Called by ingot.registry.gate; reads and writes nothing."""
    if live is None:
        return GateDecision("deploy", "nothing is live yet under this name", (), rule)
    lead = 0
    for key, new in candidate.metrics.items():
        old = live.metrics.get(key)
        if old is not None and old.set_fingerprint == new.set_fingerprint:
            gain = old.value - new.value if new.direction == "lower" else new.value - old.value
            lead += (gain > 0) - (gain < 0)
    reason = f"better by {lead:+d} metrics, gate.lead is {rule.lead}"
    return GateDecision("deploy" if lead >= rule.lead else "keep", reason, (), rule)
