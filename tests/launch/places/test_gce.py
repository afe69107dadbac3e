"""A cluster of virtual machines: made for a job, told of, and destroyed whatever happens. Against
Compute Engine's own interface on loopback.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.runfolder import folder_lock
from ingot.cloud import clients, instances
from ingot.cloud.instances import NoCapacity
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder
from ingot.launch.job import FINAL_STATES, Handle, Job
from ingot.launch.places import gce, gce_machines, logs
from ingot.launch.places.gce import GceLauncher
from ingot.launch.rendezvous import ARRIVED, BOOT, ENDED_BY, EXIT, SIGNAL, Rendezvous
from tests import gcs, golden
from tests.fakes import compute, google
from tests.patience import PATIENCE_S
from tests.small import small_recipe

REPLICA = "gs://bucket/ingot/runs/small"
MONTH_S = 30 * 86_400.0


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    monkeypatch.setattr(instances, "POLL_S", 0.01)
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(logs, "QUERY_INTERVAL_S", 0.0)
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def cloud() -> Iterator[compute.Compute]:
    server = google.Server()
    try:
        yield compute.install(server)
    finally:
        server.server_close()


def recipe_for(root: Path, address: str | None, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        **{
            "launch.kind": "gce",
            "launch.nodes": 3,
            "cloud.project": "p",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.images.train": "us-central1-docker.pkg.dev/p/ingot/ingot-train:latest",
            **knobs,
        },
    )


def job_of(recipe: Recipe, start: int = 1, **about: Any) -> Job:
    argv = ("train", "runs/small/jobs/nodes.train.yaml")
    return Job(
        "train",
        argv,
        recipe.launch.processes,
        recipe.launch.nodes,
        rendezvous=f"{REPLICA}/jobs/train-{start}",
        run_folder_url=REPLICA,
        time_limit_s=recipe.cloud.max_run,
        **about,
    )


class Run:
    """A recipe, its launcher, and the jobs of its starts."""

    def __init__(self, root: Path, cloud: compute.Compute, **knobs: Any) -> None:
        self.cloud = cloud
        self.recipe = recipe_for(root, cloud.server.address, **knobs)
        self.launcher = GceLauncher(self.recipe)

    def submit(self, start: int = 1) -> Handle:
        return self.launcher.submit(job_of(self.recipe, start))

    def leave(self, handle: Handle, kind: str, **codes: int) -> None:
        """Notes of nodes, `n0=0`: as if it had come, or had ended with this code."""
        for node, code in codes.items():
            Rendezvous(handle.about["meet"]).leave(int(node[1:]), kind, rank=0, code=code)

    def come(self, handle: Handle) -> None:
        self.end(handle, 0, ARRIVED)

    def end(self, handle: Handle, code: int, kind: str = EXIT) -> None:
        """All nodes alike."""
        self.leave(handle, kind, **{f"n{node}": code for node in range(self.recipe.launch.nodes)})

    @property
    def handle(self) -> Handle | None:
        return find_handle(self.recipe.folder.root, "train", "gce")


@pytest.fixture
def run(tmp_path: Path, cloud: compute.Compute) -> Run:
    return Run(tmp_path, cloud)


NAME = f"ingot-small-train-{fingerprint(REPLICA)[:6]}"
NAMES = [f"{NAME}-1-{node}" for node in range(3)]


@pytest.mark.drawn("what is sent to Google", keep=2)
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("cpu", {"launch.nodes": 1}),
        (
            "gpus",
            {
                "launch.nodes": 2,
                "launch.processes": 2,
                "launch.machine.accelerator": "NVIDIA_TESLA_T4",
                "launch.machine.accelerators": 2,
                "launch.machine.spot": True,
                "cloud.zone": "us-central1-b",
                "cloud.subnetwork": "inner",
                "cloud.service_account": "ingot@p.iam.gserviceaccount.com",
                "cloud.secrets": {"HF_TOKEN": "secret:hf-token/3"},
                "cloud.labels": {"team": "Models"},
                "cloud.max_run": "24h",
                "launch.environment": {"NCCL_DEBUG": "WARN", "GREETING": "it's $HOME"},
            },
        ),
        (
            "reserved",
            {
                "launch.nodes": 1,
                "launch.processes": 8,
                "launch.machine.type": "a3-highgpu-8g",
                "cloud.network": "ours",
                "cloud.images.train": "example.com/i:1",
                "launch.machine.reservation": (
                    "projects/other/zones/europe-west4-a/reservations/big"
                ),
                "cloud.region": "europe-west4",
                "cloud.max_run": "20m",
            },
        ),
    ],
)
def test_what_would_be_sent_stands_in_golden_files(
    tmp_path: Path, name: str, knobs: dict[str, Any]
) -> None:
    recipe = recipe_for(tmp_path, None, output="runs", **knobs)
    launcher, job = GceLauncher(recipe), job_of(recipe)
    job = replace(job, environment=recipe.launch.environment)
    assert launcher.can(job) == []
    golden.check(f"gce/{name}.txt", launcher.render(job))
    assert not (tmp_path / "runs").exists()


@pytest.mark.drawn("what is sent to Google", keep=2)
def test_what_is_sent_is_what_was_shown(run: Run, cloud: compute.Compute) -> None:
    shown = run.launcher.render(job_of(run.recipe))
    assert cloud.server.calls == []
    run.submit()
    for request in cloud.server.requests("Instances.Insert"):
        machine = type(request.instance_resource)(request.instance_resource)
        script = next(item for item in machine.metadata.items if item.key == "startup-script")
        assert script.value in shown
        script.value = "(the script below)"
        for labels in (machine.labels, machine.disks[0].initialize_params.labels):
            labels[gce_machines.START] = gce_machines.ComputeCluster.start
        assert instances.as_json(machine) in shown
        assert (request.project, request.zone) == ("p", "us-central1-a")


def test_a_cluster_comes_up_runs_and_is_stopped_when_it_is_done(
    run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    assert cloud.names() == NAMES
    assert run.handle == handle
    assert run.launcher.status(handle) == "queued"
    run.leave(handle, ARRIVED, n0=0, n2=0)
    assert run.launcher.status(handle) == "queued"
    run.come(handle)
    assert run.launcher.status(handle) == "running"
    run.leave(handle, EXIT, n0=0, n1=0)
    assert run.launcher.status(handle) == "running"
    run.leave(handle, EXIT, n2=0)
    assert run.launcher.status(handle) == "succeeded"
    assert cloud.names() == []
    assert run.launcher.status(handle) == "succeeded"


def test_one_nodes_failure_leaves_the_others_a_while_and_then_takes_them_down(
    run: Run, cloud: compute.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = run.submit()
    run.come(handle)
    run.leave(handle, EXIT, n1=1)
    assert run.launcher.status(handle) == "running"
    monkeypatch.setattr(gce, "LINGER_S", 0.0)
    assert run.launcher.status(handle) == "failed"
    assert cloud.names() == []


def test_a_machine_that_is_taken_away_is_told_of_and_the_rest_goes(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    run = Run(tmp_path, cloud, **{"launch.machine.spot": True})
    handle = run.submit()
    run.come(handle)
    assert run.launcher.status(handle) == "running"
    cloud.preempt(NAMES[1])
    assert run.launcher.status(handle) == "preempted"
    assert cloud.names() == []
    second = run.submit(2)
    assert cloud.names() == [f"{NAME}-2-{node}" for node in range(3)]
    assert second.id == f"{NAME}-2"


@pytest.mark.parametrize(
    ("codes", "asked", "state"),
    [
        ({"n0": 143, "n1": 143, "n2": -15}, None, "preempted"),
        ({"n0": 143}, None, "preempted"),
        ({"n0": 143}, signal.SIGUSR2, "preempted"),  # for its stacks
        ({"n0": 143, "n1": 143, "n2": 143}, signal.SIGTERM, "cancelled"),
        ({"n0": 143, "n1": 1}, None, "failed"),
        ({"n0": -9}, None, "failed"),
    ],
)
def test_ranks_that_their_machine_asked_to_stop_while_they_loaded_did_not_fail(
    codes: dict[str, int],
    asked: int | None,
    state: str,
    tmp_path: Path,
    cloud: compute.Compute,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They had nothing to save; node 0's machine is the one that is taken away."""
    monkeypatch.setattr(gce, "LINGER_S", 0.0)
    run = Run(tmp_path, cloud, **{"launch.machine.spot": True})
    handle = run.submit()
    run.come(handle)
    if asked is not None:
        run.launcher.signal(handle, asked)
    cloud.preempt(NAMES[0])
    run.leave(handle, EXIT, **codes)
    if len(codes) == 1:  # the others were ended as they had lost it
        for node in (1, 2):
            Rendezvous(handle.about["meet"]).leave(node, EXIT, rank=0, code=-9, **{ENDED_BY: "0"})
    assert run.launcher.status(handle) == state


@pytest.mark.parametrize(
    ("codes", "asked", "state"),
    [
        ((75, 75, 75), True, "cancelled"),
        ((75, 75, 75), False, "preempted"),  # its time was over
        ((75, 1, 75), True, "failed"),  # one failed to save
        ((0, 0, 0), True, "succeeded"),  # it was done before it heard
        ((3, 3, 3), False, "succeeded"),
    ],
)
def test_what_stopped_in_good_order_is_told_from_what_is_done(
    codes: tuple[int, ...], asked: bool, state: str, run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    run.come(handle)
    if asked:
        run.launcher.signal(handle, signal.SIGTERM)
    run.leave(handle, EXIT, **{f"n{node}": code for node, code in enumerate(codes)})
    assert run.launcher.status(handle) == state
    assert cloud.names() == []
    assert run.launcher.status(handle) == state


def test_a_machine_that_failed_while_another_was_lost_is_a_failure(
    run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    run.come(handle)
    run.leave(handle, EXIT, n0=1)
    del cloud.machines["us-central1-a", NAMES[2]]
    assert run.launcher.status(handle) == "failed"


def test_nobody_comes_back_and_all_is_stopped_when_the_time_is_over(
    run: Run, cloud: compute.Compute
) -> None:
    run.submit()
    cloud.advance(run.recipe.cloud.max_run - 60)
    assert cloud.names() == NAMES
    cloud.advance(61)
    assert cloud.names() == []


def test_machines_that_never_come_up_are_told_apart(tmp_path: Path, cloud: compute.Compute) -> None:
    run = Run(tmp_path, cloud, **{"launch.start_s": 1})
    handle = run.submit()
    place = Rendezvous(handle.about["meet"])
    place.leave(0, ARRIVED)
    place.leave(1, BOOT, phase="pulling the image")
    deadline = time.monotonic() + PATIENCE_S
    while (state := run.launcher.status(handle)) == "queued" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert state == "failed"
    told = {node: note["how"] for node, note in place.notes(EXIT).items()}
    assert set(told) == {1, 2}
    assert "pulling the image" in told[1]
    assert "said nothing" in told[2]
    assert cloud.names() == []


def test_cancel_destroys_and_says_so(run: Run, cloud: compute.Compute) -> None:
    handle = run.submit()
    run.come(handle)
    run.launcher.cancel(handle)
    assert cloud.names() == []
    assert run.launcher.status(handle) == "cancelled"
    run.launcher.cancel(handle)


def test_a_signal_is_a_note_that_nodes_look_for(run: Run, bucket: gcs.Server) -> None:
    handle = run.submit()
    run.launcher.signal(handle, signal.SIGTERM)
    [note] = [
        json.loads(stored.data) for name, stored in bucket.objects.items() if f"/{SIGNAL}-" in name
    ]
    assert note == {"number": 15, "ranks": None}


# Zones, quotas, refusals.
def test_the_next_zone_is_tried_and_nothing_stays_behind(run: Run, cloud: compute.Compute) -> None:
    cloud.rooms["us-central1-a"] = 2
    handle = run.submit()
    assert handle.about["zone"] == "us-central1-b"
    assert cloud.names() == NAMES
    assert {zone for zone, _ in cloud.machines} == {"us-central1-b"}
    assert (
        "us-central1-b.c.p.internal"
        in cloud.machines["us-central1-b", NAMES[0]].metadata["startup-script"]
    )


def test_a_zone_that_knows_no_such_machine_is_passed_over(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    cloud.lacking = {"us-central1-a": {"n1-standard-8"}, "us-central1-b": {"nvidia-tesla-t4"}}
    run = Run(
        tmp_path,
        cloud,
        **{"launch.machine.accelerator": "nvidia-tesla-t4", "launch.machine.accelerators": 1},
    )
    assert run.submit().about["zone"] == "us-central1-c"


@pytest.mark.parametrize(
    "text",
    [
        (
            "Invalid value for field 'resource.machineType':"
            " 'zones/us-east4-a/machineTypes/n2-highcpu-16'. Machine type with name 'n2-highcpu-16'"
            " does not exist in zone 'us-east4-a'."
        ),
        (
            "Invalid value for field 'resource.machineType':"
            " 'https://compute.googleapis.com/compute/v1/projects/p/zones/us-east4-a/machineTypes/n2-highcpu-16'."
            " The referenced resource does not exist."
        ),
        "Invalid value for field 'zone': 'us-east1-a'. Unknown zone.",
        "The resource 'projects/p/zones/us-east1-a' was not found",
        "The resource 'projects/p/zones/us-east1-a/acceleratorTypes/nvidia-l4' was not found",
    ],
)
def test_every_way_of_saying_that_a_zone_has_none_leads_to_the_next(
    run: Run, cloud: compute.Compute, text: str
) -> None:
    cloud.server.fault("Instances.Insert", 400, message=text)
    assert run.submit().about["zone"] == "us-central1-b"


def test_a_region_whose_zones_begin_at_b_and_end_at_d_is_searched(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    cloud.zones = ("us-east1-b", "us-east1-c", "us-east1-d")
    cloud.rooms = {"us-east1-b": 0, "us-east1-c": 0}
    assert (
        Run(tmp_path, cloud, **{"cloud.region": "us-east1"}).submit().about["zone"] == "us-east1-d"
    )


def test_no_room_anywhere_is_one_line_and_may_be_tried_again(
    run: Run, cloud: compute.Compute
) -> None:
    cloud.quota = 5
    cloud.rooms = {"us-central1-a": 1, "us-central1-c": 0, "us-central1-f": 0}
    with pytest.raises(
        NoCapacity,
        match=(
            r"no room for 3 x n1-standard-8 in us-central1-a,"
            r" .*RESOURCE_POOL_EXHAUSTED.*QUOTA_EXCEEDED"
        ),
    ) as caught:
        run.submit()
    assert "\n" not in str(caught.value)
    assert cloud.names() == []
    cloud.quota, cloud.rooms = None, {}
    assert run.submit(2).about["zone"] == "us-central1-a"


def test_a_machine_that_no_zone_knows_is_wrong_input(run: Run, cloud: compute.Compute) -> None:
    cloud.lacking = {zone: {"n1-standard-8"} for zone in cloud.zones}
    with pytest.raises(WrongInput, match="cannot be had in us-central1-a"):
        run.submit()
    assert cloud.names() == []


def test_what_is_refused_for_other_reasons_ends_at_once(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    cloud.server.fault(
        "Instances.Insert",
        403,
        message="Required 'compute.instances.create' permission for 'projects/p'",
    )
    with pytest.raises(WrongInput, match="Compute Instance Admin"):
        Run(tmp_path, cloud).submit()
    assert len(cloud.server.requests("Instances.Insert")) == 1
    with pytest.raises(WrongInput, match="permission"):
        Run(tmp_path / "other", cloud, **{"cloud.project": "q"}).submit()
    assert cloud.names() == []


@pytest.mark.parametrize("code", [429, 503])
def test_a_lost_answer_makes_no_second_machine(run: Run, cloud: compute.Compute, code: int) -> None:
    cloud.server.fault("Instances.Insert", code, times=2, lose=True)
    run.submit()
    assert cloud.names() == NAMES
    assert len({request.request_id for request in cloud.server.requests("Instances.Insert")}) == 3
    assert len(cloud.server.requests("Instances.Insert")) == 5


def test_deleting_is_stopped_on_with_when_the_service_breaks_down(
    run: Run, cloud: compute.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = run.submit()
    run.come(handle)
    run.leave(handle, EXIT, n0=0, n1=0, n2=0)
    monkeypatch.setattr(clients, "PATIENCE_S", 0.05)
    cloud.server.fault("Instances.Delete", 503, times=10_000)
    with pytest.raises(Failed, match="delete the machine"):  # not over before all is gone
        run.launcher.status(handle)
    cloud.server.faults.clear()
    assert run.launcher.status(handle) == "succeeded"
    assert cloud.names() == []


def test_a_run_of_the_same_name_in_another_bucket_is_left_alone(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    ours, theirs = Run(tmp_path / "a", cloud), Run(tmp_path / "b", cloud)
    other = replace(
        job_of(theirs.recipe, 7),
        run_folder_url="gs://bucket/elsewhere",
        rendezvous="gs://bucket/elsewhere/jobs/train-7",
    )
    handle = theirs.launcher.submit(other)
    ours.submit()
    ours.launcher.cancel(ours.submit(2))
    assert cloud.names() == [f"{handle.id}-{node}" for node in range(3)]
    assert theirs.launcher.status(handle) == "queued"


def test_two_runs_of_one_name_in_one_project_run_side_by_side(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    ours, theirs = Run(tmp_path / "a", cloud), Run(tmp_path / "b", cloud)
    other = replace(
        job_of(theirs.recipe),
        run_folder_url="gs://bucket/elsewhere",
        rendezvous="gs://bucket/elsewhere/jobs/train-1",
    )
    handles = [ours.submit(), theirs.launcher.submit(other)]
    assert len(cloud.names()) == 6
    assert [
        run.launcher.status(handle) for run, handle in zip((ours, theirs), handles, strict=True)
    ] == ["queued", "queued"]


def test_what_could_not_be_taken_away_after_a_failure_is_told_beside_its_cause(
    run: Run,
    cloud: compute.Compute,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The network goes while machines are made."""
    monkeypatch.setattr(clients, "PATIENCE_S", 0.0)
    insert = cloud.server.handlers["Instances.Insert"]

    def insert_one(request: Any) -> Any:
        made = insert(request)
        cloud.server.fault("*", 503, times=10**6, message="the network is gone")
        return made

    cloud.server.on("Instances.Insert", insert_one)
    with pytest.raises(Failed) as caught:
        run.submit()
    assert "list" not in str(caught.value)
    told = capsys.readouterr().err
    assert f"machines of {NAME}-1 may be left, and end by themselves after" in told
    assert f"`ingot launch cancel {run.recipe.folder.root}` deletes them" in told
    assert cloud.names() != []
    cloud.server.faults.clear()
    cloud.server.on("Instances.Insert", insert)
    assert run.handle is not None
    run.launcher.cancel(run.handle)
    assert cloud.names() == []


@pytest.mark.drawn("what is sent to Google", keep=2)
@pytest.mark.parametrize("start", [1, 2])
def test_what_another_computer_started_is_left_alone_and_not_started_again(
    tmp_path: Path, cloud: compute.Compute, start: int
) -> None:
    """Whether the number of its start is ours too, or is one that we have never had."""
    here, there = Run(tmp_path / "here", cloud), Run(tmp_path / "there", cloud)
    ended = here.submit()
    here.end(ended, 0)
    assert here.launcher.status(ended) == "succeeded"
    handle = there.submit(start)
    there.come(handle)
    made = cloud.names()
    told = (
        f"{NAME}-{start}-0 in us-central1-a works on this run and was started elsewhere; cancel it"
        " there, or delete it"
    )
    for run in (here, Run(tmp_path / "third", cloud)):
        assert run.launcher.busy(job_of(run.recipe, 3)) == told
        with pytest.raises(Failed, match=told):
            run.submit(3)
    assert here.handle == ended
    here.launcher.status(ended)
    here.launcher.cancel(ended)
    assert cloud.names() == made
    there.launcher.cancel(handle)
    assert cloud.names() == []
    assert here.launcher.busy(job_of(here.recipe, 3)) is None
    here.launcher.cancel(here.submit(3))


def test_after_no_room_here_another_computer_is_not_taken_for_us(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    here, there = Run(tmp_path / "here", cloud), Run(tmp_path / "there", cloud)
    cloud.quota = 0
    with pytest.raises(NoCapacity):
        here.submit()
    cloud.quota = None
    there.submit()
    with pytest.raises(Failed, match="started elsewhere"):
        here.submit()
    assert cloud.names() == NAMES


def test_what_stopped_without_being_deleted_goes_with_the_next_command(
    run: Run, cloud: compute.Compute
) -> None:
    """As a machine does whose account may not delete it."""
    handle = run.submit()
    run.come(handle)
    run.end(handle, 0)
    for machine in cloud.machines.values():
        machine.state = "TERMINATED"
    assert run.launcher.status(handle) == "succeeded"
    assert cloud.names() == []


def test_what_stopped_elsewhere_stands_in_nobody_s_way(
    tmp_path: Path, cloud: compute.Compute
) -> None:
    here, there = Run(tmp_path / "here", cloud), Run(tmp_path / "there", cloud)
    there.submit()
    for machine in cloud.machines.values():
        machine.state = "TERMINATED"
    assert here.submit().id == f"{NAME}-1"
    assert cloud.names() == NAMES
    assert {machine.state for machine in cloud.machines.values()} == {"RUNNING"}


def test_a_job_that_runs_is_not_started_twice(run: Run, cloud: compute.Compute) -> None:
    first = run.submit()
    run.come(first)
    again = GceLauncher(run.recipe).submit(job_of(run.recipe, 2))
    assert again == first
    assert cloud.names() == NAMES
    assert len(cloud.server.requests("Instances.Insert")) == 3


def test_while_machines_are_being_made_nobody_else_removes_them(
    run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    unmade = replace(
        handle, about={key: value for key, value in handle.about.items() if key != "machines"}
    )
    with folder_lock(jobs_folder(run.recipe.folder.root), "train.gce.lock"):
        assert run.launcher.status(unmade) == "queued"
        with pytest.raises(Failed, match="in use"):
            run.submit(2)
    assert cloud.names() == NAMES
    assert run.launcher.status(unmade) == "failed"
    assert cloud.names() == []


# The controller dies between any two calls.
def child(act: Callable[[], None]) -> int:
    """A process of its own that does `act`; its id. It has no connection of ours."""
    pid = os.fork()
    if pid:
        return pid
    try:
        clients._client.cache_clear()
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Killer:
    """Kills a process at its n-th call to Compute Engine: before it is done, or after it was done
    and before it is answered.
    """

    def __init__(self, cloud: compute.Compute, number: int, *, before: bool) -> None:
        self.pid, self._left = 0, number
        for method, handler in list(cloud.server.handlers.items()):
            cloud.server.handlers[method] = functools.partial(self._handle, handler, before)

    def _handle(self, handler: Callable[[Any], Any], before: bool, request: Any) -> Any:
        self._left -= 1
        if self._left == 0 and before:
            self._kill()
            raise google.Refused(503, "the one who asked is dead")
        answer = handler(request)
        if self._left == 0:
            self._kill()
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def watch(self, act: Callable[[], None]) -> bool:
        """Do `act` in a process; whether it was killed."""
        self.pid = child(act)
        _, status = os.waitpid(self.pid, 0)
        self._left = 0
        if os.WIFSIGNALED(status):
            return True
        assert os.WEXITSTATUS(status) == 0, "the controller failed by itself"
        return False


def follow_to_the_end(run: Run, code: int) -> None:
    handle = run.submit()
    run.come(handle)
    run.launcher.status(handle)
    run.end(handle, code)
    while run.launcher.status(handle) not in FINAL_STATES:
        pass


def cancelled_midway(run: Run) -> None:
    handle = run.submit()
    run.come(handle)
    run.launcher.status(handle)
    run.launcher.cancel(handle)


LIVES = {
    "success": lambda run: follow_to_the_end(run, 0),
    "failure": lambda run: follow_to_the_end(run, 1),
    "cancel": cancelled_midway,
    "another zone": cancelled_midway,
}


@pytest.mark.drawn("a controller that is killed")
@pytest.mark.parametrize(
    ("life", "before"),
    [
        ("success", False),
        ("failure", False),
        ("cancel", False),
        ("cancel", True),
        ("another zone", False),
    ],
)
@pytest.mark.parametrize("calls", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_whenever_the_controller_is_killed_nothing_is_left(
    tmp_path: Path, life: str, before: bool, calls: str
) -> None:
    """At every call that it makes to the service, or at every sixth from one drawn by a seed."""
    step = 1 if calls == "every" else 6
    deaths, first = 0, random.Random(f"{life} {before}").randint(1, step)
    for number in range(first, 100, step):
        server = google.Server()
        try:
            cloud = compute.install(server)
            cloud.rooms = {cloud.zones[0]: 1} if life == "another zone" else {}
            run = Run(tmp_path / f"{number}", cloud, **{"launch.nodes": 2})
            killed = Killer(cloud, number, before=before).watch(lambda run=run: LIVES[life](run))  # type: ignore[misc]
            cloud.settle()
            check_what_follows(run, cloud, wait=number // step % 2 == 0)
        finally:
            server.server_close()
        if not killed:
            break
        deaths += 1
    else:
        pytest.fail("it never came to its end")
    assert deaths >= 10 // step
    print(f"\n{life}: killed at {deaths} calls")


def check_what_follows(run: Run, cloud: compute.Compute, *, wait: bool) -> None:
    """After a death: the next command removes what is left, unless it is a job that is whole; and
    if there is none, time does.
    """
    left, handle = cloud.names(), run.handle
    assert left == [] or handle is not None  # what nobody could find again was never made
    if wait:
        cloud.advance(MONTH_S)
        assert cloud.names() == []
        return
    if handle is None:
        return
    launcher = GceLauncher(run.recipe)
    if launcher.status(handle) in FINAL_STATES:
        assert cloud.names() == []
        second = launcher.submit(job_of(run.recipe, 2))
        assert cloud.names() == [f"{NAME}-2-{node}" for node in range(2)]
    else:
        assert cloud.names() == NAMES[:2]  # a whole cluster, which does not need us
        second = launcher.submit(job_of(run.recipe, 2))
        assert second.id == handle.id
    launcher.cancel(second)
    assert cloud.names() == []


@pytest.mark.parametrize("number", [2, 4, 7, 9])
def test_the_next_start_removes_what_a_killed_one_left(
    tmp_path: Path, cloud: compute.Compute, number: int
) -> None:
    run = Run(tmp_path, cloud)
    Killer(cloud, number, before=False).watch(lambda: cancelled_midway(run))
    cloud.settle()
    second = GceLauncher(run.recipe).submit(job_of(run.recipe, 2))
    assert cloud.names() == [f"{second.id}-{node}" for node in range(3)]


def test_an_interrupt_while_machines_are_made_removes_them(
    run: Run, cloud: compute.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = instances.wait_for_zone_operation

    def interrupted(*about: Any, **more: Any) -> None:
        monkeypatch.setattr(instances, "wait_for_zone_operation", looked)
        raise KeyboardInterrupt

    monkeypatch.setattr(instances, "wait_for_zone_operation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.submit()
    cloud.settle()
    assert cloud.names() == []


# What is refused before anything is sent.
@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"launch.machine.type": "n1-standart-8"}, "n1-standard-8"),
        ({"launch.machine.type": "ct5lp-hightpu-4t"}, "TPU"),
        ({"launch.machine.type": "a2-highgpu-1g", "launch.processes": 2}, "launch.processes"),
        ({"launch.machine.flex_start": True}, "Vertex AI"),
        ({"launch.code": "sync"}, "images build"),
        ({"launch.secrets": ["HF_TOKEN"]}, "Secret Manager"),
        ({"cloud.zone": "europe-west4-a"}, "cloud.region"),
        ({"cloud.max_run": "121d"}, "120 days"),
        ({"cloud.max_cost": 1000, "launch.machine.type": "n2-custom-8-16384"}, "cloud.prices"),
        ({"cloud.images.train": None}, "images build train"),
        ({"cloud.max_run": "400s"}, "checkpoint.grace_s"),
        ({"launch.machine.type": "a3-ultragpu-8g"}, "launch.machine.spot"),
        ({"launch.machine.type": "a4-highgpu-8g"}, "launch.kind to vertex"),
        ({"launch.machine.type": "a3-highgpu-2g"}, "neither on demand"),
        (
            {"launch.machine.type": "a4-highgpu-8g", "launch.machine.reservation": "ours"},
            "nor by a plain reservation",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_sent(
    tmp_path: Path, cloud: compute.Compute, knobs: dict[str, Any], told: str
) -> None:
    run = Run(tmp_path, cloud, **knobs)
    job = replace(job_of(run.recipe), secrets=tuple(run.recipe.launch.secrets))
    assert any(told in reason for reason in run.launcher.can(job))
    with pytest.raises(WrongInput, match=r"cannot run with launch\.kind gce"):
        run.launcher.submit(job)
    assert cloud.server.calls == []


@pytest.mark.parametrize(
    ("kind", "disk"),
    [
        ("a3-ultragpu-8g", "hyperdisk-balanced"),
        ("a4-highgpu-8g", "hyperdisk-balanced"),
        ("a3-highgpu-1g", "pd-balanced"),
    ],
)
def test_what_is_not_given_on_demand_can_be_had_as_spot(
    tmp_path: Path, kind: str, disk: str
) -> None:
    recipe = recipe_for(
        tmp_path, None, **{"launch.machine.type": kind, "launch.machine.spot": True}
    )
    assert GceLauncher(recipe).can(job_of(recipe)) == []
    machine = gce_machines.ComputeCluster(recipe, job_of(recipe)).machine(0, "us-central1-a")
    assert machine.disks[0].initialize_params.disk_type == f"zones/us-central1-a/diskTypes/{disk}"


def test_without_a_bucket_there_is_no_cluster(run: Run) -> None:
    assert any(
        "cloud.bucket" in reason
        for reason in run.launcher.can(
            replace(job_of(run.recipe), run_folder_url="", rendezvous="")
        )
    )


# Logs.
def test_the_log_is_what_the_containers_say_each_line_once(
    run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    log = run.launcher.log(handle)
    assert log.read() == b""
    cloud.say(NAMES[0], "step 1", "step 2")
    cloud.say(NAMES[1], "and I")
    assert log.read() == b"[node 0] step 1\n[node 0] step 2\n[node 1] and I\n"
    assert log.read() == b""
    cloud.say(NAMES[2], "late")
    assert log.read() == b"[node 2] late\n"
    assert GceLauncher(run.recipe).log(handle).read().count(b"\n") == 4


def test_more_than_a_page_of_the_log_comes(run: Run, cloud: compute.Compute) -> None:
    handle = run.submit()
    cloud.say(NAMES[0], *(f"line {number}" for number in range(2500)))
    assert run.launcher.log(handle).read().count(b"\n") == 2500


def test_a_machine_that_never_logged_is_heard_on_its_serial_port(
    run: Run, cloud: compute.Compute
) -> None:
    handle = run.submit()
    machine = cloud.machines["us-central1-a", NAMES[0]]
    log = run.launcher.log(handle)
    machine.serial = (
        "[    0.1] Linux\nJan 1 google_metadata_script_runner[9]: startup-script: ingot: pulling"
        " the image\n"
    )
    assert log.read() == f"[{NAMES[0]}] ingot: pulling the image\n".encode()
    assert log.read() == b""
    machine.serial += "startup-script: manifest unknown\nshutting down\n"
    run.leave(handle, EXIT, n0=1, n1=1, n2=1)
    assert run.launcher.status(handle) == "failed"
    said = log.read().decode()
    assert "manifest unknown" in said
    assert "shutting down" in said


def test_once_it_logs_the_serial_port_is_left_alone(run: Run, cloud: compute.Compute) -> None:
    log = run.launcher.log(run.submit())
    cloud.say(NAMES[0], "step 1")
    assert log.read() == b"[node 0] step 1\n"
    cloud.machines["us-central1-a", NAMES[0]].serial = "startup-script: step 1\n"
    assert log.read() == b""


def test_names_fit_and_tell_apart(tmp_path: Path) -> None:
    long = recipe_for(tmp_path, None, name="A_run.with-" + "x" * 80)
    other = recipe_for(tmp_path, None, name="A_run.with-" + "x" * 81)
    names = [
        gce_machines.ComputeCluster(recipe, job_of(recipe)).name(999) for recipe in (long, other)
    ]
    assert len(set(names)) == 2
    assert all(compute.NAME.fullmatch(name) for name in names)
    assert all(
        compute.LABEL_VALUE.fullmatch(value)
        for value in gce_machines.ComputeCluster(long, job_of(long)).labels(0).values()
    )
