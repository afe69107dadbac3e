"""Several rewards as one: weights, failures that are counted, and what is refused before."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.rewards import ExactReward, NumericReward, RewardSettings
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardFailed, Sample

TRIES: list[str] = []
AT_ONCE = [0, 0]
LOCK = threading.Lock()


class LengthSettings(RewardSettings):
    """The length of an answer; what is not finite, wrong or flaky is in the answer."""

    implementation = "odd"
    where = "here"
    kind: str = "odd"


class ThreadedSettings(LengthSettings):
    """The same in threads."""

    where = "threads"


class BatchedSettings(LengthSettings):
    """The same for a batch."""

    implementation = "odd_batch"
    batched: ClassVar[bool] = True


def odd(settings: RewardSettings) -> Any:
    def score(sample: Sample) -> Any:
        TRIES.append(sample.answer)
        with LOCK:
            AT_ONCE[0] += 1
            AT_ONCE[1] = max(AT_ONCE)
        time.sleep(0.01)
        with LOCK:
            AT_ONCE[0] -= 1
        if sample.answer == "raises":
            raise ZeroDivisionError("division by zero")
        if sample.answer.startswith("flaky") and TRIES.count(sample.answer) < 2:
            raise RewardFailed("busy", again=True)
        return {"nan": float("nan"), "none": None, "true": True, "big": 10**400}.get(
            sample.answer, len(sample.answer)
        )

    return score


def odd_batch(settings: RewardSettings) -> Any:
    one = odd(settings)

    def score(samples: Sequence[Sample]) -> list[float]:
        return [one(sample) for sample in samples]

    return score


@pytest.fixture(autouse=True)
def nothing_tried() -> None:
    TRIES.clear()
    AT_ONCE[:] = [0, 0]


def samples(*answers: str, reference: str | None = "4") -> list[Sample]:
    return [Sample("2 + 2", answer, reference) for answer in answers]


def test_the_total_is_the_weighted_sum() -> None:
    listed = [
        ExactReward(kind="exact", weight=2.0),
        NumericReward(kind="numeric", name="number", weight=-0.5, extract="flexible"),
    ]
    with build_rewards(listed) as rewards:
        scores = rewards(samples("4", "it is 4", "5"))
    assert rewards.names == ("exact", "number")
    assert scores.each == {"exact": [1.0, 0.0, 0.0], "number": [1.0, 1.0, 0.0]}
    assert scores.total == [1.5, -0.5, 0.0]
    assert scores.failures == {"exact": 0, "number": 0}
    assert scores.reasons == {}


@pytest.mark.parametrize("settings", [LengthSettings, ThreadedSettings, BatchedSettings])
def test_a_failure_counts_as_on_failure_and_spares_the_others(
    settings: type[RewardSettings],
) -> None:
    listed = [settings(weight=2.0, on_failure=-1.0)]
    with build_rewards(listed) as rewards:
        scores = rewards(samples("nan", "abc", "raises", "none", "true", "big"))
    assert scores.each == {"odd": [None, 3.0, None, None, 1.0, None]}
    assert scores.total == [-2.0, 6.0, -2.0, -2.0, 2.0, -2.0]
    assert scores.failures == {"odd": 4}
    assert scores.reasons == {"odd": "its value is nan; it must be finite"}


@pytest.mark.parametrize("settings", [ThreadedSettings, LengthSettings])
def test_what_may_help_is_tried_again_and_nothing_else(settings: type[RewardSettings]) -> None:
    """Wherever it is computed."""
    with build_rewards([settings(retries=2)]) as rewards:
        scores = rewards(samples("flaky", "raises"))
    assert scores.each == {"odd": [5.0, None]}
    assert (TRIES.count("flaky"), TRIES.count("raises")) == (2, 1)
    with build_rewards([LengthSettings()]) as rewards:
        scores = rewards(samples("flaky two"))
    assert scores.reasons == {"odd": "busy"}
    assert scores.absent == ["odd"]


def test_a_reward_that_judges_something_or_refuses_is_not_absent() -> None:
    with build_rewards([LengthSettings()]) as rewards:
        for answers in (("flaky", "abc"), ("raises", "flaky again"), ("raises",), ()):
            assert rewards(samples(*answers)).absent == []
    with build_rewards([LengthSettings(weight=0.0)]) as logged:
        assert logged(samples("flaky two")).absent == []


def test_samples_are_scored_together_but_never_more_than_asked() -> None:
    with build_rewards([ThreadedSettings(at_once=3)]) as rewards:
        scores = rewards(samples(*("a" * n for n in range(30))))
    assert scores.total == list(map(float, range(30)))
    assert AT_ONCE[1] == 3


def test_a_sample_without_a_reference_fails() -> None:
    with build_rewards([ExactReward(kind="exact")]) as rewards:
        scores = rewards(samples("4", reference=None))
    assert scores.failures == {"exact": 1}
    assert "no reference" in scores.reasons["exact"]
    assert rewards([]).total == []


def test_what_cannot_work_is_refused_before() -> None:
    class NowhereSettings(LengthSettings):
        implementation = "nowhere:nothing"

    with pytest.raises(WrongInput, match="is empty"):
        build_rewards([])
    twice = [ExactReward(kind="exact"), ExactReward(kind="exact", after="#")]
    with pytest.raises(WrongInput, match="two rewards are called exact"):
        build_rewards(twice)
    with pytest.raises(WrongInput, match=r"reward odd: nowhere:nothing .* cannot be imported"):
        build_rewards([NowhereSettings()])
