"""The gate: is a new model better than the live one? A pure function of two reports and a rule; it
reads and writes nothing.

What cannot be compared (a metric that is missing, or measured on another evaluation set) keeps the
live model, and the reason says what to do about it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport, Metric
from ingot.config.sections.deployment import GATED, Gate

Verdict = Literal["deploy", "keep"]
_MEASURE_LIVE = (
    "measure the live model on this set too (`ingot evaluate`, then `ingot register`, both with"
    " evaluate.model=ITS FOLDER) and run the gate again"
)


@dataclass(frozen=True)
class Comparison:
    """One metric of the rule: both values as far as they are known, whether it speaks for
    deploying, and why in words.
    """

    metric: str
    direction: Literal["lower", "higher"] | None
    candidate: float | None
    live: float | None
    better: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """`deploy` or `keep`, the reason in words, the values that it rests on, and the rule that was
    applied.
    """

    decision: Verdict
    reason: str
    comparisons: tuple[Comparison, ...]
    rule: Gate


def decide(candidate: EvaluationReport, live: EvaluationReport | None, rule: Gate) -> Decision:
    """Deploy `candidate` in place of `live` (None: nothing is live yet) if every metric of `rule`
    is better by its margin.

    A tie never deploys. The model that is live already may stay: deploying it changes nothing.
    `rule.override` beats all of this, and the reason still tells what the numbers said.

    Raises:
        WrongInput: a metric's tail fits several keys, or `rule.direction` contradicts the metric's
            own.
    """
    if rule.override is None:
        return _by_numbers(candidate, live, rule)
    try:
        found = _by_numbers(candidate, live, rule)
    except WrongInput as error:
        return Decision(
            rule.override,
            f"gate.override says {rule.override}; the numbers say nothing ({error})",
            (),
            rule,
        )
    return Decision(
        rule.override,
        f"gate.override says {rule.override}; the numbers say {found.decision}: {found.reason}",
        found.comparisons,
        rule,
    )


def _by_numbers(candidate: EvaluationReport, live: EvaluationReport | None, rule: Gate) -> Decision:
    asked = rule.metric or GATED
    names = [asked] if isinstance(asked, str) else asked
    comparisons = tuple(_compare(name, candidate, live, rule) for name in names)
    if live is not None and (live.model_hash, live.tokenizer_hash) == (
        candidate.model_hash,
        candidate.tokenizer_hash,
    ):
        return Decision("deploy", "this very model is live already", comparisons, rule)
    against = [comparison.reason for comparison in comparisons if not comparison.better]
    if against:
        return Decision("keep", "; ".join(against), comparisons, rule)
    first = "nothing is live yet under this name; " if live is None else ""
    return Decision(
        "deploy",
        first + "; ".join(comparison.reason for comparison in comparisons),
        comparisons,
        rule,
    )


def _compare(
    name: str, candidate: EvaluationReport, live: EvaluationReport | None, rule: Gate
) -> Comparison:
    found = candidate.metric(name)
    if found is None:
        known = ", ".join(sorted(candidate.metrics)) or "none at all"
        reason = (
            f"the new model's report has no metric {name} (it has {known}); mend gate.metric, or"
            " add a task to evaluate.tasks"
        )
        return Comparison(name, None, None, None, False, reason)
    key, new = found
    if rule.direction is not None and rule.direction != new.direction:
        raise WrongInput(
            f"gate.direction {rule.direction} contradicts {key}, of which {new.direction} is"
            " better; remove gate.direction"
        )
    old = None if live is None else live.metrics.get(key)
    better, reason = _judge(key, new, old, live is None, rule.margin)
    return Comparison(
        key, new.direction, new.value, None if old is None else old.value, better, reason
    )


def _judge(
    key: str, new: Metric, old: Metric | None, first: bool, margin: float
) -> tuple[bool, str]:
    """Does this metric speak for the new model, and why (not)?"""
    if not math.isfinite(new.value):
        return (
            False,
            (
                f"{key} of the new model is {new.value}; train it again with a lower"
                " train.optimizer.lr"
            ),
        )
    if first:
        return True, f"{key} is {_number(new.value)}"
    if old is None:
        return False, f"the live model's report has no metric {key}; {_MEASURE_LIVE}"
    if old.set_fingerprint != new.set_fingerprint or old.direction != new.direction:
        return (
            False,
            (
                f"{key} was measured on another evaluation set ({new.set_fingerprint}, live"
                f" {old.set_fingerprint}); {_MEASURE_LIVE}"
            ),
        )
    if not math.isfinite(old.value):
        return False, f"{key} of the live model is {old.value}; {_MEASURE_LIVE}"
    # In decimal, as the numbers are written: 0.3 is better than 0.2 by 0.1 and by nothing less.
    gain = Decimal(repr(new.value)) - Decimal(repr(old.value))
    gain = -gain if new.direction == "lower" else gain
    values = f"{key} {_number(new.value)}, live {_number(old.value)}, {new.direction} is better"
    if gain == 0:
        return False, f"{values}: a tie never deploys"
    if gain < 0:
        return False, f"{values}: worse by {_number(float(-gain))}"
    if gain < Decimal(repr(margin)):
        return (
            False,
            f"{values}: better by {_number(float(gain))}, less than gate.margin {_number(margin)}",
        )
    return True, f"{values}: better by {_number(float(gain))}"


def _number(value: float) -> str:
    return f"{value:.6g}"
