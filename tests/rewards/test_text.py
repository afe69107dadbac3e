"""Rewards that compare texts: exact match, and numbers against lm-evaluation-harness' own code."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.config.sections.rewards import ExactReward, NumericReward
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import Sample
from ingot.rewards.text import Exact, Numeric, bare, flexible, strict
from tests.lazy import lazy, require

require("lm_eval", "lm_eval is not installed")
extraction = lazy("lm_eval.filters.extraction")
metrics = lazy("lm_eval.api.metrics")

# What the task gsm8k of lm-evaluation-harness gives to its filters and to its metric.
STRICT = {"regex_pattern": r"#### (\-?[0-9\.\,]+)"}
FLEXIBLE = {"group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"}
METRIC: dict[str, Any] = {
    "ignore_case": True,
    "ignore_punctuation": False,
    "regexes_to_ignore": [",", r"\$", r"(?s).*#### ", r"\.$"],
}
LIKE_NUMBERS = st.text(st.sampled_from("0123456789.,-$# \nEe+x٣"), max_size=30)
TEXTS = st.one_of(LIKE_NUMBERS, st.text(st.characters(exclude_characters="\0"), max_size=30))


def exact(answer: str, reference: str, **knobs: Any) -> float:
    return Exact(ExactReward(kind="exact", **knobs))(Sample("", answer, reference))


def numeric(answer: str, reference: str, **knobs: Any) -> float:
    return Numeric(NumericReward(kind="numeric", **knobs))(Sample("", answer, reference))


@pytest.mark.parametrize(
    ("answer", "reference", "knobs", "value"),
    [
        ("Paris", "Paris", {}, 1.0),
        (" Paris\n", "Paris", {}, 1.0),
        (" Paris", "Paris", {"whitespace": "keep"}, 0.0),
        ("New  York", "New York", {}, 0.0),
        ("New \n York", "New York", {"whitespace": "collapse"}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("STRASSE", "straße", {"ignore_case": True}, 1.0),
        ("Paris.", "Paris", {"ignore_punctuation": True}, 1.0),
        ("the Seine", "Seine", {"ignore_articles": True}, 1.0),
        ("theatre", "atre", {"ignore_articles": True}, 0.0),
        ("Battle of the Bulge", "Battle of Bulge", {"ignore_articles": True}, 1.0),
        ("two  words", "two words", {"ignore_articles": True}, 0.0),
        ("cafe\u0301", "caf\u00e9", {}, 1.0),
        ("cafe\u0301", "caf\u00e9", {"unicode": "none"}, 0.0),
        ("\u2460", "1", {"unicode": "NFKC"}, 1.0),
        ("I think 4. Answer: 5", "5", {"after": "Answer:"}, 1.0),
        ("Answer: 4. Answer: 5", "4. so Answer: 5", {"after": "Answer:"}, 1.0),
        ("5", "5", {"after": "Answer:"}, 0.0),
    ],
)
def test_exact_match_normalises_as_asked(
    answer: str, reference: str, knobs: dict[str, Any], value: float
) -> None:
    assert exact(answer, reference, **knobs) == value


@settings(max_examples=150, deadline=None)
@example("#### 1,234.", "so\n#### 1234")
@example("###,# 5", "###,# 5")
@example("#### -.", "5")
@given(TEXTS, TEXTS)
def test_numbers_are_found_and_compared_as_the_harness_does(answer: str, reference: str) -> None:
    for knobs, find, extract in ((STRICT, strict, "strict"), (FLEXIBLE, flexible, "flexible")):
        ((theirs,),) = extraction.RegexFilter(**knobs).apply([[answer]], [{}])
        assert find(answer) == theirs
        given_ = metrics.exact_match_hf_evaluate([theirs], [reference], **METRIC)["exact_match"]
        assert numeric(answer, reference, extract=extract) == float(given_)


@pytest.mark.parametrize(
    ("answer", "reference", "knobs", "value"),
    [
        ("2 + 2 = 4\n#### 4", "He has 2 + 2.\n#### 4", {}, 1.0),
        ("the answer is 4", "#### 4", {}, 0.0),
        ("the answer is $4.", "#### 4", {"extract": "flexible"}, 1.0),
        ("#### 1,000", "#### 1000", {}, 1.0),
        ("#### 42.0", "#### 42", {}, 0.0),
        ("#### 42.0", "#### 42", {"tolerance": 0}, 1.0),
        ("#### 3.14", "3.1416", {"tolerance": 0.01}, 1.0),
        ("#### 3.13", "3.1416", {"tolerance": 0.01}, 0.0),
        ("#### 4.5.6", "4", {"tolerance": 1}, 0.0),
        ("nothing", "4", {"tolerance": 1}, 0.0),
    ],
)
def test_numbers(answer: str, reference: str, knobs: dict[str, Any], value: float) -> None:
    assert numeric(answer, reference, **knobs) == value


def test_a_reference_without_a_number_fails_and_scores_nothing() -> None:
    with build_rewards([NumericReward(kind="numeric", tolerance=0)]) as rewards:
        scores = rewards([Sample("", "#### 4", "four")])
    assert scores.failures == {"numeric": 1}
    assert "the reference 'four' is no number" in scores.reasons["numeric"]


def test_long_answers_take_linear_time() -> None:
    began = time.process_time()
    for text in ("#" * 300_000, "$" * 300_000, "1,." * 100_000, "-" * 300_000, " \n" * 150_000):
        numeric(text, text)
        numeric(text, text, extract="flexible")
        exact(text, text, ignore_articles=True, whitespace="collapse", after="# ")
        bare(text)
    assert time.process_time() - began < 10
