"""Goodput of made-up trainings, the seconds of which are known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.base.heartbeat import PHASES, Heartbeat
from ingot.base.runlog import read_lines
from ingot.report.goodput import TIME_PARTS, Goodput, TimePart, goodput
from ingot.report.incidents import FAILURE_EVENTS, IncidentKind, incident_ranks
from tests import tolerances
from tests.report.told import Told, a_beat


def counted(
    told: Told | list[Any], beat: Heartbeat | None = None, *, alive: bool = False
) -> Goodput:
    found = goodput(told.events if isinstance(told, Told) else told, beat, alive=alive)
    assert found is not None
    assert sum(found.share(part) for part in TIME_PARTS) == pytest.approx(1, rel=tolerances.EXACT)
    return found


def parts(found: Goodput) -> dict[TimePart, float]:
    """Without those that are 0."""
    return {part: amount for part, amount in found.seconds.items() if amount > 1e-6}


def near(**seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-6)


def an_undisturbed() -> Told:
    """Process made at 0, first step at 10, saves snapshot at 50 and 90 and written by 52 and 92,
    over at 92.
    """
    told = Told()
    told.start(10, attempt=1, seconds=10)
    told.save(52, step=40, spent={"productive": 34, "waiting": 2, "evaluating": 4}, total_s=2)
    told.save(92, step=80, spent={"productive": 35, "waiting": 1, "saving": 2}, total_s=2)
    told.own(92, "finish", step=80, seconds=82)
    return told


def test_an_undisturbed_training() -> None:
    found = counted(an_undisturbed())
    # 2 seconds that no save accounts for were spent on the step after the snapshot at 88, 2 on the
    # last checkpoint.
    assert parts(found) == near(starting=10, productive=71, waiting=3, evaluating=4, saving=4)
    assert found.wall_s == pytest.approx(92)
    assert found.share() == pytest.approx(71 / 92)
    assert [
        (span.number, span.created, span.began, span.ended, span.end, span.first, span.last)
        for span in found.attempts
    ] == [(1, 0, 10, 92, "finished", 0, 80)]
    assert (found.incidents, found.running, found.earlier) == ([], False, 0)


def a_killed(*, restart: bool = True) -> Told:
    """Saved at 50 of what was done by 48, killed at 70, noticed at 71, started at 73, at work again
    at 80, over at 100.
    """
    told = Told()
    told.start(10, attempt=1, seconds=10)
    told.save(50, step=40, spent={"productive": 36, "saving": 2}, total_s=2)
    if restart:
        told.event(
            70, "killed", attempt=1, rank=1, step=58, cause="chaos", what="rank", phase="step"
        )
        told.event(
            73, "restart", attempt=2, seconds=2, cause="rank 1 was killed by SIGKILL at step 58"
        )
    told.event(
        75, "lost", attempt=2, step=40, seconds=21, steps=18, cause="attempt 1 ended in phase step"
    )
    told.start(80, attempt=2, seconds=7, step=40, cause="resumed")
    told.save(100, step=60, spent={"productive": 19}, total_s=1)
    told.own(100, "finish", step=60, seconds=20)
    return told


def test_a_kill_costs_what_was_not_saved_the_time_until_the_start_and_the_start() -> None:
    found = counted(a_killed())
    assert parts(found) == near(starting=17, productive=55, saving=3, lost=22, down=3)
    assert [span.end for span in found.attempts] == ["killed", "finished"]
    (loss,) = found.incidents
    assert (loss.kind, loss.ranks, loss.step, loss.steps) == ("killed", (1,), 58, 18)
    assert (loss.lost_s, loss.down_s, loss.starting_s, loss.cost_s) == pytest.approx((22, 3, 7, 32))
    assert loss.cause == "killed by chaos: rank 1"
    assert loss.wall == Told.BEGAN + 70


def test_without_a_supervisor_what_the_next_attempt_says_counts() -> None:
    found = counted(a_killed(restart=False))
    # Dead at 48 + 21, as far as is known; nobody noticed.
    assert parts(found) == near(starting=17, productive=55, saving=3, lost=21, down=4)
    assert [(loss.kind, loss.cause, loss.step, loss.wall) for loss in found.incidents] == [
        ("died", "attempt 1 ended in phase step", 58, Told.BEGAN + 69)
    ]


def test_going_on_on_another_host_counts_what_was_seen_of_the_dead_one() -> None:
    """No heartbeat of the dead one is there, so that nothing is told of it; clocks of two machines
    have nothing to do with each other.
    """
    told = a_killed(restart=False)
    told.events = [event for event in told.events if event["kind"] != "lost"]
    for event in told.events:
        event["t_mono"] += 5e5 if event["attempt"] == 1 else 3.0
    found = counted(told)
    assert parts(found) == near(starting=17, productive=55, saving=3, lost=2, down=23)
    assert found.incidents[0].cause == "ended without a message"


def test_a_hang_and_a_failure_are_told_in_the_words_of_who_saw_them() -> None:
    told = Told()
    told.start(5, attempt=1, seconds=5)
    for rank in (2, 0):
        told.event(
            60,
            "hang",
            attempt=1,
            rank=rank,
            step=7,
            seconds=50,
            cause="no step for 50 s",
            stacks=None,
        )
    told.event(63, "restart", attempt=2, seconds=3, cause="ranks 0, 2: no step for 50 s; stacks: x")
    told.start(68, attempt=2, seconds=5)
    told.event(80, "failure", attempt=0, cause="train: disk full", step=None)
    told.event(81, "restart", attempt=3, seconds=1, cause="rank 0 ended with exit code 1")
    told.start(90, attempt=3, seconds=9)
    told.own(95, "stop", step=0, seconds=5, cause="SIGTERM")
    found = counted(told)
    assert parts(found) == near(starting=19, productive=5, lost=55 + 12, down=3 + 1)
    assert [(loss.kind, loss.ranks, loss.step, loss.cause) for loss in found.incidents] == [
        ("hung", (0, 2), 7, "no step for 50 s"),
        ("died", (0,), None, "rank 0 ended with exit code 1 (disk full)"),
    ]
    assert [loss.wall for loss in found.incidents] == [Told.BEGAN + 60, Told.BEGAN + 80]


def test_a_hang_of_many_ranks_names_the_first_and_how_many_more() -> None:
    told = Told()
    told.start(5, attempt=1, seconds=5)
    told.event(60, "hang", attempt=1, ranks=[0, 2], count=10_000, step=7, seconds=50, cause="quiet")
    told.event(63, "restart", attempt=2, seconds=3, cause="quiet")
    (loss,) = counted(told).incidents
    assert (loss.kind, loss.ranks, incident_ranks(loss)) == ("hung", (0, 2), "0, 2 and 9,998 more")


def test_going_back_is_a_loss_and_so_are_steps_not_taken() -> None:
    told = Told()
    told.start(10, attempt=1, seconds=10)
    told.save(30, step=10, spent={"productive": 20}, total_s=0)
    for step in (13, 14, 15):
        told.own(30 + step, "skip", step=step, cause=f"spike, gradient norm {step}")
    told.own(46, "skip", step=16, cause="not finite")
    told.own(50, "roll_back", step=10, cause="spikes in 3 steps", samples=[1, 2])
    told.start(54, attempt=2, seconds=4, step=10, cause="resumed")
    told.save(70, step=20, spent={"productive": 16}, total_s=0)
    told.own(70, "finish", step=20, seconds=16)
    found = counted(told)
    assert parts(found) == near(starting=14, productive=36, lost=20)
    assert [(loss.kind, loss.step, loss.steps, loss.cause) for loss in found.incidents] == [
        ("skipped", 13, 3, "spike, gradient norm 13"),
        ("skipped", 16, 1, "not finite"),
        ("rolled back", 10, 0, "spikes in 3 steps"),
    ]
    assert [loss.kind for loss in found.costliest] == ["rolled back", "skipped", "skipped"]


def test_nobody_is_down_who_does_not_want_to_train() -> None:
    told = an_undisturbed()
    told.events[-1]["kind"] = "stop"
    told.start(100_000, attempt=2, seconds=8, step=80, cause="resumed")
    told.save(100_010, step=90, spent={"productive": 10}, total_s=0)
    told.own(100_010, "finish", step=90, seconds=10)
    told.event(200_000, "gate", cause="deploy")
    told.event(200_001, "failure", cause="serve: port taken")
    found = counted(told)
    assert found.wall_s == pytest.approx(92 + 18)
    assert "down" not in parts(found)
    assert [(span.created, span.ended) for span in found.attempts] == [(0, 92), (92, 110)]


def test_a_kill_while_the_model_is_exported_costs_another_start_only() -> None:
    told = an_undisturbed()
    told.event(
        95,
        "killed",
        attempt=1,
        rank=None,
        step=80,
        cause="chaos",
        what="supervisor",
        phase="exporting",
    )
    told.event(
        500,
        "lost",
        attempt=2,
        step=80,
        seconds=0,
        steps=0,
        cause="attempt 1 ended in phase exporting",
    )
    told.start(505, attempt=2, seconds=6, step=80, cause="resumed")
    told.own(505, "finish", step=80, seconds=0)
    found = counted(told)
    assert found.wall_s == pytest.approx(98)
    assert [(loss.cause, loss.cost_s) for loss in found.incidents] == [
        ("killed by chaos: all ranks and the supervisor", pytest.approx(6))
    ]


def test_the_clock_stands_for_all_that_comes_after_a_finish() -> None:
    told = an_undisturbed()
    told.event(5000, "skip", attempt=9, step=3, cause="not finite")
    assert [loss.at for loss in counted(told).incidents] == [pytest.approx(92)]
    assert counted(told).wall_s == pytest.approx(92)


def test_deaths_before_the_first_step_are_down_and_told_one_by_one() -> None:
    told = Told()
    told.start(10, attempt=1, seconds=10)
    told.event(
        20, "killed", attempt=1, rank=None, step=3, cause="chaos", what="group", phase="step"
    )
    told.event(22, "restart", attempt=2, seconds=1, cause="rank 0 was killed")
    told.event(
        24, "lost", attempt=2, step=0, seconds=9, steps=3, cause="attempt 1 ended in phase step"
    )
    told.event(26, "killed", attempt=2, rank=0, step=0, cause="chaos", what="rank", phase="loading")
    told.event(30, "restart", attempt=2, seconds=4, cause="rank 0 was killed")
    told.event(
        31, "lost", attempt=2, step=0, seconds=0, steps=0, cause="attempt 2 ended in phase loading"
    )
    told.event(40, "restart", attempt=2, seconds=5, cause="rank 1 was killed")
    told.event(
        60, "give_up", attempt=2, cause="two failures in a row; the last failure: rank 1 was killed"
    )
    found = counted(told)
    assert parts(found) == near(starting=10, lost=10, down=40)
    assert [(loss.lost_s, loss.down_s, loss.cause) for loss in found.incidents] == [
        (pytest.approx(10), pytest.approx(6), "killed by chaos: all ranks"),
        (0, pytest.approx(9), "killed by chaos: rank 0"),
        (0, pytest.approx(25), "rank 1 was killed; given up: two failures in a row"),
    ]
    assert [loss.ranks for loss in found.incidents] == [(), (0,), (1,)]


def test_the_rank_of_a_training_that_is_given_up_at_once_is_known() -> None:
    told = Told()
    told.start(10, attempt=1, seconds=10)
    cause = "launch.restarts=0 allows no more; the last failure: rank 3 failed (exit 1) at step 2"
    told.event(20, "give_up", attempt=1, cause=cause)
    assert [loss.ranks for loss in counted(told).incidents] == [(3,)]


@pytest.mark.parametrize("back", [5.0, 3600.0, 1e8])
@pytest.mark.parametrize("place", range(1, 8))
def test_a_clock_that_is_set_back_takes_nothing_away(back: float, place: int) -> None:
    told = a_killed()
    for event in told.events[place:]:
        event["t_wall"] -= back
    found = counted(told)
    expected = counted(a_killed())
    for part in ("productive", "saving", "starting"):
        assert found.seconds[part] == pytest.approx(expected.seconds[part])
    assert 0 <= found.seconds["lost"] <= 27
    assert 0 <= found.seconds["down"] <= 5
    assert found.wall_s <= expected.wall_s + 5


def test_within_an_attempt_the_monotonic_clock_counts() -> None:
    told = an_undisturbed()
    told.events[1]["t_wall"] -= 7200
    told.events[3]["t_wall"] += 86400
    assert counted(told) == counted(an_undisturbed())


def test_what_others_record_by_a_clock_that_jumps_ahead_is_set_right_by_the_next_own_event() -> (
    None
):
    told = an_undisturbed()
    told.event(60 + 86_400, "straggler", attempt=1, rank=1, step=45, seconds=3, cause="slow")
    told.event(61 + 86_400, "failure", cause="evaluate: no such file")
    told.events[2:] = [*told.events[4:], *told.events[2:4]]
    assert [event["kind"] for event in told.events] == [
        "start",
        "save",
        "straggler",
        "failure",
        "save",
        "finish",
    ]
    assert counted(told) == counted(an_undisturbed())


def test_a_failure_of_another_verb_is_none_of_the_training() -> None:
    told = an_undisturbed()
    del told.events[3]
    told.event(5000, "failure", cause="evaluate: no such file")
    assert counted(told).wall_s == pytest.approx(92)
    assert counted(told).incidents[0].cause == "ended without a message"


def test_a_training_that_runs_counts_what_its_heartbeat_says() -> None:
    told = Told()
    told.start(10, attempt=1, seconds=10)
    told.save(50, step=40, spent={"productive": 38, "saving": 1}, total_s=2)
    spent = {"productive": 20.0, "waiting": 3.0, "evaluating": 0.0, "saving": 1.0}
    found = counted(
        told, a_beat(80, attempt=1, step=70, phase="evaluating", spent=spent), alive=True
    )
    assert found.running
    assert parts(found) == near(starting=10, productive=58, waiting=3, saving=2, evaluating=7)
    assert [(span.end, span.ended, span.last) for span in found.attempts] == [
        ("running", pytest.approx(80), 70)
    ]
    dead = counted(told, a_beat(80, attempt=1, step=70, phase="evaluating", spent=spent))
    assert parts(dead) == near(starting=10, productive=38, saving=1, lost=31)
    assert [(loss.step, loss.cause) for loss in dead.incidents] == [
        (70, "ended in phase evaluating")
    ]
    assert parts(counted(told, None, alive=True)) == near(starting=10, productive=39, saving=1)
    assert parts(counted(told)) == near(starting=10, productive=38, saving=1, lost=1)


def test_an_attempt_that_loads_is_starting() -> None:
    told = a_killed()
    told.events = told.events[:4]
    found = counted(told, a_beat(77, attempt=2, step=0, phase="loading"), alive=True)
    assert found.running
    assert parts(found) == near(starting=14, productive=36, saving=2, lost=22, down=3)
    unnoticed = counted(told.events[:2], a_beat(77, attempt=2, step=0, phase="loading"), alive=True)
    assert parts(unnoticed) == near(starting=37, productive=36, saving=2, lost=2)


def test_another_training_in_the_same_folder_begins_another_account() -> None:
    again = an_undisturbed()
    again.events += [
        {**event, "t_wall": event["t_wall"] + 1000, "t_mono": event["t_mono"] + 1000, "attempt": 2}
        for event in an_undisturbed().events
    ]
    found = counted(again)
    assert (found.earlier, found.seconds) == (1, counted(an_undisturbed()).seconds)
    # --fresh after a death.
    fresh = a_killed(restart=False)
    fresh.events = fresh.events[:2]
    fresh.start(200, attempt=2, seconds=5)
    assert (counted(fresh).earlier, counted(fresh).wall_s) == (1, pytest.approx(5))


def test_a_training_that_is_brought_back_goes_on_on_its_own_account() -> None:
    """After another one, which took 60 seconds of its own, and whatever the clock did between."""
    told = Told()
    for at, attempt, training, step, cause in (
        (10, 1, "a", 0, "first step"),
        (1010, 2, "b", 0, "first step"),
        (5005, 3, "a", 40, "resumed"),
    ):
        about = {"attempt": attempt, "seconds": 5, "step": step, "cause": cause}
        told.event(at, "start", **about, training=training)
        if attempt == 1:
            told.event(at + 40, "save", attempt=1, step=40, spent={"productive": 40}, total_s=0)
        told.event(at + 60, "finish", attempt=attempt, step=80, seconds=60)
    found = counted(told)
    assert [span.number for span in found.attempts] == [1, 3]
    assert (found.earlier, parts(found)) == (1, near(starting=10, productive=120))
    told.event(6000, "start", attempt=4, step=80, seconds=5, cause="resumed", training="a changed")
    told.event(6001, "finish", attempt=4, step=80, seconds=1)
    assert counted(told).wall_s == pytest.approx(136), "what may change is the same training"


def test_a_training_that_another_took_the_place_of_is_not_down_meanwhile() -> None:
    told = a_killed(restart=False)
    told.events = [{**event, "training": "a"} for event in told.events[:2]]
    told.event(200, "start", attempt=2, step=0, seconds=5, cause="first step", training="b")
    told.event(220, "finish", attempt=2, step=9, seconds=20)
    told.event(900, "start", attempt=3, step=40, seconds=5, cause="resumed", training="a")
    told.event(910, "finish", attempt=3, step=50, seconds=10)
    found = counted(told)
    assert found.wall_s == pytest.approx(50 + 15)
    assert found.seconds["down"] == 0


@pytest.mark.parametrize("kind", ["lost", "restart", None])
def test_from_the_first_step_again_for_want_of_a_checkpoint_is_the_same_training(
    kind: str | None,
) -> None:
    told = Told()
    told.start(10, attempt=1, seconds=10)
    if kind:
        told.event(30, kind, attempt=2, step=0, seconds=1, cause="x")
    told.start(40, attempt=2, seconds=5)
    assert counted(told).earlier == 0
    assert counted(told).wall_s == pytest.approx(40)


def test_torn_lines_and_other_events_count_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(event) for event in a_killed().events]
    path.write_text(
        "\n".join(
            [
                lines[0],
                '{"t_wall": 17',
                *lines[1:4],
                "3",
                '{"kind": "register", "t_wall": 9e9}',
                *lines[4:],
            ]
        )
        + '\n{"kind": "sta'
    )
    assert counted(list(read_lines(path))) == counted(a_killed())


def test_no_training_no_goodput() -> None:
    assert goodput([]) is None
    assert (
        goodput([{"kind": "gate"}, {"kind": "lost", "seconds": 3}, {}, {"kind": ["start"]}]) is None
    )


ODD = st.sampled_from(
    [
        None,
        -1,
        0,
        1,
        2,
        1e300,
        -1e300,
        math.inf,
        math.nan,
        True,
        "x",
        [],
        {},
        "first step",
        "resumed",
        10**400,
        "train: x",
    ]
)
TIMES = st.floats(-100, 1000) | ODD
SPENT = (
    st.dictionaries(st.sampled_from(["productive", "waiting", "evaluating", "saving", "x"]), TIMES)
    | ODD
)
NAMES = st.sampled_from(
    ["start", "save", "finish", "stop", "skip", "straggler", "changed", *FAILURE_EVENTS, "odd"]
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"kind": NAMES | ODD},
        optional={
            "t_wall": TIMES,
            "t_mono": TIMES,
            "attempt": st.integers(0, 3) | ODD,
            "rank": st.integers(0, 3) | ODD,
            "ranks": st.lists(st.integers(0, 3) | ODD, max_size=3) | ODD,
            "count": st.integers(-1, 9) | ODD,
            "step": st.integers(0, 9) | ODD,
            "seconds": TIMES,
            "cause": ODD,
            "spent": SPENT,
            "total_s": TIMES,
            "steps": st.integers(-3, 9) | ODD,
            "what": ODD,
        },
    ),
    max_size=12,
)
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
BEATS = st.builds(
    Heartbeat,
    pid=st.just(1),
    rank=st.just(0),
    attempt=st.integers(-1, 4),
    step=st.integers(-1, 9),
    place=st.just(0),
    phase=st.sampled_from(PHASES),
    mono=FLOATS,
    wall=FLOATS,
    usual_s=FLOATS,
    spent=st.fixed_dictionaries(
        dict.fromkeys(["productive", "waiting", "evaluating", "saving"], FLOATS)
    ),
)


@given(events=EVENTS, beat=st.none() | BEATS, alive=st.booleans())
def test_whatever_stands_in_the_events_the_shares_are_shares(
    events: list[dict[str, Any]], beat: Heartbeat | None, alive: bool
) -> None:
    check(goodput(events, beat, alive=alive))


@given(data=st.data(), beat=st.none() | BEATS, alive=st.booleans())
def test_whatever_the_order_the_shares_are_shares(
    data: st.DataObject, beat: Heartbeat | None, alive: bool
) -> None:
    check(goodput(data.draw(st.permutations(a_killed().events)), beat, alive=alive))


def check(found: Goodput | None) -> None:
    if found is None:
        return
    shares = [found.share(part) for part in TIME_PARTS]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1 if found.wall_s > 0 else 0, rel=tolerances.EXACT)
    assert math.isfinite(found.wall_s)
    for span in found.attempts:
        assert 0 <= span.created <= span.began <= span.ended
    ends = [time for span in found.attempts for time in (span.created, span.ended)]
    assert ends == sorted(ends)
    assert all(
        loss.kind in get_args(IncidentKind)
        and loss.lost_s >= 0
        and loss.down_s >= 0
        and loss.starting_s >= 0
        for loss in found.incidents
    )
    assert all(0 <= loss.at <= found.wall_s * (1 + tolerances.EXACT) for loss in found.incidents)
    # Whatever is lost or down has its cause.
    for part, amounts in (
        ("lost", [loss.lost_s for loss in found.incidents]),
        ("down", [loss.down_s for loss in found.incidents]),
    ):
        assert sum(amounts) == pytest.approx(found.seconds[part], rel=tolerances.EXACT, abs=1e-3), (
            part
        )
