"""Which rank hangs and which one holds the others up, told from signs of life alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from ingot.base.heartbeat import Heartbeat, Phase
from ingot.config.sections.launch import Launch
from ingot.launch.supervisor import hang_detection
from ingot.launch.supervisor.hang_detection import Hang, HangDetector, Straggler, StragglerDetector

LOOK_S = 0.25


def beat(
    rank: int,
    step: int = 5,
    place: int = 0,
    *,
    mono: float = 0.0,
    phase: Phase = "step",
    usual_s: float = 2.0,
) -> Heartbeat:
    return Heartbeat(100 + rank, rank, 1, step, place, phase, mono, 0.0, usual_s, {})


def found_after(
    watch: HangDetector, beats: dict[int, Heartbeat], *, ranks: int = 2, limit_s: float = 3000
) -> tuple[float, Hang] | None:
    """How long nobody says anything until somebody is said to hang, and who."""
    for look in range(1, int(limit_s / LOOK_S)):
        if hang := watch.check(range(ranks), beats, look * LOOK_S):
            return look * LOOK_S, hang
    return None


@pytest.mark.parametrize(
    ("phase", "knobs", "usual_s", "bound_s"),
    [
        ("step", {}, 2.0, 36.0),
        ("step", {"hang_s": 5}, 2.0, 5.0),
        ("step", {"start_s": 50}, 0.0, 50.0),
        ("loading", {"start_s": 50}, 2.0, 50.0),
        ("first step", {"start_s": 50, "hang_s": 5}, 0.0, 50.0),
        ("evaluating", {"start_s": 50, "hang_s": 5}, 2.0, 50.0),
        ("saving", {"start_s": 50, "hang_s": 5}, 2.0, 50.0),
        ("exporting", {"start_s": 50, "hang_s": 5}, 2.0, 50.0),
    ],
)
def test_silence_is_a_hang_after_the_bound_of_the_phase(
    phase: Phase, knobs: dict[str, float], usual_s: float, bound_s: float
) -> None:
    beats = {rank: beat(rank, phase=phase, usual_s=usual_s) for rank in (0, 1)}
    found = found_after(HangDetector(Launch(**knobs), 0.0), beats)
    assert found is not None
    assert bound_s < found[0] <= bound_s + 3 * LOOK_S
    assert found[1].limit_s == bound_s


def test_signs_of_life_are_no_hang() -> None:
    watch = HangDetector(Launch(hang_s=5), 0.0)
    for look in range(1, 400):
        # Every four seconds one of the two.
        said = LOOK_S * (look - look % 16)
        assert (
            watch.check(
                [0, 1],
                {0: beat(0, look // 16, mono=said), 1: beat(1, look // 16, mono=said)},
                look * LOOK_S,
            )
            is None
        )


@pytest.mark.parametrize(
    ("beats", "named"),
    [
        ({0: beat(0, 5, 3), 1: beat(1, 5, 1)}, (1,)),
        ({0: beat(0, 5, 0), 1: beat(1, 4, 9)}, (1,)),
        ({0: beat(0, 5, 1), 1: beat(1, 5, 1)}, (0, 1)),
        ({0: beat(0, 5, 1), 1: beat(1, 5, 1), 2: beat(2, 5, 1, phase="evaluating")}, (2,)),
        ({0: beat(0, 5, 1), 2: beat(2, 5, 2)}, (1,)),
    ],
)
def test_who_is_behind_is_named(beats: dict[int, Heartbeat], named: tuple[int, ...]) -> None:
    found = found_after(
        HangDetector(Launch(hang_s=5, start_s=60), 0.0), beats, ranks=3 if 2 in beats else 2
    )
    assert found is not None
    assert found[1].ranks == named


def test_who_waits_for_a_rank_that_measures_does_not_hang() -> None:
    """Rank 1 stands in its next step already and says nothing, for rank 0 evaluates for ten
    minutes.
    """
    watch = HangDetector(Launch(hang_s=5, start_s=60), 0.0)
    waits = beat(1, 6, 0)
    for look in range(1, 2400):
        works = beat(0, 6, 0, phase="evaluating", mono=LOOK_S * (look - look % 100))
        assert watch.check([0, 1], {0: works, 1: waits}, look * LOOK_S) is None


def test_a_rank_that_stands_still_while_it_saves_is_named_though_others_wait_for_it() -> None:
    """Who waits for the writers beats, at the same position as the one that does not."""
    watch, still = HangDetector(Launch(start_s=60), 0.0), beat(1, 5, phase="saving")
    for look in range(1, 400):
        waits = beat(0, 5, phase="saving", mono=LOOK_S * look)
        if hang := watch.check([0, 1], {0: waits, 1: still}, look * LOOK_S):
            break
    assert hang is not None
    assert (hang.ranks, hang.phase, hang.limit_s) == ((1,), "saving", 60)
    assert 60 < hang.quiet_s < 61


def test_a_rank_that_never_says_anything_hangs_after_the_starts_bound() -> None:
    found = found_after(HangDetector(Launch(start_s=20), 0.0), {}, ranks=1)
    assert found is not None
    assert 20 < found[0] < 21
    assert (
        found[1].describe()
        == "rank 0 hangs in phase `loading`: no heartbeat for 20s, 20s are allowed"
    )


def test_who_goes_back_is_behind_those_that_have_begun_again() -> None:
    """A rank that reads a checkpoint again tells the step that it left, which is a later one."""
    watch = HangDetector(Launch(start_s=50), 0.0)
    beats = {0: beat(0, 20, phase="first step"), 1: beat(1, 40, phase="loading")}
    found = found_after(watch, beats)
    assert found is not None
    assert (found[1].ranks, found[1].phase) == ((1,), "loading")


def test_a_machine_that_slept_is_no_hang() -> None:
    """Nobody was awake, we neither: an hour passes between two looks."""
    watch = HangDetector(Launch(hang_s=5), 0.0)
    beats = {0: beat(0)}
    assert watch.check([0], beats, 0.25) is None
    assert watch.check([0], beats, 3600.0) is None
    assert watch.check([0], {0: beat(0, mono=3600.1)}, 3600.25) is None
    assert found_after(watch, {0: beat(0, mono=3600.1)}, ranks=1, limit_s=10) is None, (
        "time that ran backwards counts for nothing"
    )


def test_ranks_of_a_suspended_job_are_not_judged_by_the_time_that_they_slept() -> None:
    watch, beats = HangDetector(Launch(hang_s=5), 0.0), {0: beat(0)}
    looks = [LOOK_S * look for look in range(1, 4000)]
    assert not any(watch.check([], beats, now) for now in looks)
    assert watch.check([0], beats, looks[-1] + LOOK_S) is None
    awake = (looks[-1] + LOOK_S * look for look in range(2, 30))
    assert any(watch.check([0], beats, now) for now in awake), "it does not go on"


def test_ended_ranks_are_not_judged() -> None:
    watch = HangDetector(Launch(hang_s=5), 0.0)
    for look in range(1, 400):
        assert watch.check([0], {0: beat(0, look, mono=look), 1: beat(1, 3)}, look * LOOK_S) is None


def test_a_hang_of_many_ranks_names_the_first_and_how_many_more() -> None:
    def told(ranks: int) -> str:
        return Hang(tuple(range(ranks)), 4, "step", 40.0, 36.0).describe()

    assert told(1).startswith("rank 0 hangs in step 5: ")
    assert told(3).startswith("ranks 0, 1, 2 hang in step 5: ")
    assert told(8).startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 hang in")
    assert told(10_000).startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9,992 more hang in")


def test_a_check_looks_at_each_rank_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that takes longer than a second counts as one: silence would grow slower than time
    does.
    """

    class Counted(tuple[int, int]):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return super().__eq__(other)

        def __lt__(self, other: tuple[int, int]) -> bool:
            Counted.compared += 1
            return super().__lt__(other)

        __hash__ = tuple.__hash__

    monkeypatch.setattr(hang_detection, "_position", lambda beat: Counted((beat.step, beat.place)))
    ranks = range(1000)
    beats = {rank: beat(rank) for rank in ranks}
    assert HangDetector(Launch(), 0.0).check(ranks, beats, 0.25) is None
    assert StragglerDetector().check(ranks, beats, 0.25) is None
    assert len(ranks) < Counted.compared < 6 * len(ranks)


def places(
    speeds: Sequence[float], *, seconds: float, noise: float, serial: float = 0.0, seed: int = 0
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Where ranks stand at each look: each takes `speeds[rank]` seconds, made uneven by `noise`,
    then waits for the others; rank 0 does `serial` more alone.
    """
    drawn = random.Random(seed)
    began, step, now = 0.0, 0, 0.0
    lasts = [0.0] * len(speeds)
    while now < seconds:
        if now >= began + max(lasts) or not step:
            began, step = now, step + 1
            lasts = [
                speed * drawn.lognormvariate(0, noise) + serial * (rank == 0)
                for rank, speed in enumerate(speeds)
            ]
        yield now, [(step, int(now >= began + last)) for last in lasts]
        now += LOOK_S / 2 + drawn.random() * LOOK_S


def stragglers(looks: Iterator[tuple[float, list[tuple[int, int]]]]) -> list[Straggler]:
    watch = StragglerDetector()
    seen = (
        watch.check(
            range(len(at)), {rank: beat(rank, *place) for rank, place in enumerate(at)}, now
        )
        for now, at in looks
    )
    return [found for found in seen if found is not None]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_twice_as_slow_is_named_once_a_window(ranks: int) -> None:
    found = stragglers(places([1.0] * (ranks - 1) + [2.0], seconds=600, noise=0.1))
    assert {one.rank for one in found} == {ranks - 1}
    assert 4 <= len(found) <= 6, "a window has 50 steps of two seconds"
    for one in found:
        assert 0.6 < one.seconds < 1.4
        assert one.share > 0.9
    assert (
        found[0]
        .describe()
        .startswith(f"rank {ranks - 1} holds the others up: they wait for it about ")
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0])
def test_ranks_on_a_busy_machine_are_no_stragglers(noise: float, seed: int) -> None:
    """Steps may be as uneven as they like, when none is slower by itself; and rank 0 has something
    to write after each.
    """
    assert not stragglers(places([1.0, 1.0], seconds=1200, noise=noise, serial=0.1, seed=seed))
    assert not stragglers(places([1.0, 1.15], seconds=1200, noise=noise, seed=seed)), (
        "a sixth slower costs less than it takes to be told"
    )


def test_while_one_measures_or_saves_nobody_is_a_straggler() -> None:
    watch = StragglerDetector()
    for look in range(4000):
        at = {0: beat(0, look // 4, 0, phase="saving"), 1: beat(1, look // 4, 1)}
        assert watch.check([0, 1], at, look * LOOK_S) is None
