"""A TPU VM as a queued resource: what is asked for, and that it goes. None of it could be tried on
a TPU.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.cloud import tpus as calls
from ingot.config.recipe import Recipe
from ingot.launch.job import Job
from ingot.launch.places import tpu
from ingot.launch.places.tpu import TpuLauncher
from ingot.launch.rendezvous import (
    ARRIVED,
    BOOT,
    CANCELLED,
    EXIT,
    MADE,
    Rendezvous,
    clear_rendezvous,
)
from tests import gcs, golden
from tests.fakes import google, tpus
from tests.fakes.vm import Machine
from tests.patience import PATIENCE_S
from tests.small import small_recipe

REPLICA = "gs://bucket/ingot/runs/small"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    monkeypatch.setattr(calls, "POLL_S", 0.01)
    monkeypatch.setattr(calls, "FIRST_WAIT_S", 0.01)
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def server() -> Iterator[google.Server]:
    server = google.Server()
    try:
        yield server
    finally:
        server.server_close()


@pytest.fixture
def service(server: google.Server) -> tpus.Tpus:
    return tpus.install(server)


def recipe_for(root: Path, address: str | None, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        **{
            "launch.kind": "tpu",
            "launch.image": "example.com/torch-tpu:1",
            "cloud.project": "p",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.max_run": "24h",
            "cloud.zone": "us-central1-a",
            **knobs,
        },
    )


def job_of(recipe: Recipe, start: int = 1) -> Job:
    return Job(
        "train",
        ("train", "runs/small/jobs/nodes.train.yaml"),
        1,
        1,
        image=recipe.launch.image,
        rendezvous=f"{REPLICA}/jobs/train-{start}",
        run_folder_url=REPLICA,
        time_limit_s=recipe.cloud.max_run,
    )


def test_what_would_be_sent_stands_in_a_golden_file(tmp_path: Path) -> None:
    recipe = recipe_for(
        tmp_path,
        None,
        output="runs",
        **{"launch.machine.spot": True, "cloud.labels": {"team": "a"}},
    )
    golden.check("tpu/one.txt", TpuLauncher(recipe).render(job_of(recipe)))


def test_a_tpu_is_asked_for_and_is_stopped_when_the_job_is_over(
    tmp_path: Path, server: google.Server, service: tpus.Tpus
) -> None:
    recipe = recipe_for(tmp_path, server.address)
    launcher = TpuLauncher(recipe)
    handle = launcher.submit(job_of(recipe))
    assert launcher.status(handle) == "queued"
    service.states[handle.id] = "ACTIVE"
    assert launcher.status(handle) == "queued"
    Rendezvous(handle.about["meet"]).leave(0, ARRIVED)
    assert launcher.status(handle) == "running"
    assert launcher.submit(job_of(recipe, 2)) == handle
    Rendezvous(handle.about["meet"]).leave(0, EXIT, rank=0, code=0)
    assert launcher.status(handle) == "succeeded"
    assert service.states == {}


@pytest.mark.parametrize("note", [EXIT, CANCELLED, ARRIVED, MADE])
def test_notes_of_an_earlier_start_of_the_same_number_say_nothing_of_this_one(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, note: str
) -> None:
    """As one of another computer, or of a run folder that is gone, leaves them in the bucket."""
    launcher = TpuLauncher(recipe_for(tmp_path, server.address))
    job = job_of(launcher.recipe)
    Rendezvous(job.rendezvous or "").leave(0, note, rank=0, code=0, t_wall=0.0)
    handle = launcher.submit(job)
    service.states[handle.id] = "ACTIVE"
    assert [launcher.status(handle), launcher.status(handle)] == ["queued", "queued"]
    assert service.states == {handle.id: "ACTIVE"}


@pytest.mark.parametrize(
    ("boot", "last"),
    [
        (None, "its start-up script said nothing"),
        ("pulling the image", "the last that it did was pulling the image"),
    ],
)
def test_a_tpu_whose_node_does_not_come_up_is_given_back(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, boot: str | None, last: str
) -> None:
    """Its time counts from when it was there, whoever saw it first."""
    recipe = recipe_for(tmp_path, server.address)
    handle = TpuLauncher(recipe).submit(job_of(recipe))
    notes = Rendezvous(handle.about["meet"])
    waiting = replace(handle, started=handle.started - 10 * recipe.launch.start_s)
    assert TpuLauncher(recipe).status(waiting) == "queued"
    service.states[handle.id] = "ACTIVE"
    assert TpuLauncher(recipe).status(waiting) == "queued"
    [seen] = notes.notes(MADE).values()
    notes.leave(0, MADE, t_wall=seen["t_wall"] - recipe.launch.start_s + 60)
    if boot:
        notes.leave(0, BOOT, phase=boot)
    assert TpuLauncher(recipe).status(waiting) == "queued"
    notes.leave(0, MADE, t_wall=seen["t_wall"] - recipe.launch.start_s - 60)
    assert TpuLauncher(recipe).status(waiting) == "failed"
    assert service.states == {}
    [note] = notes.notes(EXIT).values()
    assert note["how"] == (
        f"node 0 of {handle.id} did not come up within 30m 00s: {last}; see its log, or raise"
        " launch.start_s"
    )
    assert TpuLauncher(recipe).status(waiting) == "failed"


def test_a_tpu_that_is_there_long_after_its_time_is_given_back(
    tmp_path: Path, server: google.Server, service: tpus.Tpus
) -> None:
    launcher = TpuLauncher(recipe_for(tmp_path, server.address))
    handle = launcher.submit(replace(job_of(launcher.recipe), time_limit_s=7200.0))
    service.states[handle.id] = "ACTIVE"
    notes = Rendezvous(handle.about["meet"])
    notes.leave(0, ARRIVED)
    # While it runs over its time it may still save, and deletes itself.
    for past_s, state in ((0, "running"), (300, "running"), (600, "failed")):
        notes.leave(0, MADE, t_wall=time.time() - 7200 - past_s)
        assert launcher.status(handle) == state
    assert service.states == {}
    [note] = notes.notes(EXIT).values()
    assert f"{handle.id} was still there" in note["how"]


@pytest.mark.parametrize("start", [1, 3])
def test_what_another_computer_started_is_left_alone_and_not_started_again(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, start: int
) -> None:
    """Whether the number of its start is ours too, or is one that we have never had; also where the
    run folder that started it was deleted.
    """
    here, there = (
        TpuLauncher(recipe_for(tmp_path / name, server.address)) for name in ("here", "there")
    )
    ended = here.submit(job_of(here.recipe))
    Rendezvous(ended.about["meet"]).leave(0, EXIT, rank=0, code=0)
    assert here.status(ended) == "succeeded"
    clear_rendezvous(ended.about["meet"])
    handle = there.submit(job_of(there.recipe, start))
    # One of a namesake in another bucket is somebody else's.
    namesake = replace(job_of(there.recipe), run_folder_url="gs://theirs/ingot/runs/small")
    TpuLauncher(recipe_for(tmp_path / "namesake", server.address)).submit(namesake)
    service.states[handle.id] = "ACTIVE"
    told = f"the TPU {handle.id} in us-central1-a works on this run and was started elsewhere"
    for launcher in (here, TpuLauncher(recipe_for(tmp_path / "third", server.address))):
        wanted = job_of(launcher.recipe, start)
        assert (launcher.busy(wanted) or "").startswith(told)
        with pytest.raises(Failed, match=told):
            launcher.submit(wanted)
    here.cancel(ended)
    assert service.states[handle.id] == "ACTIVE"
    assert there.busy(job_of(there.recipe)) is None
    service.states[handle.id] = "SUSPENDED"
    assert here.busy(job_of(here.recipe, start)) is None


@pytest.mark.parametrize(
    ("state", "told"), [("FAILED", "failed"), ("SUSPENDED", "preempted"), (None, "preempted")]
)
def test_a_tpu_that_is_taken_away_is_removed(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, state: str | None, told: str
) -> None:
    recipe = recipe_for(tmp_path, server.address)
    launcher = TpuLauncher(recipe)
    handle = launcher.submit(job_of(recipe))
    service.states = {handle.id: state} if state else {}
    assert launcher.status(handle) == told
    assert service.states == {}


@pytest.mark.parametrize(("code", "told"), [(143, "preempted"), (1, "failed")])
def test_ranks_that_followed_a_signal_of_their_machine_did_not_fail(
    code: int, told: str, tmp_path: Path, server: google.Server, service: tpus.Tpus
) -> None:
    launcher = TpuLauncher(recipe_for(tmp_path, server.address))
    handle = launcher.submit(job_of(launcher.recipe))
    Rendezvous(handle.about["meet"]).leave(0, EXIT, rank=0, code=code)
    assert launcher.status(handle) == told


@pytest.mark.parametrize(
    ("code", "asked", "state"),
    [
        (75, True, "cancelled"),
        (143, True, "cancelled"),
        (75, False, "preempted"),
        (1, True, "failed"),
        (0, True, "succeeded"),
    ],
)
def test_what_stopped_in_good_order_is_told_from_what_is_done(
    code: int,
    asked: bool,
    state: str,
    tmp_path: Path,
    server: google.Server,
    service: tpus.Tpus,
) -> None:
    launcher = TpuLauncher(recipe_for(tmp_path, server.address))
    handle = launcher.submit(job_of(launcher.recipe))
    if asked:
        launcher.signal(handle, signal.SIGTERM)
    Rendezvous(handle.about["meet"]).leave(0, EXIT, rank=0, code=code)
    assert launcher.status(handle) == state
    assert service.states == {}


def test_cancel_deletes_it(tmp_path: Path, server: google.Server, service: tpus.Tpus) -> None:
    recipe = recipe_for(tmp_path, server.address)
    launcher = TpuLauncher(recipe)
    handle = launcher.submit(job_of(recipe))
    launcher.cancel(handle)
    assert service.states == {}
    assert launcher.status(handle) == "cancelled"


def test_a_lost_answer_makes_no_second_one(
    tmp_path: Path, server: google.Server, service: tpus.Tpus
) -> None:
    service.lost = 1
    recipe = recipe_for(tmp_path, server.address)
    TpuLauncher(recipe).submit(job_of(recipe))
    assert len(service.states) == 1


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"launch.tpu.type": "tpu"}, "v5litepod-8"),
        ({"launch.tpu.type": "v5p-64"}, "several hosts"),
        ({"launch.tpu.type": "v5p-16"}, "one host of up to 4"),
        ({"launch.tpu.type": "v4-16"}, "one host of up to 4"),
        ({"launch.tpu.type": "v6e-16"}, "one host of up to 8"),
        ({"launch.nodes": 2}, "launch.nodes=1"),
        ({"launch.image": None}, "torch_tpu"),
        ({"cloud.max_cost": 1}, "cloud.max_cost"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(
    tmp_path: Path, server: google.Server, knobs: dict[str, Any], told: str
) -> None:
    recipe = recipe_for(tmp_path, server.address, **knobs)
    launcher, job = TpuLauncher(recipe), replace(job_of(recipe), nodes=recipe.launch.nodes)
    assert any(told in reason for reason in launcher.can(job))
    with pytest.raises(WrongInput):
        launcher.submit(job)
    assert server.calls == []


@pytest.mark.parametrize("kind", ["v5p-8", "v4-8", "v3-8", "v6e-8", "v5litepod-8"])
def test_slices_of_one_host_are_taken(tmp_path: Path, kind: str) -> None:
    recipe = recipe_for(tmp_path, None, **{"launch.tpu.type": kind})
    assert TpuLauncher(recipe).can(job_of(recipe)) == []


# The start-up script, run by bash with stand-ins for what a TPU VM has.
def test_a_tpu_that_hangs_deletes_itself_when_its_time_is_over(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nobody left who asks for its state: nothing else would end what is paid for."""
    monkeypatch.setattr(tpu, "SAVE_S", 0)  # so that its time is one of those that take none here
    monkeypatch.setattr(tpu, "SPARE_S", 0)
    launcher = TpuLauncher(recipe_for(tmp_path, server.address))
    handle = launcher.submit(replace(job_of(launcher.recipe), time_limit_s=60.0))
    service.states[handle.id] = "ACTIVE"
    (folder := tmp_path / "vm").mkdir()
    (folder / "pull-takes").write_text("600")
    [spec] = service.asked[handle.id]["tpu"]["nodeSpec"]
    machine, until = (
        Machine("t1v-n-1", spec["node"]["metadata"], folder),
        time.monotonic() + PATIENCE_S,
    )
    try:
        while service.states.get(handle.id) == "ACTIVE" and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        machine.pull_the_plug()
    assert service.states.get(handle.id) != "ACTIVE", machine.serial
    [note] = Rendezvous(handle.about["meet"]).notes(EXIT).values()
    assert note["how"] == f"node 0 ({handle.id}): its time was over"
    assert launcher.status(handle) == "failed"


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("lacking", "code", "told"),
    [
        ("no-image", 1, "the image could not be pulled: Error response from daemon"),
        ("no-run", 125, "the container ended with exit code 125"),
    ],
)
def test_a_tpu_whose_container_cannot_start_has_failed_and_says_why(
    tmp_path: Path, server: google.Server, service: tpus.Tpus, lacking: str, code: int, told: str
) -> None:
    """Where it only looked taken away, three more would be paid for."""
    recipe = recipe_for(
        tmp_path, server.address, **{"launch.image": "us-central1-docker.pkg.dev/p/r/torch-tpu:1"}
    )
    launcher = TpuLauncher(recipe)
    handle = launcher.submit(job_of(recipe))
    log = launcher.log(handle)
    assert log.read() == b""
    service.states[handle.id] = "ACTIVE"
    folder = tmp_path / "vm"
    folder.mkdir()
    (folder / lacking).touch()
    machine = Machine(
        "t1v-n-1", service.asked[handle.id]["tpu"]["nodeSpec"][0]["node"]["metadata"], folder
    )
    said, until = b"", time.monotonic() + PATIENCE_S
    try:
        while service.states.get(handle.id) == "ACTIVE" and time.monotonic() < until:
            said += log.read()
            time.sleep(0.3)
    finally:
        machine.pull_the_plug()
    said += log.read()
    assert service.states.get(handle.id) != "ACTIVE", machine.serial
    assert launcher.status(handle) == "failed"
    assert service.states == {}
    assert len(server.requests("post /v2/projects/p/locations/us-central1-a/queuedResources")) == 1
    [note] = Rendezvous(handle.about["meet"]).notes(EXIT).values()
    assert note["code"] == code
    assert note["how"].startswith(f"node 0 ({handle.id}): {told}")
    assert said.startswith(b"ingot: pulling the image\n")
    assert f"ingot: {note['how']}\n" in said.decode()
    assert not any(
        "a-token-of-the-machine" in argument for call in machine.calls for argument in call
    )
