"""The jobs of a run as a person asks for them: how one that runs elsewhere is cancelled, and one
that cannot be asked.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cli.launch import cancel
from ingot.launch.handles import find_handle, jobs_folder, store_handle, stored_handles
from ingot.launch.job import Handle, JobState
from ingot.launch.job_control import RemoteJob, UnreadableJob, submitted_jobs
from ingot.launch.supervisor.budget import SpendingMeter
from tests.small import small_recipe

HANDLE = Handle("train", "slurm", "7", ("train",), 1.0, "")


class Place:
    """Stands in for a launcher: its job saves and ends when it is asked, unless it is `deaf`."""

    poll_s = 0.01

    def __init__(
        self, state: JobState = "running", *, deaf: bool = False, fails_at: int = 0
    ) -> None:
        self.now, self.deaf, self.did = state, deaf, list[str]()
        self.asked, self.fails_at = 0, fails_at

    def status(self, handle: Handle) -> JobState:
        self.asked += 1
        if self.asked == self.fails_at:
            raise Failed("500 Internal error encountered")
        return self.now

    def signal(self, handle: Handle, number: int) -> None:
        self.did.append(signal.Signals(number).name)
        if not self.deaf:
            self.now = "cancelled"

    def cancel(self, handle: Handle) -> None:
        self.did.append("cancel")
        self.now = "failed"


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteJob:
    recipe = small_recipe(tmp_path, launch__kind="slurm", checkpoint__grace_s=1)
    store_handle(recipe.folder.root, HANDLE, recipe)
    return RemoteJob(recipe.folder.root, HANDLE)


@pytest.mark.parametrize(
    ("place", "did", "state"),
    [
        (Place(), ["SIGTERM"], "cancelled"),
        (Place(deaf=True), ["SIGTERM", "cancel"], "failed"),
        (Place("queued"), ["cancel"], "failed"),  # there is nobody yet who could be asked
        (Place("unknown"), ["SIGTERM"], "cancelled"),  # there may be somebody
        (Place("succeeded"), [], "succeeded"),
    ],
)
def test_a_job_that_is_cancelled_has_the_time_to_save(
    place: Place, did: list[str], state: JobState, there: RemoteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.launch.job_control.STOP_MARGIN_S", 0.5)
    monkeypatch.setattr(there, "_launcher", place)
    began = time.monotonic()
    there.cancel()
    assert (place.did, there.state()) == (did, state)
    if place.deaf:
        assert time.monotonic() - began > 1.5, "checkpoint.grace_s and a while"
    else:
        assert place.asked <= 3, "nobody waits who need not"


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("named", [None, "train"])
def test_a_place_that_does_not_answer_once_cancels_as_well_and_saves_before(
    fails_at: int,
    named: str | None,
    there: RemoteJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = Place(fails_at=fails_at)
    monkeypatch.setattr(there, "_launcher", place)
    monkeypatch.setattr("ingot.launch.job_control.submitted_jobs", lambda root: [there])
    assert cancel([str(tmp_path)], named) == 0
    assert place.did == ["SIGTERM"]
    assert capsys.readouterr().err.splitlines()[-1] == "train: cancelled"


def test_nothing_is_cancelled_where_all_has_ended(
    there: RemoteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("succeeded")
    monkeypatch.setattr(there, "_launcher", place)
    monkeypatch.setattr("ingot.launch.job_control.submitted_jobs", lambda root: [there])
    with pytest.raises(Failed, match="nothing runs there: train succeeded"):
        cancel([str(tmp_path)])
    assert (place.asked, place.did) == (1, [])


def test_a_job_that_runs_is_cancelled_before_one_of_which_nothing_is_known(
    there: RemoteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(there, "_launcher", place := Place())
    newer = UnreadableJob(Handle("evaluate", "slurm", "8", (), 2.0, ""), "of another version")
    monkeypatch.setattr("ingot.launch.job_control.submitted_jobs", lambda root: [newer, there])
    assert cancel([str(tmp_path)]) == 0
    assert place.did == ["SIGTERM"]
    with pytest.raises(Failed, match="evaluate cannot be cancelled from here: of another version"):
        cancel([str(tmp_path)])


def test_a_place_that_is_gone_for_ever_is_not_waited_for(
    there: RemoteJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same verb was started elsewhere since: on another place, or in a process here."""
    monkeypatch.setattr(there, "_launcher", place := Place())
    older = UnreadableJob(Handle("train", "gce", "3", (), 0.5, ""), "of another version")
    monkeypatch.setattr("ingot.launch.job_control.submitted_jobs", lambda root: [there, older])
    assert cancel([str(tmp_path)]) == 0
    assert place.did == ["SIGTERM"]
    with pytest.raises(Failed, match="nothing runs there: train cancelled, train unknown"):
        cancel([str(tmp_path)])


def test_a_job_that_is_queued_after_all_is_not_waited_for(
    there: RemoteJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("queued", deaf=True, fails_at=1)
    monkeypatch.setattr(there, "_launcher", place)
    there.cancel()
    assert (place.did, place.asked) == (["SIGTERM", "cancel"], 2)


def test_a_job_whose_recipe_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, launch__kind="slurm")
    root = recipe.folder.root
    store_handle(root, HANDLE, recipe)
    store_handle(root, Handle("evaluate", "slurm", "8", ("evaluate",), 2.0, ""), recipe)
    with (jobs_folder(root) / "evaluate.slurm.yaml").open("a") as stream:
        stream.write("knob_of_tomorrow: 1\n")
    unreadable, readable = submitted_jobs(root)
    assert isinstance(readable, RemoteJob)
    assert (unreadable.state(), unreadable.has_log) == ("unknown", False)
    assert unreadable.where.startswith("slurm 8, which cannot be asked: ")
    assert "knob_of_tomorrow" in unreadable.where
    assert "\n" not in unreadable.where
    with pytest.raises(Failed, match="evaluate cannot be cancelled from here"):
        unreadable.cancel()


@pytest.mark.parametrize(
    ("waits", "ends"),
    [("run", ["run", "train"]), ("train", ["train", "train"]), ("prepare", ["prepare"])],
)
def test_who_waits_for_a_job_and_the_job_itself_are_both_cancelled(
    waits: str,
    ends: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under `ingot launch run` they have different names."""

    class Known:
        where, has_log, poll_s = "", False, 0.0

        def __init__(self, handle: Handle) -> None:
            self.handle, self.now = handle, "running"

        def state(self) -> str:
            return self.now

        def cancel(self) -> None:
            self.now = "cancelled"

    known = [Known(Handle(waits, "local", "1", (), 2.0, "")), Known(HANDLE)]
    monkeypatch.setattr("ingot.launch.job_control.submitted_jobs", lambda root: known)
    assert cancel([str(tmp_path)]) == 0
    assert capsys.readouterr().err == "".join(f"{name}: cancelled\n" for name in ends)


def test_the_handle_of_another_version_is_none_of_no_job(tmp_path: Path) -> None:
    """The same command would start the job a second time, beside the one that runs."""
    store_handle(tmp_path, HANDLE)
    path = jobs_folder(tmp_path) / "train.slurm.json"
    path.write_text(path.read_text().replace('"argv"', '"arguments"'))
    for ask in (lambda: find_handle(tmp_path, "train", "slurm"), lambda: stored_handles(tmp_path)):
        with pytest.raises(WrongInput, match=r"train\.slurm\.json cannot be read .* may still run"):
            ask()
    assert find_handle(tmp_path, "evaluate", "slurm") is None


def test_what_the_starts_of_a_job_have_used_is_no_handle(tmp_path: Path) -> None:
    store_handle(tmp_path, HANDLE)
    SpendingMeter(tmp_path, "train", 1.0).begin(60.0)
    assert stored_handles(tmp_path) == [HANDLE]
