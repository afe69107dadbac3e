"""A training on two machines that share nothing but a bucket, from the recipe to the model: as if
it had run here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.runfolder import folder_lock
from ingot.base.runlog import read_lines
from ingot.cloud import instances
from ingot.config.load import dump_recipe
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.launch import run_job
from ingot.launch.job import Handle, Job
from ingot.launch.node.ranks import free_port
from ingot.launch.places.gce import GceLauncher
from ingot.launch.rendezvous import EXIT, Rendezvous
from ingot.launch.supervisor.supervise import supervise
from tests import gcs
from tests.fakes import compute, google
from tests.fakes.compute import Stored
from tests.fakes.vm import Machine
from tests.patience import PATIENCE_S
from tests.small import small_recipe, write_documents

Machines = tuple[compute.Compute, list[Machine]]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    monkeypatch.setattr(instances, "POLL_S", 0.01)
    monkeypatch.setattr(GceLauncher, "poll_s", 0.5)
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """A cloud whose machines run, each in a folder of its own."""
    server, running = google.Server(), dict[str, Machine]()
    made: list[Machine] = []

    def up(stored: Stored) -> None:
        machine = running[stored.wanted.name] = Machine(
            stored.wanted.name, stored.metadata, tmp_path / "machines" / stored.wanted.name
        )
        made.append(machine)

    def down(stored: Stored) -> None:
        if stored.wanted.name in running:
            running.pop(stored.wanted.name).pull_the_plug()

    try:
        yield compute.install(server, on_running=up, on_end=down), made
    finally:
        for machine in list(running.values()):
            machine.pull_the_plug()
        server.server_close()


def recipe_in(root: Path, **knobs: Any) -> Recipe:
    """With relative paths, as machines with a working folder of their own need them; `root` is the
    working folder.
    """
    return small_recipe(
        root,
        output="runs",
        **{
            "data.train": [{"source": f"text/doc0{number}*.txt"} for number in (0, 1)],
            "data.window": 1,
            "train.steps": 12,
            "train.evaluate_every": 4,
            "checkpoint.every": 4,
            "checkpoint.grace_s": 20,
            "parallel.shard": 2,
            **knobs,
        },
    )


def on_machines(root: Path, address: str, **knobs: Any) -> Recipe:
    return recipe_in(
        root,
        **{
            "launch.kind": "gce",
            "launch.nodes": 2,
            "launch.port": free_port(),
            "launch.machine.spot": True,
            "launch.restarts": 3,
            "cloud.project": "p",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.images.train": "example.com/train:1",
            **knobs,
        },
    )


def trained_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The model that two processes of this machine make of the same recipe."""
    monkeypatch.chdir(root)
    recipe = recipe_in(root)
    (root / "r.yaml").write_text(dump_recipe(recipe))
    assert supervise(Job("train", ("train", "r.yaml"), 2), recipe).code == 0
    return (recipe.folder.model / "model.safetensors").read_bytes()


def prepared_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(parents=True)
    write_documents(root / "text")
    monkeypatch.chdir(root)
    ingest(recipe_in(root))
    prepare(recipe_in(root))


@pytest.mark.drawn("training on several machines")
def test_two_machines_with_a_bucket_train_what_two_processes_train_though_one_is_taken_away(
    tmp_path: Path, bucket: gcs.Server, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, made = machines
    here, there = tmp_path / "here", tmp_path / "there"
    prepared_in(here, monkeypatch)
    expected = trained_here(here, monkeypatch)
    prepared_in(there, monkeypatch)
    recipe = on_machines(there, cloud.server.address)

    write = bucket.write

    def take_one_away(name: str, *about: Any) -> Any:
        """When the first checkpoint is in the bucket, before anybody knows."""
        answer = write(name, *about)
        if name.endswith("step-00000004/COMMIT.json") and len(made) == 2:
            cloud.preempt(next(machine.name for machine in made if machine.name.endswith("-1-1")))
        return answer

    monkeypatch.setattr(bucket, "write", take_one_away)
    job = run_job.job_of(recipe, "train", distributed=True)
    with folder_lock(recipe.folder.root, "run-lock"):
        ended = run_job.run_job(recipe, job, supervised=True)
    assert ended.code == 0, "\n\n".join(machine.serial for machine in made)
    assert len(made) == 4
    assert cloud.names() == []
    assert (recipe.folder.model / "model.safetensors").read_bytes() == expected
    events = list(read_lines(recipe.folder.events))
    assert [event["kind"] for event in events if event["kind"] in ("start", "restart")][-2:] == [
        "restart",
        "start",
    ]
    assert [event["step"] for event in events if event["kind"] == "finish"] == [12]
    # Nothing but the bucket was shared, and no machine was given our data by another way.
    assert not any((machine.folder / "work" / "text").exists() for machine in made)
    # And of the columns each had what it trained on shortly after, and no more.
    for machine in made:
        columns = machine.folder / "work" / "runs" / "small" / "data" / "columns"
        assert (columns / "manifest.json").exists()
        assert not [*columns.glob("*.bin"), *columns.glob("*.idx")]
        assert [*(columns / ".later").glob("train.tokens-*.bin")]
    for machine in made:
        said = [call for call in machine.calls if call[0] == "docker" and call[1] == "run"]
        assert len(said) == 1
    assert not any(
        "a-token-of-the-machine" in argument
        for machine in made
        for call in machine.calls
        for argument in call
    )


def one_machine(
    tmp_path: Path,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    **knobs: Any,
) -> tuple[GceLauncher, Handle]:
    """A job of one machine whose tools find these files on its disk, followed until it has asked to
    be deleted; nobody looks meanwhile.
    """
    cloud, made = machines
    up = cloud.on_running

    def prepared(stored: Stored) -> None:
        folder = tmp_path / "machines" / stored.wanted.name
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        up(stored)

    cloud.on_running = prepared
    monkeypatch.chdir(tmp_path)
    recipe = on_machines(tmp_path, cloud.server.address, **{"launch.nodes": 1, **knobs})
    launcher = GceLauncher(recipe)
    handle = launcher.submit(
        replace(run_job.job_of(recipe, "train", distributed=True), argv=("train", "r.yaml"))
    )
    deadline = time.monotonic() + PATIENCE_S
    while not cloud.server.requests("Instances.Delete") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert cloud.server.requests("Instances.Delete"), made[0].serial
    return launcher, handle


@pytest.mark.drawn("one machine and its end")
def test_a_machine_that_cannot_have_the_image_says_so_and_deletes_itself(
    tmp_path: Path, bucket: gcs.Server, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody ever looks."""
    cloud, made = machines
    launcher, handle = one_machine(tmp_path, machines, monkeypatch, {"no-image": ""})
    cloud.settle()
    assert cloud.names() == [], made[0].serial
    assert launcher.status(handle) == "failed"
    [note] = Rendezvous(handle.about["meet"]).notes(EXIT).values()
    assert note["code"] == 1
    assert (
        "the image could not be pulled: Error response from daemon: manifest for  it  not found"
        in note["how"]
    )
    [last] = Rendezvous(handle.about["meet"]).notes("boot").values()
    assert last["phase"] == "over"


@pytest.mark.drawn("one machine and its end")
def test_a_machine_that_may_not_delete_itself_shuts_down_and_the_next_look_removes_it(
    tmp_path: Path, bucket: gcs.Server, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, made = machines
    cloud.server.fault(
        "Instances.Delete", 403, message="Required 'compute.instances.delete' permission"
    )
    launcher, handle = one_machine(tmp_path, machines, monkeypatch, {"no-run": ""})
    made[0].process.wait(60)
    assert made[0].calls[-1] == ["shutdown", "-h", "now"]
    [stored] = cloud.machines.values()
    stored.state = "TERMINATED"
    assert launcher.status(handle) == "failed"
    assert cloud.names() == []


@pytest.mark.drawn("one machine and its end")
def test_ranks_leave_by_the_clock_of_the_machine_however_long_it_took_to_come_up(
    tmp_path: Path, bucket: gcs.Server, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place counts from when it runs: what the driver and the image take is not theirs."""
    one_machine(
        tmp_path,
        machines,
        monkeypatch,
        {"no-run": "", "pull-takes": "4"},
        **{"cloud.max_run": "20m"},
    )
    calls = machines[1][0].calls
    [waited] = [call for call in calls if call[0] == "timeout"]
    assert waited[1:3] == ["--preserve-status", "--signal=TERM"]
    whole = 20 * 60 - 20 - 60  # grace_s, and a minute
    assert whole - 60 < int(waited[3]) <= whole - 4
    assert not [call for call in calls if call[0] == "iptables"]  # one node lets nobody in


@pytest.mark.drawn("one machine and its end")
def test_a_machine_that_came_up_too_late_starts_nothing(
    tmp_path: Path, bucket: gcs.Server, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, handle = one_machine(
        tmp_path, machines, monkeypatch, {"pull-takes": "4"}, **{"cloud.max_run": "142s"}
    )
    assert launcher.status(handle) == "failed"
    [note] = Rendezvous(handle.about["meet"]).notes(EXIT).values()
    assert "its time was over before the container could start; raise cloud.max_run" in note["how"]
    assert not [call for call in machines[1][0].calls if call[:2] == ["docker", "run"]]
