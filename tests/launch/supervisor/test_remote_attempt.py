"""An attempt whose ranks run elsewhere, at a place that does what a test says: how the end is told,
whose beats count, what is tried again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ingot.base.errors import EXIT_FAILED, EXIT_STOPPED, Failed, IngotError, WrongInput
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.runlog import read_lines
from ingot.cloud.instances import NoCapacity
from ingot.launch.attempt import AttemptExit, StopRequests
from ingot.launch.job import Handle, Job, JobLog, JobState
from ingot.launch.places import slurm_cluster
from ingot.launch.places.local import JobExit
from ingot.launch.places.logs import FileLog
from ingot.launch.rendezvous import EXIT, SIGNAL, Rendezvous
from ingot.launch.supervisor import supervise as supervising
from ingot.launch.supervisor.attempt_watch import STOP_MARGIN_S, AttemptWatch, ChaosKills
from ingot.launch.supervisor.budget import SpendingMeter
from ingot.launch.supervisor.remote_attempt import RemoteAttempt, RemoteHeartbeats
from ingot.launch.supervisor.supervise import MOST_PREEMPTIONS, supervise
from tests.launch.blocking import wait_until
from tests.small import small_recipe


class Place:
    """A launcher (`ingot.launch.job.Launcher`) without machines: `state` is what it answers, or
    what it raises.
    """

    poll_s = 0.01

    def __init__(self, folder: Path) -> None:
        self.log_file, self.state, self.did = folder / "log", "queued", list[str]()
        self.refuses = 0
        self.refusal: type[IngotError] = Failed

    def can(self, job: Job) -> list[str]:
        return []

    def render(self, job: Job) -> str:
        return ""

    def submit(self, job: Job) -> Handle:
        if self.refuses:
            self.refuses -= 1
            raise self.refusal("the place is not there")
        self.did.append("submit")
        return Handle(job.name, "place", str(len(self.did)), job.argv, 1.0, str(self.log_file))

    def status(self, handle: Handle) -> JobState:
        if self.state == "error":
            raise Failed("no answer")
        return self.state  # type: ignore[return-value]

    def log(self, handle: Handle) -> JobLog:
        return FileLog(lambda: [self.log_file])

    def signal(self, handle: Handle, number: int) -> None:
        self.did.append(f"signal {number}")

    def cancel(self, handle: Handle) -> None:
        if self.refuses:
            self.refuses -= 1
            raise Failed("the place is not there")
        self.did.append("cancel")
        self.state = "cancelled"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def begin(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RemoteAttempt, Rendezvous]]:
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.NOTES_TIMEOUT_S", 0.2)
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.RETRY_S", 0.01)

    def make(
        *, name: str = "train", processes: int = 2, mirror: str | None = None, **knobs: Any
    ) -> tuple[RemoteAttempt, Rendezvous]:
        meet = tmp_path / "meet"
        meet.mkdir(exist_ok=True)
        place.state = "queued"
        return RemoteAttempt(
            place,
            Job(name, (name,), processes, 2, rendezvous=str(meet), run_folder_url=mirror),
            tmp_path,
            **knobs,
        ), Rendezvous(str(meet))

    return make


Begin = Callable[..., tuple[RemoteAttempt, Rendezvous]]
Note = dict[str, Any]


@pytest.mark.parametrize(
    ("state", "notes", "end", "taken"),
    [
        # All went well, or was stopped in good order by whom nobody asked.
        ("succeeded", [{"code": 0}, {"code": 0}], AttemptExit(0, 0), False),
        (
            "failed",
            [{"code": 75}, {"code": 75}],
            AttemptExit(0, 75, "place told the job to stop"),
            True,
        ),
        # The one that failed by itself decides; a killed one before those that noticed.
        ("failed", [{"code": 1, "because": "1"}, {"code": 7, "rank": 3}], AttemptExit(3, 7), False),
        ("failed", [{"code": 1}, {"code": -9, "rank": 2}], AttemptExit(2, -9), False),
        ("failed", [{"code": 2}, {"code": 2, "rank": 2}], AttemptExit(0, 2), False),
        (
            "failed",
            [{"code": 1, "how": "port 5 of node 0 is taken"}],
            AttemptExit(0, 1, "port 5 of node 0 is taken"),
            False,
        ),
        (
            "failed",
            [{"code": 1, "because": "1"}, None],
            AttemptExit(2, 1, "node 1 was lost"),
            False,
        ),
        ("failed", [], AttemptExit(0, 1, "place says that the job failed"), False),
        ("succeeded", [{"code": 0}, None], AttemptExit(2, 1, "node 1 was lost"), False),
        # What the place took away is started again, whatever those said who were left alone.
        (
            "preempted",
            [{"code": 1}, None],
            AttemptExit(0, EXIT_STOPPED, "place took the job's machines away"),
            True,
        ),
        ("cancelled", [{"code": 143}, {"code": 143}], AttemptExit(0, EXIT_STOPPED), False),
    ],
)
def test_how_it_ended(
    state: str, notes: list[Note | None], end: AttemptExit, taken: bool, place: Place, begin: Begin
) -> None:
    attempt, meeting = begin()
    assert attempt.poll() is None
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and attempt.running() == range(4))
    for node, note in enumerate(notes):
        if note is not None:
            meeting.leave(node, EXIT, **{"rank": 0, **note})
            time.sleep(0.01)
    place.state = state
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == end
    assert attempt.preempted() is taken


def test_asked_by_its_place_before_there_was_anything_to_save_it_is_started_again(
    place: Place, begin: Begin, tmp_path: Path
) -> None:
    attempt, meeting = begin()
    (tmp_path / "meet" / f"{SIGNAL}-1.json").write_text(
        '{"number": 10, "ranks": null, "by": "slurm"}\n'
    )
    for node in range(2):
        meeting.leave(node, EXIT, rank=2 * node, code=138)
    place.state = "failed"
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.preempted()


def test_what_we_asked_for_is_not_taken(place: Place, begin: Begin) -> None:
    attempt, meeting = begin()
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and bool(attempt.running()))
    attempt.send(signal.SIGUSR2, [3])
    assert [(asked["number"], asked["ranks"]) for asked in meeting.signals(set())] == [
        (signal.SIGUSR2, [3])
    ]
    attempt.send(signal.SIGTERM)
    assert place.did == ["submit", f"signal {signal.SIGTERM}"]
    for node in range(2):
        meeting.leave(node, EXIT, rank=2 * node, code=75)
    place.state = "failed"
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == AttemptExit(0, 75)
    assert not attempt.preempted()


def test_being_asked_for_stacks_is_no_request_to_stop(place: Place, begin: Begin) -> None:
    attempt, _ = begin()
    attempt.send(signal.SIGUSR2, [0])
    place.state = "preempted"
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.preempted()


def test_only_beats_of_this_attempt_count_though_an_earlier_one_had_the_same_number(
    place: Place, begin: Begin, tmp_path: Path
) -> None:
    """Attempts that die while they load have no number of their own."""
    old = HeartbeatWriter(tmp_path / "heartbeats", rank=1, local_rank=0, attempt=1)
    old.beat("loading")
    attempt, _ = begin()
    assert attempt.beats() == {}
    new = HeartbeatWriter(tmp_path / "heartbeats", rank=0, local_rank=1, attempt=1)
    new.beat("loading")
    assert list(attempt.beats()) == [0]
    old.beat("step", step=3)
    assert {rank: beat.step for rank, beat in attempt.beats().items()} == {0: 0, 1: 3}


def test_a_place_without_an_answer_ends_nothing_and_is_told_of_once(
    place: Place, begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt, meeting = begin()
    place.state = "error"
    for _ in range(5):
        assert attempt.poll() is None
        time.sleep(0.02)
    assert capfd.readouterr().err.count("warning: no answer\n") == 1
    for node in range(2):
        meeting.leave(node, EXIT, rank=0, code=0)
    place.log_file.write_text("the last word\n")
    place.state = "succeeded"
    wait_until(lambda: attempt.poll() is not None)
    assert "the last word\n" in capfd.readouterr().err


def test_a_place_that_takes_no_job_is_an_error_at_first_and_asked_again_later(
    place: Place, begin: Begin
) -> None:
    place.refuses = 1
    with pytest.raises(Failed, match="the place is not there"):
        begin()
    place.refuses = 3
    attempt, _ = begin(patience_s=60.0)
    assert (attempt.handle, attempt.running()) == (None, ())
    wait_until(lambda: attempt.poll() is None and attempt.handle is not None)
    place.refuses = 100
    attempt, _ = begin(patience_s=0.1)
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == AttemptExit(0, EXIT_FAILED, "the place is not there")


@pytest.mark.parametrize(
    ("refusal", "nodes", "counted"),
    [
        (NoCapacity, 1, 0.0),  # nothing was there
        (NoCapacity, 2, 600.0),  # one of them may have been
        (Failed, 1, 600.0),  # the answer may have been lost
    ],
)
def test_the_search_for_a_machine_that_nobody_has_is_not_paid_for(
    refusal: type[IngotError],
    nodes: int,
    counted: float,
    tmp_path: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1_000_000.0]
    monkeypatch.setattr("ingot.launch.supervisor.budget.time.time", lambda: now[0])

    def submit(job: Job) -> Handle:
        now[0] += 600.0
        raise refusal("no room")

    monkeypatch.setattr(place, "submit", submit)
    meter = SpendingMeter(tmp_path, "train", 6.0)
    job = Job("train", ("train",), nodes=nodes, time_limit_s=3600.0)
    with pytest.raises(refusal):
        RemoteAttempt(place, job, tmp_path, meter=meter)
    assert meter.used() == (counted, counted / 600)


def test_what_was_right_at_the_first_start_is_not_wrong_input_later(
    place: Place, begin: Begin
) -> None:
    """A controller that is away, a disk that is not mounted yet after a reboot."""
    place.refuses, place.refusal = 2, WrongInput
    with pytest.raises(WrongInput):
        begin()
    attempt, _ = begin(patience_s=60.0)
    wait_until(lambda: attempt.poll() is None and attempt.handle is not None)
    assert place.did == ["submit"]


def test_what_is_to_be_ready_is_made_ready_once_and_as_patiently(
    place: Place, begin: Begin
) -> None:
    made: list[str] = []

    def ready(job: Job) -> Job:
        made.append("try")
        if len(made) < 3:
            raise Failed("the bucket is not there")
        return replace(job, argv=("evaluate",))

    place.refuses = 2
    attempt, _ = begin(patience_s=60.0, prepare=ready)
    wait_until(lambda: attempt.poll() is None and attempt.handle is not None)
    assert attempt.handle is not None
    assert (made, attempt.handle.argv) == (["try"] * 3, ("evaluate",))


def test_a_request_to_stop_is_handed_on_when_the_place_answers_again(
    place: Place, begin: Begin
) -> None:
    attempt, _ = begin()
    place.state = "error"
    attempt.send(signal.SIGTERM)
    attempt.send(signal.SIGUSR2)
    assert attempt.poll() is None
    assert place.did == ["submit"]
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and len(place.did) > 1)
    assert place.did == ["submit", f"signal {signal.SIGTERM}", f"signal {signal.SIGUSR2}"]


def test_a_place_is_asked_to_cancel_until_it_answers(
    place: Place, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, _ = begin()
    place.refuses = 2
    attempt.stop()
    attempt.stop()
    assert place.did == ["submit", "cancel"]
    attempt, _ = begin()
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.CANCEL_TIMEOUT_S", 0.05)
    place.refuses = 1000
    with pytest.raises(Failed, match=r"place 3 may still run: `ingot launch cancel .*` ends it"):
        attempt.stop()


def test_signs_of_life_that_cannot_be_had_are_no_silence_of_the_ranks(
    place: Place, begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, _ = begin()
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and attempt.running() == range(4))

    def away(folder: Path) -> None:
        raise OSError(116, "Stale file handle")

    HeartbeatWriter(tmp_path / "heartbeats", rank=0, local_rank=0, attempt=1).beat("step", step=3)
    with monkeypatch.context() as gone:
        gone.setattr("ingot.launch.supervisor.remote_attempt.read_beats", away)
        assert (attempt.beats(), attempt.running()) == ({}, ())
        assert attempt.poll() is None
    assert (list(attempt.beats()), attempt.running()) == ([0], range(4))


def test_results_are_fetched_until_the_bucket_answers(
    place: Place, begin: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    def bring_back(mirror: str, root: Path) -> None:
        tries.append(mirror)
        if len(tries) < 3 or mirror.endswith("never"):
            raise Failed("no answer")

    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.pull_results", bring_back)
    monkeypatch.setattr(
        "ingot.launch.supervisor.remote_attempt.RemoteHeartbeats",
        lambda root, mirror: RemoteHeartbeats(root, ""),
    )
    attempt, meeting = begin(mirror="gs://bucket/run")
    meeting.send(signal.SIGTERM)
    for node in range(2):
        meeting.leave(node, EXIT, rank=2 * node, code=75)
    place.state = "cancelled"
    wait_until(lambda: attempt.poll() is not None)
    assert (attempt.poll(), len(tries)) == (AttemptExit(0, 75), 3)
    assert capfd.readouterr().err.count("somebody cancelled it") == 1
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.RESULTS_TIMEOUT_S", 0.05)
    attempt, _ = begin(mirror="gs://bucket/never")
    place.state = "succeeded"
    wait_until(lambda: attempt.poll() is not None)
    assert (
        "what the job has made lies in gs://bucket/never, and the same command fetches it"
        in capfd.readouterr().err
    )


def test_what_somebody_cancelled_goes_on_only_where_there_is_a_checkpoint(
    tmp_path: Path, place: Place, begin: Begin
) -> None:
    def ended(name: str, checkpoints: dict[int, tuple[int, int]]) -> JobExit:
        attempt, _ = begin(name=name)
        place.state = "cancelled"
        return supervise(
            Job("train", ("train",), 2, 2),
            small_recipe(tmp_path),
            start=lambda job, stops: attempt,
            checkpoints=lambda: checkpoints,
        )

    assert ended("train", {4: (1, 1)}) == JobExit(75, 0)
    assert ended("train", {}) == JobExit(143, 0)
    attempt, _ = begin(name="evaluate")
    place.state = "cancelled"
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == AttemptExit(0, 143)


@pytest.mark.parametrize(
    ("state", "codes"),
    [
        ("failed", (75, 75)),  # Vertex AI
        ("succeeded", (75, 75)),  # machines of our own
        ("preempted", (75, 75)),  # its time was up as well
        ("failed", (143, 143)),  # before there was anything to save
        ("failed", (1, 75)),  # it failed to save
        ("failed", (75,)),  # a machine was gone before it told
    ],
)
def test_what_somebody_asked_to_stop_elsewhere_is_not_started_again(
    state: str,
    codes: tuple[int, ...],
    tmp_path: Path,
    place: Place,
    begin: Begin,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A second computer that follows the job, or `ingot launch cancel` on one."""
    attempt, meeting = begin()
    meeting.send(signal.SIGTERM)
    for node, code in enumerate(codes):
        meeting.leave(node, EXIT, rank=2 * node, code=code)
    place.state = state
    assert supervise(
        Job("train", ("train",), 2, 2),
        small_recipe(tmp_path),
        start=lambda job, stops: attempt,
        checkpoints=lambda: {4: (1, 1)},
    ) == JobExit(75, 0)
    assert place.did == ["submit"]
    assert "train: somebody cancelled it; the same command goes on" in capfd.readouterr().err


def test_what_was_done_before_it_heard_of_a_stop_is_done(place: Place, begin: Begin) -> None:
    attempt, meeting = begin()
    meeting.send(signal.SIGTERM)
    for node in range(2):
        meeting.leave(node, EXIT, rank=2 * node, code=0)
    place.state = "succeeded"
    wait_until(lambda: attempt.poll() is not None)
    assert attempt.poll() == AttemptExit(0, 0)


@pytest.mark.parametrize(("checkpoints", "code"), [({4: (1, 1)}, 75), ({}, 130)])
def test_stopped_in_the_queue_it_goes_on_where_earlier_starts_were(
    checkpoints: dict[int, tuple[int, int]], code: int, tmp_path: Path, place: Place, begin: Begin
) -> None:
    attempt, _ = begin()

    def start(job: Job, stops: StopRequests) -> RemoteAttempt:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return attempt

    assert supervise(
        Job("train", ("train",), 2, 2),
        small_recipe(tmp_path),
        start=start,
        checkpoints=lambda: checkpoints,
    ) == JobExit(code, signal.SIGINT)
    assert place.did == ["submit", "cancel"]


def test_a_job_in_the_queue_is_no_hang(tmp_path: Path, place: Place, begin: Begin) -> None:
    recipe = small_recipe(tmp_path, launch__start_s=1)
    attempt, meeting = begin()

    def later() -> None:
        time.sleep(3)
        for node in range(2):
            meeting.leave(node, EXIT, rank=2 * node, code=0)
        place.state = "succeeded"

    threading.Thread(target=later).start()
    assert supervise(
        Job("train", ("train",), 2, 2), recipe, start=lambda job, stops: attempt
    ) == JobExit(0, 0)
    assert place.did == ["submit"]


@pytest.mark.parametrize(("progress", "starts_expected"), [(True, 4), (False, 1)])
def test_a_time_limit_is_none_of_the_restarts_allowed_where_there_was_progress(
    progress: bool,
    starts_expected: int,
    tmp_path: Path,
    place: Place,
    begin: Begin,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A training of a month on a cluster of four-hour jobs has not failed 180 times."""
    starts = list[RemoteAttempt]()

    def start(job: Job, stops: StopRequests) -> RemoteAttempt:
        attempt, meeting = begin()
        starts.append(attempt)
        place.state = "preempted" if len(starts) < 4 else "succeeded"
        for node in range(2):
            meeting.leave(node, EXIT, rank=2 * node, code=75 if len(starts) < 4 else 0)
        return attempt

    end = supervise(
        Job("train", ("train",), 2, 2),
        small_recipe(tmp_path, launch__restarts=0),
        start=start,
        checkpoints=lambda: {len(starts) * progress: (1, 1)},
    )
    told = capfd.readouterr().err
    assert (end, len(starts)) == (JobExit(0 if progress else 75, 0), starts_expected)
    assert ("place told the job to stop; starting again from checkpoint 3\n" in told) is progress
    assert ("given up: launch.restarts=0 allows no more" in told) is not progress


@pytest.mark.parametrize("saved", [0, 1])
def test_as_many_preemptions_in_vain_are_borne_after_a_checkpoint_as_without(
    saved: int,
    tmp_path: Path,
    place: Place,
    begin: Begin,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The start that made the checkpoint is none of those in vain."""
    monkeypatch.setattr(supervising, "LONGEST_WAIT_S", 0.0)
    starts = list[RemoteAttempt]()

    def start(job: Job, stops: StopRequests) -> RemoteAttempt:
        attempt, meeting = begin()
        starts.append(attempt)
        place.state = "preempted"
        for node in range(2):
            meeting.leave(node, EXIT, rank=2 * node, code=75)
        return attempt

    supervise(
        Job("train", ("train",), 2, 2),
        small_recipe(tmp_path),
        start=start,
        checkpoints=lambda: {10: (1, 1)} if saved and starts else {},
    )
    assert len(starts) == saved + MOST_PREEMPTIONS + 1
    assert f"no newer checkpoint in {MOST_PREEMPTIONS + 1} starts" in capfd.readouterr().err


def test_a_hang_that_passes_when_its_place_asks_the_ranks_to_stop_is_a_hang_all_the_same(
    tmp_path: Path, place: Place, begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm and the clouds ask before they kill; a disk that was frozen is back by then, and the
    ranks save.
    """
    recipe = small_recipe(tmp_path, launch__hang_s=0.1)
    starts = list[RemoteAttempt]()

    def start(job: Job, stops: StopRequests) -> RemoteAttempt:
        attempt, meeting = begin()
        attempt.stacks_s = 0.0
        starts.append(attempt)
        if len(starts) == 1:
            place.state = "running"
            for rank in range(4):
                HeartbeatWriter(
                    tmp_path / "heartbeats", rank=rank, local_rank=rank, attempt=1
                ).beat("step", step=3)
        else:
            place.state = "succeeded"
        code = EXIT_STOPPED if len(starts) == 1 else 0
        for node in range(2):
            meeting.leave(node, EXIT, rank=2 * node, code=code)
        return attempt

    assert supervise(
        Job("train", ("train",), 2, 2), recipe, start=start, checkpoints=lambda: {4: (1, 1)}
    ) == JobExit(0, 0)
    assert place.did == ["submit", "cancel", "submit"]
    told = capfd.readouterr().err
    assert "hang in step 4: no heartbeat for" in told
    assert "starting again from checkpoint 4 (restart 1 of 100)" in told


def test_a_hang_that_passes_while_it_is_being_ended_is_told_once_and_stays(
    tmp_path: Path, place: Place, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look after the cancel gets no answer, and by the next one the ranks have saved."""
    monkeypatch.setattr("ingot.launch.supervisor.attempt_watch.CHECK_INTERVAL_S", 0.0)
    recipe = small_recipe(tmp_path, launch__hang_s=0.1)
    attempt, meeting = begin(processes=10)
    attempt.stacks_s = 0.0
    hearts = [
        HeartbeatWriter(tmp_path / "heartbeats", rank=rank, local_rank=rank, attempt=1)
        for rank in range(20)
    ]
    for heart in hearts:
        heart.beat("step", step=3)
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and attempt.running() == range(20))
    kills = ChaosKills(recipe.chaos, recipe.folder.events)
    watch = AttemptWatch(recipe, attempt, StopRequests(), kills, through_bucket=False)
    wait_until(watch.check)
    found = watch.hang
    for heart in hearts:
        heart.beat("saving")
    assert watch.check()
    assert watch.hang is found is not None
    (event,) = read_lines(recipe.folder.events)
    assert (event["ranks"], event["count"]) == ([0, 1, 2, 3, 4, 5, 6, 7], 20)
    (asked,) = meeting.signals(set())
    assert (asked["number"], asked["ranks"]) == (signal.SIGUSR2, list(range(20))), (
        "one note for all"
    )


def test_a_suspended_job_neither_hangs_nor_is_it_cancelled_when_it_is_asked_to_stop(
    place: Place, begin: Begin
) -> None:
    """Slurm lets another job go first; when this one goes on, its ranks can still save."""
    attempt, _ = begin()
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and attempt.running() == range(4))
    place.state = slurm_cluster.STATES["SUSPENDED"]
    wait_until(lambda: attempt.poll() is None and attempt.running() == ())
    attempt.send(signal.SIGTERM)
    assert place.did == ["submit", f"signal {signal.SIGTERM}"]
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and attempt.running() == range(4))


def test_the_time_to_stop_in_does_not_pass_while_a_job_is_suspended(
    tmp_path: Path,
    place: Place,
    begin: Begin,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe, now = small_recipe(tmp_path, checkpoint__grace_s=60), [1_000_000.0]
    monkeypatch.setattr(
        "ingot.launch.supervisor.attempt_watch.time", mock.Mock(monotonic=lambda: now[0])
    )
    attempt, _ = begin()
    stops = StopRequests()
    kills = ChaosKills(recipe.chaos, recipe.folder.events)
    watch = AttemptWatch(recipe, attempt, stops, kills, through_bucket=False)
    place.state = slurm_cluster.STATES["SUSPENDED"]
    wait_until(lambda: attempt.poll() is None and attempt.suspended())
    stops.first = signal.SIGINT
    for _ in range(5):
        now[0] += 3600
        assert not watch.check()
    assert capfd.readouterr().err.count("the job is suspended: it saves and stops when") == 1
    place.state = "running"
    wait_until(lambda: attempt.poll() is None and not attempt.suspended())
    now[0] += 60
    assert not watch.check()
    now[0] += 60 + STOP_MARGIN_S
    assert watch.check()
    assert watch.stop_timed_out


def test_a_log_is_read_from_where_the_last_look_ended(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("of an earlier start\nnew\n")
    log = FileLog(lambda: [first, second], {first: len("of an earlier start\n")})
    assert log.read() == b"new\n"
    second.write_text("later\n")
    assert (log.read(), log.read()) == (b"later\n", b"")
