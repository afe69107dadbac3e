"""The learning rate at its corners."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ingot.base.errors import WrongInput
from ingot.config.sections.training import CosineSchedule, ScheduleSettings, Train
from ingot.train.optim.schedules import LearningRate


def rates(total: int = 100, **knobs: object) -> list[float]:
    rate = LearningRate(Train(schedule=knobs).schedule, 2.0, total)  # type: ignore[arg-type]
    return [rate(step) for step in range(total)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.1, 10])
def test_warmup_is_never_zero_and_ends_at_the_peak(kind: str, warmup: float) -> None:
    values = rates(kind=kind, warmup=warmup)
    assert values[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(values) == 2.0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_ends_at_the_floor_with_the_last_step(kind: str) -> None:
    values = rates(kind=kind, warmup=0.1, min_ratio=0.25)
    assert values[-1] == pytest.approx(0.5)
    assert all(later < earlier for earlier, later in pairwise(values[9:]))


@pytest.mark.parametrize("decay", [0.4, 40])
@pytest.mark.parametrize(("curve", "half"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_wsd_is_stable_until_its_decay_begins(decay: float, curve: str, half: float) -> None:
    values = rates(kind="wsd", warmup=10, decay=decay, curve=curve, min_ratio=0.1)
    assert values[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert set(values[10:60]) == {2.0}
    assert values[79] == pytest.approx(2 * (0.1 + 0.9 * half))
    assert values[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(values[59:]))


@pytest.mark.parametrize("knobs", [{"kind": "constant"}, {"kind": "wsd", "decay": 1}])
def test_from_1_on_it_is_a_number_of_steps(knobs: dict[str, object]) -> None:
    """A share of 1 would be a training that only warms up, or only decays."""
    values = rates(**knobs, warmup=1)
    assert values[:99] == pytest.approx([2.0] * 99)
    assert values[99] == pytest.approx(0.2 if "decay" in knobs else 2.0)


def test_a_jump_of_the_rate_is_told() -> None:
    """Ten steps more of a schedule that decays over a share of all of them."""
    told = LearningRate(Train(schedule={"kind": "wsd", "warmup": 10}).schedule, 2.0, 100).told  # type: ignore[arg-type]
    phases = (
        "the learning rate rises to 2 at step 10, then is 2 until step 80, then falls to 0.2 at"
        " step 100"
    )
    assert told(0, {}) == told(60, {"learning_rate": 2.0}) == told(60, {}) == [phases]
    jump = "the learning rate goes from 2, that of the checkpoint, to 1.01 at once"
    assert [line[: len(jump)] for line in told(90, {"learning_rate": 2.0})] == [
        phases[: len(jump)],
        jump,
    ]


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"warmup": 0}, "is 2 until step 8, then falls to 0.2 at step 10"),
        ({"warmup": 0, "decay": 10}, "falls from 2 to 0.2 at step 10"),
        ({"warmup": 3, "decay": 50}, "rises to 2 at step 3, then falls to 0.2 at step 10"),
        (
            {"warmup": 0, "decay": 0.01},
            "is 2 until step 9, then falls to 0.2 at step 10",
        ),
        ({"warmup": 20}, "rises to 1 at step 10, the last one, as its warm-up takes 20 steps"),
        ({"warmup": 10}, "rises to 2 at step 10, the last one, as its warm-up takes 10 steps"),
    ],
)
def test_only_phases_that_there_are_are_told(knobs: dict[str, float], told: str) -> None:
    schedule = Train(schedule={"kind": "wsd", **knobs}).schedule  # type: ignore[arg-type]
    [line] = LearningRate(schedule, 2.0, 10).told(0, {})
    assert line.startswith(f"the learning rate {told}")


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_a_warm_up_that_does_not_end_is_told_of_every_kind(kind: str) -> None:
    def told(steps: int) -> list[str]:
        schedule = Train(schedule={"kind": kind, "warmup": 10}).schedule  # type: ignore[arg-type]
        return LearningRate(schedule, 2.0, steps).told(0, {})

    assert told(11) == []
    assert "rises to 0.8 at step 4, the last one" in told(4)[0]


def test_halfway_values() -> None:
    assert rates(kind="cosine", warmup=0, min_ratio=0)[49] == pytest.approx(1.0)
    assert rates(kind="linear", warmup=0, min_ratio=0)[74] == pytest.approx(0.5)
    assert set(rates(kind="constant", warmup=0)) == {2.0}


def test_warmup_longer_than_training_only_warms_up() -> None:
    assert rates(total=5, warmup=10) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("settings", [ScheduleSettings, CosineSchedule])
def test_an_unknown_kind_is_an_error_where_it_is_used(settings: type[ScheduleSettings]) -> None:
    """However it came past the configuration; it was linear once."""
    odd = settings.model_construct(kind="cosin", warmup=0.0, min_ratio=0.1)
    with pytest.raises(WrongInput, match=r"train\.schedule\.kind is 'cosin'.*mean 'cosine'"):
        LearningRate(odd, 2.0, 100)


def test_the_floating_point_value_of_each_kind_is_kept() -> None:
    """Rounded otherwise they would make another training."""
    assert rates(kind="cosine", warmup=3)[50] == 1.1145737619222515
    assert rates(kind="linear", warmup=3)[50] == 1.109278350515464
