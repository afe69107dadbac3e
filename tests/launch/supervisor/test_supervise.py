"""The restarter with real processes that only stand in for a training: what is a failure, what is
done about it, and what is said and noted.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.heartbeat import heartbeat_file, read_beats
from ingot.base.runfolder import folder_lock
from ingot.base.runlog import read_lines
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places.local import JobExit
from ingot.launch.supervisor.attempt_watch import record_if_possible
from ingot.launch.supervisor.hang_detection import LONGEST_CHECK_S, StragglerDetector
from ingot.launch.supervisor.supervise import committed_steps, supervise
from tests.launch import stand_in
from tests.launch.blocking import wait_until
from tests.launch.conftest import Made, Supervised
from tests.markers import changed
from tests.patience import PATIENCE_S


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(recipe.folder.events) if event["kind"] == kind]


def starts(recipe: Recipe) -> list[dict[str, Any]]:
    return list(read_lines(recipe.folder.root / "starts"))


@pytest.mark.drawn("ranks that fail", keep=2)
def test_a_killed_rank_is_named_and_training_goes_on_from_the_checkpoint(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = made([1, 13, "kill", 9])
    assert run(recipe, processes=2) == JobExit(0, 0)
    assert (
        capfd.readouterr().err
        == "rank 1 was ended by SIGKILL at step 13; starting again from checkpoint 10 (restart 1 of"
        " 100)\n"
    )
    assert [event["step"] for event in events(recipe, "start")] == [0, 10]
    (restart,) = events(recipe, "restart")
    assert restart["attempt"] == 2
    assert restart["cause"] == "rank 1 was ended by SIGKILL at step 13"
    assert 0 <= restart["seconds"] < 60
    kept = recipe.folder.checkpoints / "step-00000040-best"
    shutil.copytree(recipe.folder.checkpoints / "step-00000030", kept)
    changed(kept, "COMMIT.json", step=40)
    assert sorted(committed_steps(recipe.folder.checkpoints)) == [10, 20, 30]


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("code", "starts_expected"), [(1, 2), (5, 2), (143, 2), (0, 1), (2, 1), (3, 1), (75, 1)]
)
def test_which_exit_codes_are_failures(
    code: int, starts_expected: int, made: Made, run: Supervised
) -> None:
    """143 is a failure here, for nobody asked us to stop. 75 without a checkpoint would promise
    that the same command goes on from one.
    """
    recipe = made([0, 3, "exit", code])
    assert run(recipe) == JobExit(0 if starts_expected == 2 else 143 if code == 75 else code, 0)
    assert len(starts(recipe)) == starts_expected
    assert len(events(recipe, "restart")) == starts_expected - 1


def test_two_failures_without_progress_are_the_end(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = made([0, 13, "exit", 7], [0, 17, "kill", 11])
    assert run(recipe) == JobExit(128 + signal.SIGSEGV, 0)
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "rank 0 failed (exit 7) at step 13; starting again from checkpoint 10 (restart 1 of 100)",
        (
            "rank 0 was ended by SIGSEGV at step 17; given up: two failures in a row without a"
            " newer checkpoint between them"
        ),
    ]
    (given_up,) = events(recipe, "give_up")
    assert (
        given_up["cause"]
        == "two failures in a row without a newer checkpoint between them; the last failure: rank 0"
        " was ended by SIGSEGV at step 17"
    )


@pytest.mark.drawn("ranks that fail", keep=2)
def test_failures_with_progress_between_them_go_on_until_the_cap(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    deaths = [[0, step, "exit", step] for step in (13, 23, 33, 43)]
    recipe = made(*deaths, steps=50)
    assert run(recipe) == JobExit(0, 0)
    assert len(events(recipe, "restart")) == 4
    assert not re.search(r" in \d+ s$", capfd.readouterr().err, re.MULTILINE), "each at once"
    capped = made(*deaths, steps=50, name="capped", launch__restarts=2)
    assert run(capped) == JobExit(33, 0)
    assert capfd.readouterr().err.endswith(
        "rank 0 failed (exit 33) at step 33; given up: launch.restarts=2 allows no more\n"
    )
    assert len(starts(capped)) == 3


def test_an_earlier_trainings_checkpoint_is_no_progress_and_a_lower_one_may_be(
    made: Made, run: Supervised
) -> None:
    """What counts is a marker that was not there before: after another recipe's training was set
    aside, steps are fewer.
    """
    recipe = made([0, 53, "exit", 1], [0, 55, "exit", 1], steps=60)
    stand_in.write_marker(
        stand_in.make(recipe.folder.checkpoints / "step-00000050"), "COMMIT.json", {"step": 50}, []
    )
    assert run(recipe) == JobExit(1, 0)
    assert len(starts(recipe)) == 2


@pytest.mark.drawn("ranks that fail", keep=2)
def test_a_rank_that_hangs_is_named_with_its_stacks_and_started_again(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = made([1, 13, "hang", None], launch__hang_s=3.0)
    assert run(recipe, processes=2) == JobExit(0, 0)
    stacks = recipe.folder.logs / "stacks-rank1.txt"
    assert re.fullmatch(
        rf"rank 1 hangs in step 14: no heartbeat for [34]s, 3s are allowed; stacks: {stacks};"
        r" starting again from checkpoint 10 \(restart 1 of 100\)\n",
        capfd.readouterr().err,
    )
    (hang,) = events(recipe, "hang")
    assert (hang["rank"], hang["ranks"], hang["count"]) == (1, [1], 1)
    assert (hang["step"], hang["stacks"]) == (13, [str(stacks)])
    assert 3 < hang["seconds"] <= 3 + LONGEST_CHECK_S
    assert "hang_here" in stacks.read_text()
    assert "wait_for_others" in (recipe.folder.logs / "stacks-rank0.txt").read_text(), (
        "the others are asked too"
    )


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_a_rank_that_does_not_answer_is_named_all_the_same(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = made([0, 13, "freeze", None], launch__hang_s=3.0)
    assert run(recipe) == JobExit(0, 0)
    assert (
        "it does not answer when asked for its stacks; starting again from checkpoint 10"
        in capfd.readouterr().err
    )
    assert events(recipe, "hang")[0]["stacks"] == []


@pytest.mark.drawn("ranks that fail", keep=2)
def test_a_rank_without_any_sign_of_life_is_found_by_the_starts_bound(
    made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = made([1, 0, "never", None], launch__start_s=8)
    assert run(recipe, processes=2) == JobExit(0, 0)
    assert re.match(
        r"rank 1 hangs in phase `loading`: no heartbeat for [89]s, 8s are allowed; it does not"
        " answer",
        capfd.readouterr().err,
    )


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_two_hangs_without_progress_fail(made: Made, run: Supervised) -> None:
    recipe = made([0, 3, "hang", None], [0, 3, "hang", None], launch__hang_s=0.5)
    assert run(recipe) == JobExit(1, 0)


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_signs_of_life_of_others_are_not_ours(made: Made, run: Supervised) -> None:
    """A file from an attempt before, whose slots would look like a hang for ever."""
    recipe = made(steps=60, step_s=0.1, launch__hang_s=3.0)
    heart = stand_in.HeartbeatWriter(recipe.folder.heartbeats, rank=3, local_rank=3, attempt=1)
    heart.beat("step", step=0)
    assert run(recipe, processes=2) == JobExit(0, 0)
    assert len(starts(recipe)) == 2


def signal_once(condition: Callable[[], bool], signum: int) -> None:
    """Send this process a signal when the condition holds."""
    threading.Thread(target=lambda: (wait_until(condition), os.kill(os.getpid(), signum))).start()


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("signum", "reaches"), [(signal.SIGTERM, True), (signal.SIGHUP, True), (signal.SIGUSR1, False)]
)
def test_a_signal_is_handed_on_and_is_no_failure(
    signum: int, reaches: bool, made: Made, run: Supervised, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stand-in answers SIGTERM with a checkpoint; of SIGUSR1 it dies as any process does, which
    was asked for, too: what it saved before stands.
    """
    recipe = made(steps=100_000, every=5)
    signal_once(lambda: bool(committed_steps(recipe.folder.checkpoints)), signum)
    assert run(recipe, processes=2) == JobExit(75, signum)
    assert (
        "stopped; the same command goes on from checkpoint" in capfd.readouterr().err
    ) is not reaches
    assert not events(recipe, "restart")


@pytest.mark.parametrize("saved", [True, False])
def test_a_signal_between_two_attempts_is_the_end(
    saved: bool, made: Made, run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = threading.Event()
    monkeypatch.setattr(
        "ingot.launch.supervisor.supervise._Supervisor._backoff_s",
        lambda self: between.set() or 60.0,
    )
    recipe = made([0, 13 if saved else 3, "exit", 1])
    signal_once(between.is_set, signal.SIGTERM)
    assert run(recipe) == JobExit(75 if saved else 128 + signal.SIGTERM, signal.SIGTERM)
    assert len(starts(recipe)) == 1


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_ranks_that_do_not_stop_are_ended_after_their_grace(
    made: Made, run: Supervised, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ingot.launch.supervisor.attempt_watch.STOP_MARGIN_S", 0.5)
    recipe = made([0, 13, "hang", None], checkpoint__grace_s=1)
    beats = heartbeat_file(recipe.folder.heartbeats)
    signal_once(lambda: any(beat.step == 13 for beat in read_beats(beats)), signal.SIGTERM)
    assert run(recipe) == JobExit(75, signal.SIGTERM)
    assert (
        capfd.readouterr().err
        == "the ranks did not stop in time and were ended\nstopped; the same command goes on from"
        " checkpoint 10\n"
    )


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_a_fresh_start_is_fresh_once(made: Made, run: Supervised) -> None:
    """Nothing older lies there, so that what the second attempt finds is the first one's."""
    recipe = made([0, 13, "exit", 1])
    assert run(recipe, "--fresh") == JobExit(0, 0)
    assert [start["argv"] for start in starts(recipe)] == [
        ["train", "r.yaml", "--fresh"],
        ["train", "r.yaml"],
    ]


def test_a_fresh_start_is_fresh_until_it_has_a_checkpoint(made: Made, run: Supervised) -> None:
    """Without one, the next start would bring back a training of this recipe that was set aside."""
    recipe = made([0, 3, "exit", 1])
    assert run(recipe, "--fresh") == JobExit(0, 0)
    assert [start["argv"][-1] for start in starts(recipe)] == ["--fresh", "--fresh"]


def test_a_fresh_start_that_died_too_early_is_fresh_again(made: Made, run: Supervised) -> None:
    """The older checkpoints lie there still: going on from them is what `--fresh` was to
    prevent.
    """
    recipe = made([0, 20, "exit", 1])
    stand_in.write_marker(
        stand_in.make(recipe.folder.checkpoints / "step-00000020"), "COMMIT.json", {"step": 20}, []
    )
    assert run(recipe, "--fresh") == JobExit(0, 0)
    assert [start["argv"][-1] for start in starts(recipe)] == ["--fresh", "--fresh"]


@pytest.mark.drawn("ranks that stop or hang", keep=2)
def test_a_straggler_is_told_and_left_alone(
    made: Made, run: Supervised, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "ingot.launch.supervisor.attempt_watch.StragglerDetector",
        functools.partial(StragglerDetector, steps=10, checks=15, apart=5),
    )
    recipe = made([1, 0, "slow", 4], steps=40, step_s=0.05)
    assert run(recipe, processes=2) == JobExit(0, 0)
    told = events(recipe, "straggler")
    assert {event["rank"] for event in told} == {1}
    assert 0.05 < told[0]["seconds"] < 0.5
    assert "main" in Path(told[0]["stacks"]).read_text()
    assert capfd.readouterr().err.startswith(
        "rank 1 holds the others up: they wait for it about 0."
    )
    assert not events(recipe, "restart")


@pytest.mark.drawn("ranks that fail", keep=2)
def test_ranks_on_a_busy_machine_are_no_stragglers(
    made: Made, run: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ingot.launch.supervisor.attempt_watch.StragglerDetector",
        functools.partial(StragglerDetector, steps=75, checks=75),
    )
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        recipe = made(steps=160, step_s=0.05)
        assert run(recipe, processes=2) == JobExit(0, 0)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert not events(recipe, "straggler")


SCRIPT = """
import sys
from pathlib import Path
import ingot.launch.node.ranks
from ingot.config.load import load_recipe
from ingot.launch.job import Job
from ingot.launch.supervisor.supervise import supervise
recipe = load_recipe([sys.argv[1]])
ingot.launch.node.ranks.rank_command = lambda job: [sys.executable, sys.argv[2], str(recipe.folder.root), *job.argv]
ended = supervise(Job("train", ("train", "r.yaml"), 2), recipe)
print(ended.code, ended.signum)
"""


@pytest.mark.drawn("ranks that fail", keep=2)
def test_a_killed_supervisor_takes_its_ranks_along_and_the_same_command_goes_on(
    made: Made, tmp_path: Path
) -> None:
    from ingot.config.load import dump_recipe

    recipe = made(steps=100_000)
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "r.yaml"), stand_in.__file__]
    first = subprocess.Popen(command)
    wait_until(lambda: bool(committed_steps(recipe.folder.checkpoints)))
    ranks = [start["pid"] for start in starts(recipe)]
    assert len(ranks) == 2
    first.kill()
    first.wait()
    wait_until(
        lambda: (
            not any(
                psutil.pid_exists(rank) and psutil.Process(rank).status() != psutil.STATUS_ZOMBIE
                for rank in ranks
            )
        )
    )
    reached = max(committed_steps(recipe.folder.checkpoints))
    plan = json.loads((recipe.folder.root / "plan.json").read_text())
    (recipe.folder.root / "plan.json").write_text(json.dumps({**plan, "steps": reached + 10}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout == "0 0\n"
    assert events(recipe, "start")[-1]["step"] == reached


def test_a_run_folder_in_use_is_refused(made: Made, run: Supervised) -> None:
    recipe = made()
    with (
        folder_lock(recipe.folder.root),
        pytest.raises(Failed, match=rf"in use by process {os.getpid()}"),
    ):
        run(recipe)
    with pytest.raises(WrongInput, match="2 nodes"):
        supervise(Job("train", (), nodes=2), recipe)


def test_what_cannot_be_noted_stops_nothing(tmp_path: Path) -> None:
    record_if_possible(tmp_path, "restart", cause="a folder, where lines cannot be appended")
