"""Kills on purpose: at random moments that a seed repeats, written down before they happen, and no
reason to give up.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ingot.base.heartbeat import Heartbeat
from ingot.base.runlog import read_lines, record_event
from ingot.config.load import dump_recipe
from ingot.config.sections.deployment import Chaos
from ingot.launch.places.local import JobExit
from ingot.launch.supervisor.attempt_watch import ChaosKills
from tests.launch import stand_in
from tests.launch.conftest import Made, Supervised
from tests.launch.supervisor.test_supervise import SCRIPT, events, starts
from tests.patience import PATIENCE_S


class Victims:
    """An attempt of three ranks that only notes what is sent, and what was written down by then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent: list[tuple[int, int | None, list[tuple[str, int | None]]]] = []

    def poll(self) -> None:
        return None

    def running(self) -> list[int]:
        return [0, 1, 2]

    def beats(self) -> dict[int, Heartbeat]:
        return {rank: Heartbeat(0, rank, 4, 7, 0, "step", 0.0, 0.0, 0.0, {}) for rank in range(3)}

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        (rank,) = (None,) if ranks is None else ranks
        self.sent.append(
            (number, rank, [(event["kind"], event["rank"]) for event in read_lines(self.path)])
        )

    def stop(self) -> None:
        raise AssertionError("not asked for")


def drawn(
    knobs: Chaos, path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, str, int | None]]:
    """The next `count` kills: after how many seconds, what, and which rank."""
    found = []
    for _ in range(count):
        now = [0.0]
        monkeypatch.setattr(
            "ingot.launch.supervisor.attempt_watch.time.monotonic", lambda now=now: now[0]
        )
        kills, victims = ChaosKills(knobs, path), Victims(path)
        kills.arm()
        while not victims.sent:
            now[0] += 0.01
            kills.kill_if_due(victims)
        number, rank, noted = victims.sent[0]
        assert number == signal.SIGKILL
        assert noted[-1] == ("killed", rank), "written down before it happens"
        assert kills.has_killed
        event = list(read_lines(path))[-1]
        assert (event["cause"], event["phase"], event["step"], event["attempt"]) == (
            "chaos",
            "step",
            7,
            4,
        )
        found.append((round(now[0], 2), event["what"], rank))
        kills.kill_if_due(victims)
        assert len(victims.sent) == 1, "once an attempt"
    return found


def test_the_seed_and_how_many_were_killed_decide_the_next_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them is drawn by another supervisor here: one that is started again does not repeat
    itself.
    """
    knobs = Chaos(kill_every_s=5, what=["rank", "group"], seed=1)
    first = drawn(knobs, tmp_path / "a.jsonl", 60, monkeypatch)
    assert drawn(knobs, tmp_path / "b.jsonl", 60, monkeypatch) == first
    assert (
        drawn(knobs.model_copy(update={"seed": 2}), tmp_path / "c.jsonl", 60, monkeypatch) != first
    )
    assert len({seconds for seconds, _, _ in first}) > 50
    assert 3 < sum(seconds for seconds, _, _ in first) / 60 < 7, (
        "exponential with a mean of 5 s: the mean of 60 lies within three of its own deviations"
    )
    assert {rank for _, what, rank in first if what == "rank"} == {0, 1, 2}
    assert {rank for _, what, rank in first if what == "group"} == {None}


def test_without_the_knob_nothing_is_killed(made: Made, run: Supervised) -> None:
    recipe = made(chaos__what="[group]")
    assert run(recipe) == JobExit(0, 0)
    assert not events(recipe, "killed")


def kill_once_they_run(
    monkeypatch: pytest.MonkeyPatch, world: int = 1, *, further: bool = False
) -> None:
    """No kill before the first sign of life of every rank or, `further`, before a later step than at
    the last kill: on a busy machine that would be every start, and the supervisor would wait longer
    and longer.
    """
    kill_if_due, reached = ChaosKills.kill_if_due, [-1]

    def kill_after_progress(kills: ChaosKills, attempt: Any) -> None:
        beats = attempt.beats().values()
        step = max((beat.step for beat in beats), default=-1)
        if len(beats) == world and step > reached[0]:
            kill_if_due(kills, attempt)
            if kills.has_killed and further:
                reached[0] = step

    monkeypatch.setattr(ChaosKills, "kill_if_due", kill_after_progress)


@pytest.mark.drawn("kills by the supervisor")
def test_ranks_are_killed_and_training_ends_well(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_once_they_run(monkeypatch, 2, further=True)
    recipe = made(
        steps=60, step_s=0.03, chaos__kill_every_s=1.2, chaos__what="[rank, group]", chaos__seed=3
    )
    assert run(recipe, processes=2) == JobExit(0, 0)
    killed = events(recipe, "killed")
    assert killed
    assert len(events(recipe, "restart")) == len(killed)
    # On a busy machine a rank may be killed before it could say that it had started.
    seen = sum(event.get("step") is not None for event in killed)
    assert 2 * (1 + seen) <= len(starts(recipe)) <= 2 * (1 + len(killed))
    said = capfd.readouterr().err
    assert said.count("chaos: ") == len(killed)
    assert said.count("was ended by SIGKILL") == len(killed)
    assert said.count("starting again") == len(killed)


def test_what_chaos_did_is_no_reason_to_give_up_but_to_wait(
    made: Made, run: Supervised, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three kills before the first checkpoint, with a failure of its own among them; a second one
    of those is the end.
    """
    numbers = iter(range(1, 100))

    def arm(kills: ChaosKills) -> None:
        kills.has_killed, kills._random, kills._due = (
            False,
            random.Random(0),
            0.0 if next(numbers) in (1, 2, 4) else None,
        )

    monkeypatch.setattr(ChaosKills, "arm", arm)
    kill_once_they_run(monkeypatch)
    recipe = made(None, None, [0, 3, "exit", 6], None, [0, 3, "exit", 8], chaos__kill_every_s=1.0)
    assert run(recipe) == JobExit(8, 0)
    assert len(events(recipe, "killed")) == 3
    assert len(starts(recipe)) == 5
    told = re.findall(r"starting again .*\)(?: in (\d+) s)?\n", capfd.readouterr().err)
    assert told == ["", "1", "2", "4"]
    for wait, event in zip(told, events(recipe, "restart"), strict=True):
        assert int(wait or 0) <= event["seconds"] < 60


@pytest.mark.drawn("kills by the supervisor")
def test_a_supervisor_kills_itself_and_the_same_command_goes_on_with_the_next_kill(
    made: Made, tmp_path: Path
) -> None:
    """With this seed the first two kills come within two seconds of a start, sooner than any
    training ends, and the third after a minute.
    """
    recipe = made(
        steps=300,
        step_s=0.01,
        chaos__kill_every_s=20,
        chaos__what="[supervisor]",
        chaos__seed=12364,
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "r.yaml"), stand_in.__file__]
    codes = [
        subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        ).returncode
        for _ in range(3)
    ]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert [event["what"] for event in events(recipe, "killed")] == ["supervisor"] * 2


def test_kills_noted_earlier_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = Chaos(kill_every_s=5, seed=1)
    first = drawn(knobs, tmp_path / "a.jsonl", 3, monkeypatch)
    record_event(tmp_path / "b.jsonl", "killed")
    assert drawn(knobs, tmp_path / "b.jsonl", 2, monkeypatch) == first[1:]
