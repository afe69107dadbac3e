from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport, Metric
from ingot.config.sections.deployment import GateSettings, MetricGate
from ingot.registry.gate import GateDecision, decide

FIRST = "the first version; the next has to beat"

LOWER, HIGHER = "loss/bits_per_byte", "rouge/rouge1"
NAN = math.nan


def metric(value: float, direction: str = "lower", on: str = "set1") -> Metric:
    return Metric(value, value, value, direction, 100, on)  # type: ignore[arg-type]


def report(model: str, metrics: dict[str, Metric]) -> EvaluationReport:
    return EvaluationReport(model, "tokenizer", metrics)


def low(value: float, on: str = "set1") -> dict[str, Metric]:
    return {LOWER: metric(value, on=on)}


def high(value: float) -> dict[str, Metric]:
    return {HIGHER: metric(value, "higher")}


# what is tried: (the new model's metrics, the live one's or None, the rule, decision, words of the
# reason)
CASES: dict[str, tuple[dict[str, Metric], dict[str, Metric] | None, dict[str, Any], str, str]] = {
    "first model": (
        low(2.5),
        None,
        {},
        "deploy",
        f"{FIRST}: loss/bits_per_byte is 2.5",
    ),
    "lower is better, lower": (
        low(2.4),
        low(2.5),
        {},
        "deploy",
        "loss/bits_per_byte 2.4, live 2.5, lower is better: better by 0.1",
    ),
    "lower is better, higher": (
        low(2.6),
        low(2.5),
        {},
        "keep",
        "loss/bits_per_byte 2.6, live 2.5, lower is better: worse by 0.1",
    ),
    "too near to be told apart in short": (
        low(2.5000000001),
        low(2.5),
        {},
        "keep",
        "loss/bits_per_byte 2.5000000001, live 2.5, lower is better: worse by 1e-10",
    ),
    "a gain that rounds to the margin": (
        low(2.4000000001),
        low(2.5),
        {"margin": 0.1},
        "keep",
        "better by 0.0999999999, less than gate.margin 0.1",
    ),
    "lower is better, tie": (low(2.5), low(2.5), {}, "keep", "a tie never deploys"),
    "higher is better, higher": (
        high(0.4),
        high(0.3),
        {"metric": HIGHER},
        "deploy",
        "better by 0.1",
    ),
    "higher is better, lower": (high(0.2), high(0.3), {"metric": HIGHER}, "keep", "worse by 0.1"),
    "higher is better, tie": (
        high(0.3),
        high(0.3),
        {"metric": HIGHER},
        "keep",
        "a tie never deploys",
    ),
    "zero against zero": (high(0.0), high(-0.0), {"metric": HIGHER}, "keep", "a tie never deploys"),
    "better by exactly the margin, which binary numbers blur": (
        high(0.3),
        high(0.2),
        {"metric": HIGHER, "margin": 0.1},
        "deploy",
        "better by 0.1",
    ),
    "better by less than the margin": (
        low(2.45),
        low(2.5),
        {"margin": 0.1},
        "keep",
        "better by 0.05, less than gate.margin 0.1",
    ),
    "better by more than the margin": (
        low(2.3),
        low(2.5),
        {"margin": 0.1},
        "deploy",
        "better by 0.2",
    ),
    "a tie with a margin": (low(2.5), low(2.5), {"margin": 0.1}, "keep", "a tie never deploys"),
    "metric by its tail": (
        low(2.4),
        low(2.5),
        {"metric": "bits_per_byte"},
        "deploy",
        "loss/bits_per_byte 2.4",
    ),
    "metric missing in the new report": (
        {"loss/loss": metric(1.0)},
        low(2.5),
        {},
        "keep",
        (
            "the new model's report has no metric loss/bits_per_byte (it has loss/loss); mend"
            " gate.metric, or add a task to evaluate.tasks"
        ),
    ),
    "metric missing in the first model's report": (
        {},
        None,
        {},
        "keep",
        "has no metric loss/bits_per_byte (it has none at all)",
    ),
    "metric missing in the live report": (
        low(2.4),
        {"loss/loss": metric(1.0)},
        {},
        "keep",
        "live model's report has no metric loss/bits_per_byte; measure the live model",
    ),
    "another evaluation set, though better": (
        low(1.0),
        low(2.5, on="set2"),
        {},
        "keep",
        (
            "measured on another evaluation set (set1, live set2); measure the live model on this"
            " set too (`ingot evaluate`"
        ),
    ),
    "another meaning of the same key": (
        {LOWER: metric(0.5, "higher")},
        low(0.4),
        {},
        "keep",
        "was measured another way (higher",
    ),
    "not finite, first": (low(NAN), None, {}, "keep", "is nan; train it again"),
    "not finite, new": (low(NAN), low(2.5), {}, "keep", "of the new model is nan"),
    "minus infinity is no improvement": (
        low(-math.inf),
        low(2.5),
        {},
        "keep",
        "of the new model is -inf",
    ),
    "not finite, live": (
        low(2.5),
        low(NAN),
        {},
        "keep",
        "of the live model is nan; measure the live model",
    ),
    "several, all better": (
        {**low(2.4), **high(0.4)},
        {**low(2.5), **high(0.3)},
        {"metric": [LOWER, HIGHER]},
        "deploy",
        "lower is better: better by 0.1; rouge/rouge1",
    ),
    "several, one a tie": (
        {**low(2.4), **high(0.3)},
        {**low(2.5), **high(0.3)},
        {"metric": [LOWER, HIGHER]},
        "keep",
        "rouge/rouge1 0.3, live 0.3",
    ),
    "several, one worse": (
        {**low(2.6), **high(0.4)},
        {**low(2.5), **high(0.3)},
        {"metric": [LOWER, HIGHER]},
        "keep",
        "worse by 0.1",
    ),
    "several, one missing": (
        {**low(2.4)},
        {**low(2.5), **high(0.3)},
        {"metric": [LOWER, "rouge1"]},
        "keep",
        "no metric rouge1",
    ),
    "several, first model": (
        {**low(2.4), **high(0.4)},
        None,
        {"metric": [LOWER, HIGHER]},
        "deploy",
        FIRST,
    ),
    "several, first model, one missing": (
        {**low(2.4)},
        None,
        {"metric": [LOWER, HIGHER]},
        "keep",
        "no metric rouge/rouge1",
    ),
    "direction that agrees": (low(2.4), low(2.5), {"direction": "lower"}, "deploy", "better by"),
    "told to deploy, though worse": (
        low(2.6),
        low(2.5),
        {"override": "deploy"},
        "deploy",
        "gate.override says deploy; the numbers say keep: loss/bits_per_byte 2.6",
    ),
    "told to keep, though better": (
        low(2.4),
        low(2.5),
        {"override": "keep"},
        "keep",
        "gate.override says keep; the numbers say deploy: loss/bits_per_byte 2.4",
    ),
    "told to keep the first": (
        low(2.4),
        None,
        {"override": "keep"},
        "keep",
        f"gate.override says keep; the numbers say deploy: {FIRST}",
    ),
    "told to deploy without a number": (
        {},
        low(2.5),
        {"override": "deploy"},
        "deploy",
        "the numbers say keep: the new model's report has no metric",
    ),
    "told to deploy against a rule that cannot hold": (
        low(2.4),
        low(2.5),
        {"direction": "higher", "override": "deploy"},
        "deploy",
        "the numbers say nothing (gate.direction",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_the_table_of_cases(what: str) -> None:
    new, live, rule, decision, words = CASES[what]
    decided = decide(
        report("new", new), None if live is None else report("old", live), MetricGate(**rule)
    )
    assert decided.decision == decision, decided.reason
    assert words in decided.reason
    assert "\n" not in decided.reason
    assert decided.rule == MetricGate(**rule)


def test_both_values_are_kept_with_the_decision() -> None:
    decided = decide(
        report("new", {**low(2.4), **high(0.2)}),
        report("old", {**low(2.5), **high(0.3)}),
        MetricGate(metric=["bits_per_byte", HIGHER]),
    )
    assert [
        (c.metric, c.direction, c.candidate, c.live, c.better) for c in decided.comparisons
    ] == [(LOWER, "lower", 2.4, 2.5, True), (HIGHER, "higher", 0.2, 0.3, False)]
    first = decide(report("new", low(2.4)), None, MetricGate()).comparisons[0]
    assert (first.candidate, first.live) == (2.4, None)


@pytest.mark.parametrize("live", [None, report("old", low(2.5))])
def test_a_tail_that_fits_several_keys_is_refused(live: EvaluationReport | None) -> None:
    candidate = report("new", {"a/bits_per_byte": metric(1.0), "b/bits_per_byte": metric(1.0)})
    with pytest.raises(
        WrongInput,
        match=(
            r"metric `bits_per_byte` is one of a/bits_per_byte, b/bits_per_byte; give the whole key"
        ),
    ):
        decide(candidate, live, MetricGate(metric="bits_per_byte"))


def test_a_tail_that_fits_several_keys_of_the_live_report_alone_is_no_trouble() -> None:
    live = report("old", {"loss/bits_per_byte": metric(2.5), "b/bits_per_byte": metric(1.0)})
    assert (
        decide(report("new", low(2.4)), live, MetricGate(metric="bits_per_byte")).decision
        == "deploy"
    )


@pytest.mark.parametrize("live", [None, report("old", low(2.5))])
def test_a_direction_that_contradicts_the_metric_is_refused(live: EvaluationReport | None) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"gate.direction higher contradicts loss/bits_per_byte, of which lower is better;"
            r" remove gate.direction"
        ),
    ):
        decide(report("new", low(2.6)), live, MetricGate(direction="higher"))


class OwnGate(GateSettings):
    """A gate that decides whatever it is told."""

    implementation = "own_decision"
    kind: Literal["own"] = "own"
    said: str = "keep"


def own_decision(candidate: EvaluationReport, live: EvaluationReport | None, rule: OwnGate) -> Any:
    given: Any = {"True": True, "None": None}.get(rule.said, rule.said)
    return given if given is None else GateDecision(given, "so it is", (), rule)


@pytest.mark.parametrize("said", ["Deploy", "True", "", "None"])
def test_what_is_neither_deploy_nor_keep_is_no_decision(said: str) -> None:
    new = report("new", low(2.4))
    assert decide(new, None, OwnGate()).decision == "keep"
    with pytest.raises(WrongInput, match=rf"gate\.kind own decided '?{said}'?; .* deploy or keep"):
        decide(new, None, OwnGate(said=said))


def test_the_live_model_itself_may_stay() -> None:
    same = report("same", low(2.5))
    assert decide(same, same, MetricGate()).decision == "deploy"
    assert decide(same, same, MetricGate()).reason == "this very model is live already"
    assert decide(same, same, MetricGate(override="keep")).decision == "keep"
    other_tokenizer = EvaluationReport("same", "other", low(2.5))
    assert decide(same, other_tokenizer, MetricGate()).decision == "keep"


@pytest.mark.parametrize("old", [low(2.5, "set2"), high(0.3)])
def test_of_another_tokenizer_no_step_is_named_that_would_be_refused(
    old: dict[str, Metric],
) -> None:
    """`ingot evaluate` measures no model on data that another tokenizer prepared."""
    live = report("old", old)
    found = decide(report("new", low(2.4)), live, MetricGate())
    assert (found.decision, "evaluate.model=ITS FOLDER" in found.reason) == ("keep", True)
    found = decide(report("new", low(2.4)), replace(live, tokenizer_hash="other"), MetricGate())
    assert (found.decision, "evaluate.model" in found.reason) == ("keep", False)
    assert "the live model has another tokenizer" in found.reason
    assert "by `ingot deploy NAME --version NUMBER`" in found.reason


def test_an_empty_list_of_metrics_would_deploy_anything_and_is_no_rule() -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        MetricGate(metric=[])


@given(
    new=st.floats(),
    old=st.floats(),
    direction=st.sampled_from(["lower", "higher"]),
    margin=st.floats(0, 1e3),
)
def test_a_model_goes_live_only_if_it_is_better_and_never_both_ways(
    new: float, old: float, direction: str, margin: float
) -> None:
    rule = MetricGate(metric="task/x", margin=margin)
    one, other = (
        report("one", {"task/x": metric(new, direction)}),
        report("other", {"task/x": metric(old, direction)}),
    )
    there, back = decide(one, other, rule).decision, decide(other, one, rule).decision
    assert not (there == back == "deploy")
    if there == "deploy":
        assert new < old if direction == "lower" else new > old
    if not (math.isfinite(new) and math.isfinite(old)) or new == old:
        assert there == back == "keep"


FLOORED = EvaluationReport(
    "new",
    "tokenizer",
    {**low(2.2), **high(0.3)},
    baselines={"gzip -9": 1.6, "bigram": 2.5, f"{HIGHER}/first_line": 0.3, f"{HIGHER}/none": 0.0},
)


@pytest.mark.parametrize(
    ("metric_name", "floor", "decision", "words"),
    [
        (LOWER, 2.2, "deploy", "reaches the floor 2.2"),
        (LOWER, 2.1, "keep", "2.2 does not reach the floor 2.1"),
        (LOWER, "bigram", "deploy", "reaches the floor bigram 2.5"),
        (LOWER, "gzip", "keep", "2.2 does not reach the floor gzip -9 1.6"),
        (HIGHER, 0.3, "deploy", "reaches the floor 0.3"),
        (HIGHER, 0.31, "keep", "0.3 does not reach the floor 0.31"),
        (HIGHER, "none", "deploy", "reaches the floor none 0"),
        (HIGHER, "first_line", "keep", "0.3 is no better than the floor first_line, which has"),
        (HIGHER, 0.3000000001, "keep", "0.3 does not reach the floor 0.3000000001"),
    ],
)
def test_a_floor_holds_where_nothing_is_live_and_where_something_is(
    metric_name: str, floor: float | str, decision: str, words: str
) -> None:
    rule = MetricGate(metric=metric_name, floor=floor)
    first = decide(FLOORED, None, rule)
    assert (first.decision, words in first.reason) == (decision, True), first.reason
    worse = report("live", {LOWER: metric(9.0), HIGHER: metric(0.0, "higher")})
    assert decide(FLOORED, worse, rule).decision == decision
    better = report("live", {LOWER: metric(1.0), HIGHER: metric(0.9, "higher")})
    assert decide(FLOORED, better, rule).decision == "keep"


def test_a_floor_that_was_not_measured_is_refused() -> None:
    with pytest.raises(
        WrongInput, match=r"has no baseline xz in the report .it has bigram, gzip -9"
    ):
        decide(FLOORED, None, MetricGate(floor="xz"))
