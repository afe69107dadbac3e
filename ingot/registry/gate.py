"""The gate's decision: is a new model better than the live one? A pure function of two evaluation
reports and a rule, whose kind says how they are compared; nothing is read or written.

Metrics that cannot be compared (missing, or measured on another evaluation set) keep the live
model, and the reason names the next action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal, get_args

from ingot.base.errors import WrongInput, differing
from ingot.base.reports import EvaluationReport, Metric
from ingot.config.sections.deployment import GateSettings, MetricGate

Verdict = Literal["deploy", "keep"]
_MEASURE_LIVE = (
    "measure the live model on this set too (`ingot evaluate`, then `ingot register`, both with"
    " evaluate.model=ITS FOLDER), then `ingot evaluate` and `ingot gate` for this one"
)
_OF_ANOTHER_TOKENIZER = (
    "the live model has another tokenizer, and cannot be measured on data prepared with this one:"
    " let gate.metric be one that does not depend on it, such as of a task `choice` or `reward`, or"
    " make this model live by `ingot deploy NAME --version NUMBER`"
)


@dataclass(frozen=True)
class MetricComparison:
    """One metric of the rule: both values where known, whether it favours deploying, and the
    reason.
    """

    metric: str
    direction: Literal["lower", "higher"] | None
    candidate: float | None
    live: float | None
    better: bool
    reason: str


@dataclass(frozen=True)
class GateDecision:
    """The decision, its reason, the compared values, and the rule that was applied."""

    decision: Verdict
    reason: str
    comparisons: tuple[MetricComparison, ...]
    rule: GateSettings


def decide(
    candidate: EvaluationReport, live: EvaluationReport | None, rule: GateSettings
) -> GateDecision:
    """Decide by the gate of `rule.kind` whether `candidate` replaces `live` (None: nothing is live
    yet).

    If the candidate is the live model itself, the decision is deploy, which changes nothing.
    `rule.override` wins over the numbers; the reason then states what they said.

    Raises:
        WrongInput: the rule cannot be applied to these reports, as each kind of gate says.
    """
    if rule.override is None:
        return _compare(candidate, live, rule)
    try:
        found = _compare(candidate, live, rule)
    except WrongInput as error:
        return GateDecision(
            rule.override,
            f"gate.override says {rule.override}; the numbers say nothing ({error})",
            (),
            rule,
        )
    return GateDecision(
        rule.override,
        f"gate.override says {rule.override}; the numbers say {found.decision}: {found.reason}",
        found.comparisons,
        rule,
    )


def _compare(
    candidate: EvaluationReport, live: EvaluationReport | None, rule: GateSettings
) -> GateDecision:
    found: GateDecision = rule.load_implementation()(candidate, live, rule)
    if not isinstance(found, GateDecision) or found.decision not in get_args(Verdict):
        said = getattr(found, "decision", found)
        raise WrongInput(
            f"gate.kind {rule.kind} decided {said!r}; its implementation must return a GateDecision"
            f" of {' or '.join(get_args(Verdict))}"
        )
    if live is not None and (live.model_hash, live.tokenizer_hash) == (
        candidate.model_hash,
        candidate.tokenizer_hash,
    ):
        return replace(found, decision="deploy", reason="this very model is live already")
    return found


def compare_metrics(
    candidate: EvaluationReport, live: EvaluationReport | None, rule: MetricGate
) -> GateDecision:
    """The gate `metric`: deploy if every metric of the rule reaches the floor and is better than
    that of the live model by the margin. A tie never deploys.

    Raises:
        WrongInput: a metric name matches several keys, `rule.direction` contradicts the metric's
            own direction, or the report has no baseline that `rule.floor` names.
    """
    comparisons = tuple(
        _compare_metric(name, candidate, live, rule) for name in rule.metrics("text")
    )
    against = [comparison.reason for comparison in comparisons if not comparison.better]
    if against:
        return GateDecision("keep", "; ".join(against), comparisons, rule)
    first = "the first version; the next has to beat: "
    return GateDecision(
        "deploy",
        (first if live is None else "") + "; ".join(one.reason for one in comparisons),
        comparisons,
        rule,
    )


def _compare_metric(
    name: str, candidate: EvaluationReport, live: EvaluationReport | None, rule: MetricGate
) -> MetricComparison:
    found = candidate.metric(name)
    if found is None:
        known = ", ".join(sorted(candidate.metrics)) or "none at all"
        why = [why for key, why in candidate.missing.items() if f"/{key}".endswith(f"/{name}")]
        way = why[0] if why else "mend gate.metric, or add a task to evaluate.tasks"
        reason = f"the new model's report has no metric {name} (it has {known}); {way}"
        return MetricComparison(name, None, None, None, False, reason)
    key, new = found
    if rule.direction is not None and rule.direction != new.direction:
        raise WrongInput(
            f"gate.direction {rule.direction} contradicts {key}, of which {new.direction} is"
            " better; remove gate.direction"
        )
    old = None if live is None else live.metrics.get(key)
    same = live is None or live.tokenizer_hash == candidate.tokenizer_hash
    way = _MEASURE_LIVE if same else _OF_ANOTHER_TOKENIZER
    better, reason = _is_better(key, new, old, live is None, rule.margin, way)
    if rule.floor is not None and math.isfinite(new.value):
        reaches, floor = _reaches_floor(key, candidate, rule.floor)
        better, reason = better and reaches, f"{reason}; {floor}"
    return MetricComparison(
        key, new.direction, new.value, None if old is None else old.value, better, reason
    )


def _is_better(
    key: str, new: Metric, old: Metric | None, first: bool, margin: float, way: str
) -> tuple[bool, str]:
    """Whether this metric favours the new model, and the reason; `way` says what to do where they
    cannot be compared.
    """
    if not math.isfinite(new.value):
        return (
            False,
            (
                f"{key} of the new model is {new.value}; train it again with a lower"
                " train.optimizer.lr"
            ),
        )
    if first:
        return True, f"{key} is {_format(new.value)}"
    if old is None:
        return False, f"the live model's report has no metric {key}; {way}"
    if old.set_fingerprint != new.set_fingerprint or old.direction != new.direction:
        if old.set_fingerprint == new.set_fingerprint:
            ways = f"{new.direction} is better, in the live model's report {old.direction}"
            return False, f"{key} was measured another way ({ways}); {way}"
        return (
            False,
            (
                f"{key} was measured on another evaluation set ({new.set_fingerprint}, live"
                f" {old.set_fingerprint}); {way}"
            ),
        )
    if not math.isfinite(old.value):
        return False, f"{key} of the live model is {old.value}; {way}"
    # Decimal arithmetic on the written numbers, so that 0.3 is better than 0.2 by exactly 0.1.
    gain = Decimal(repr(new.value)) - Decimal(repr(old.value))
    gain = -gain if new.direction == "lower" else gain
    now, before = differing(new.value, old.value, _format)
    values = f"{key} {now}, live {before}, {new.direction} is better"
    if gain == 0:
        return False, f"{values}: a tie never deploys"
    if gain < 0:
        return False, f"{values}: worse by {_format(float(-gain))}"
    if gain < Decimal(repr(margin)):
        better, least = differing(float(gain), margin, _format)
        return False, f"{values}: better by {better}, less than gate.margin {least}"
    return True, f"{values}: better by {_format(float(gain))}"


def _reaches_floor(key: str, report: EvaluationReport, floor: float | str) -> tuple[bool, str]:
    """Whether the metric is as good as the figure, or better than the baseline, and the reason."""
    metric = report.metrics[key]
    if isinstance(floor, str):
        known = report.baselines_of(key)
        # `gzip` stands for `gzip -9`.
        names = [name for name in known if floor in (name, name.partition(" ")[0])]
        if not names:
            raise WrongInput(
                f"gate.floor: {key} has no baseline {floor} in the report (it has"
                f" {', '.join(sorted(known)) or 'none'}); add it to the task's `baselines` and run"
                " `ingot evaluate` again, or give a figure"
            )
        least, name = known[names[0]], f"the floor {names[0]}"
    else:
        least, name = floor, "the floor"
    gain = least - metric.value if metric.direction == "lower" else metric.value - least
    if gain > 0 or (gain == 0 and not isinstance(floor, str)):
        return True, f"reaches {name} {_format(least)}"
    if not gain:
        return False, f"{_format(metric.value)} is no better than {name}, which has the same"
    value, wanted = differing(metric.value, least, _format)
    return False, f"{value} does not reach {name} {wanted}"


def _format(value: float) -> str:
    return f"{value:.6g}"
