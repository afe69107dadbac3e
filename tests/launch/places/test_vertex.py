"""Custom jobs of Vertex AI: what is asked for, what is refused, and how a job is followed, found
again and ended. Against the service's interface.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import write_marker
from ingot.base.runlog import read_lines
from ingot.cloud import clients
from ingot.cloud.vertex import jobs
from ingot.config.recipe import Recipe
from ingot.launch import run_job
from ingot.launch.handles import find_handle, work_fingerprint
from ingot.launch.job import FINAL_STATES, Handle, Job, QueueLauncher
from ingot.launch.places import logs, vertex
from ingot.launch.places.vertex import VertexLauncher
from ingot.launch.rendezvous import EXIT, Rendezvous
from ingot.launch.staging import stage_start
from ingot.launch.supervisor import remote_attempt
from tests import gcs, golden
from tests.fakes import google, vertex_jobs
from tests.fakes.vertex_jobs import STATE
from tests.small import small_recipe

IMAGE = "us-central1-docker.pkg.dev/proj/ingot/ingot-train:latest"
REPLICA = "gs://bucket/ingot/runs/small"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    for module, name, value in (
        (clients, "FIRST_WAIT_S", 0.01),
        (vertex, "FIND_POLL_S", 0.01),
        (logs, "QUERY_INTERVAL_S", 0.0),
        (vertex, "FIND_TIMEOUT_S", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(VertexLauncher, "poll_s", 0.02)
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def service() -> Iterator[vertex_jobs.State]:
    server = google.Server()
    state = vertex_jobs.install(server)
    try:
        yield state
    finally:
        state.close()
        server.server_close()


def recipe_for(root: Path, address: str | None, **knobs: Any) -> Recipe:
    return small_recipe(
        root,
        **{
            "launch.kind": "vertex",
            "launch.nodes": 3,
            "cloud.project": "proj",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.images.train": IMAGE,
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


def launched(
    root: Path, service: vertex_jobs.State, start: Any = 1, **knobs: Any
) -> tuple[VertexLauncher, Handle]:
    recipe = recipe_for(root, service.server.address, **knobs)
    launcher = VertexLauncher(recipe)
    return launcher, launcher.submit(job_of(recipe, start))


def followed(launcher: VertexLauncher, handle: Handle) -> list[str]:
    """The states that it goes through, each once."""
    states: list[str] = []
    while not states or states[-1] not in FINAL_STATES:
        if (state := launcher.status(handle)) not in states[-1:]:
            states.append(state)
    return states


CASES: dict[str, dict[str, Any]] = {
    "plain": {"launch.nodes": 1, "launch.machine": "{type: n1-standard-8}"},
    "gpus": {
        "launch.nodes": 4,
        "launch.processes": 8,
        "launch.machine": "{type: a2-highgpu-8g, spot: true, disk_gb: 500}",
        "cloud.max_run": "24h",
        "cloud.service_account": "trainer@proj.iam.gserviceaccount.com",
        "cloud.network": "projects/123/global/networks/vpc",
        "cloud.tensorboard": "'77'",
        "cloud.labels": "{team: nlp}",
        "cloud.secrets": "{HF_TOKEN: 'secret:hf-token'}",
        "launch.environment": "{NCCL_DEBUG: INFO}",
    },
    "attached": {
        "launch.nodes": 2,
        "launch.processes": 2,
        "launch.machine": (
            "{type: n1-standard-16, accelerator: nvidia-tesla-t4, accelerators: 2, "
            "flex_start: true}"
        ),
        "cloud.network": "projects/proj/regions/us-central1/networkAttachments/psc",
    },
    "reserved": {
        "launch.nodes": 1,
        "launch.processes": 8,
        "launch.machine": "{type: a3-highgpu-8g, reservation: ours}",
        "cloud.zone": "us-central1-a",
    },
    "paid": {
        "launch.nodes": 1,
        "launch.machine": "{type: n1-standard-8, flex_start: true}",
        "cloud.max_run": "48h",
        "cloud.max_cost": 6,
        "cloud.prices": "{n1-standard-8: 3}",
    },
    "tpu": {"launch.nodes": 4, "launch.machine": "{type: ct5lp-hightpu-4t}"},
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_was_rendered_and_the_service_takes_it(
    case: str, tmp_path: Path, service: vertex_jobs.State
) -> None:
    fixed = recipe_for(Path("root"), None, **{"cloud.region": "us-central1", **CASES[case]})
    environment = dict(fixed.launch.environment)
    shown = job_of(fixed, environment=environment)
    golden.check(
        f"vertex/{case}.json",
        VertexLauncher(fixed).render(shown).replace(work_fingerprint(fixed, shown.argv), "WORK"),
    )
    recipe = recipe_for(tmp_path, service.server.address, **CASES[case])
    launcher, job = VertexLauncher(recipe), job_of(recipe, environment=environment)
    handle = launcher.submit(job)
    (sent,) = service.server.requests("JobService.CreateCustomJob")
    mark = sent.custom_job.labels.pop(vertex.MARK)
    assert len(mark) == 16
    assert sent == jobs.custom_job_request(launcher._google, launcher.custom_job(job))
    assert find_handle(recipe.folder.root, "train", "vertex") == handle
    assert (
        handle.log
        == f"https://console.cloud.google.com/vertex-ai/locations/us-central1/training/{handle.id.rpartition('/')[2]}?project=proj"
    )


def test_no_secret_stands_in_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    recipe = recipe_for(tmp_path, None, **{"cloud.secrets": "{HF_TOKEN: 'secret:hf-token'}"})
    shown = VertexLauncher(recipe).render(
        job_of(recipe, environment={"HF_TOKEN": "hf_very_secret"}, secrets=("HF_TOKEN",))
    )
    assert "hf_very_secret" not in shown
    assert "secret:hf-token" in shown


@pytest.mark.parametrize(
    ("knobs", "about", "told"),
    [
        (
            {"launch.machine.type": "a2-highgpu-9g"},
            {},
            "a2-highgpu-9g is not known; the nearest is a2-highgpu-8g",
        ),
        (
            {"launch.machine.type": "a2-highgpu-1g", "launch.processes": 2},
            {},
            "2 processes share 1 accelerators",
        ),
        ({"launch.code": "sync"}, {}, "launch.code sync"),
        ({}, {"secrets": ("HF_TOKEN",)}, "cloud.secrets: {HF_TOKEN: secret:NAME}"),
        ({"cloud.bucket": None}, {"run_folder_url": None}, "set cloud.bucket"),
        ({"cloud.network": "default"}, {}, "projects/NUMBER/global/networks/NAME"),
        (
            {"cloud.tensorboard": "'7'"},
            {},
            "cloud.tensorboard needs an account of its own on Vertex AI; set cloud.service_account",
        ),
        (
            {"cloud.secrets": "{HF_TOKEN: 'secret:hf-token'}"},
            {},
            "cloud.secrets needs an account of its own on Vertex AI; set cloud.service_account",
        ),
        ({"launch.machine.reservation": "ours"}, {}, "set cloud.zone"),
        ({"cloud.images.train": None}, {}, "no container image for train"),
        ({"launch.machine.type": "ct5lp-hightpu-4t"}, {}, "12 chips"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is_sent(
    knobs: dict[str, Any],
    about: dict[str, Any],
    told: str,
    tmp_path: Path,
    service: vertex_jobs.State,
) -> None:
    recipe = recipe_for(tmp_path, service.server.address, **knobs)
    values = {"rendezvous": f"{REPLICA}/jobs/train-1", "run_folder_url": REPLICA, **about}
    job = Job("train", ("train", "x.yaml"), recipe.launch.processes, recipe.launch.nodes, **values)
    launcher = VertexLauncher(recipe)
    assert any(told in reason for reason in launcher.can(job)), launcher.can(job)
    with pytest.raises(WrongInput, match=r"cannot run with launch.kind vertex"):
        launcher.submit(job)
    assert not service.server.calls


@pytest.mark.parametrize("given", ["77", "projects/other/locations/us-central1/tensorboards/77"])
def test_a_tensorboard_goes_by_its_id_or_its_whole_name(given: str, tmp_path: Path) -> None:
    recipe = recipe_for(
        tmp_path,
        None,
        **{
            "cloud.tensorboard": f"'{given}'",
            "cloud.service_account": "trainer@proj.iam.gserviceaccount.com",
        },
    )
    launcher = VertexLauncher(recipe)
    assert launcher.can(job_of(recipe)) == []
    project = "other" if "/" in given else "proj"
    assert (
        launcher.custom_job(job_of(recipe))["jobSpec"]["tensorboard"]
        == f"projects/{project}/locations/us-central1/tensorboards/77"
    )


def test_a_job_goes_from_the_queue_to_its_end(tmp_path: Path, service: vertex_jobs.State) -> None:
    assert followed(*launched(tmp_path, service)) == ["queued", "running", "succeeded"]


def test_a_job_is_paid_for_since_it_runs(tmp_path: Path, service: vertex_jobs.State) -> None:
    launcher, handle = launched(tmp_path, service)
    assert isinstance(launcher, QueueLauncher)
    assert launcher.waited_s(handle) is None
    followed(launcher, handle)
    job = service.jobs[handle.id]
    job.create_time = job.start_time - timedelta(hours=2)
    assert launcher.waited_s(handle) == 7200


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        (
            (
                "JOB_STATE_FAILED",
                3,
                "The replica workerpool0-0 exited with a non-zero status of 1.",
            ),
            "failed",
        ),
        (("JOB_STATE_FAILED", 10, "The replica workerpool1-0 was preempted."), "preempted"),
        (
            (
                "JOB_STATE_FAILED",
                8,
                "Resources are insufficient in region: us-central1. Please try a different region.",
            ),
            "preempted",
        ),
        (
            ("JOB_STATE_FAILED", 13, "Internal error occurred for the current attempt."),
            "preempted",
        ),
        (("JOB_STATE_EXPIRED", 0, ""), "preempted"),
        (("JOB_STATE_PARTIALLY_SUCCEEDED", 0, ""), "failed"),
    ],
)
def test_what_the_place_did_is_told_from_what_the_job_did(
    ending: tuple[str, int, str], state: str, tmp_path: Path, service: vertex_jobs.State
) -> None:
    reached = getattr(STATE, ending[0])
    service.endings = [(reached, *ending[1:])]
    launcher, handle = launched(tmp_path, service)
    service.jobs[handle.id].state = STATE.JOB_STATE_RUNNING
    if reached == STATE.JOB_STATE_PARTIALLY_SUCCEEDED:
        service.jobs[handle.id].state = reached
    assert launcher.status(handle) == state


@pytest.mark.parametrize(
    ("codes", "asked", "state"),
    [
        ((75, 75, 75), True, "cancelled"),
        ((75, 75, 75), False, "preempted"),
        ((143, 143, 143), True, "cancelled"),  # before there was anything to save
        ((75, 1, 75), True, "failed"),
        ((75, 75), True, "failed"),  # one was killed
        ((3, 3, 3), False, "succeeded"),  # a gate that keeps what is live
    ],
)
def test_what_stopped_in_good_order_has_not_failed(
    codes: tuple[int, ...],
    asked: bool,
    state: str,
    tmp_path: Path,
    service: vertex_jobs.State,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service calls every code but 0 a failure."""
    said = f"The replica workerpool0-0 exited with a non-zero status of {codes[0]}."
    service.endings = [(STATE.JOB_STATE_FAILED, 3, said)]
    launcher, handle = launched(tmp_path, service)
    if asked:
        launcher.signal(handle, signal.SIGTERM)
    for node, code in enumerate(codes):
        Rendezvous(handle.about["meet"]).leave(node, EXIT, rank=node, code=code)
    assert followed(launcher, handle)[-1] == state

    def no_answer(meeting: Rendezvous, kind: str) -> None:
        raise Failed("the bucket does not answer")

    monkeypatch.setattr(Rendezvous, "notes", no_answer)
    assert launcher.status(handle) == "failed", "it is over"


def test_a_lost_answer_makes_no_second_job(tmp_path: Path, service: vertex_jobs.State) -> None:
    service.server.fault("JobService.CreateCustomJob", 503, lose=True)
    _, handle = launched(tmp_path, service)
    assert list(service.jobs) == [handle.id]


def test_a_job_that_was_never_made_is_told_and_not_made_twice(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    service.server.fault("JobService.CreateCustomJob", 503)
    with pytest.raises(Failed, match="could not make the job ingot-small-train-1"):
        launched(tmp_path, service)
    assert not service.jobs
    assert len(service.server.requests("JobService.CreateCustomJob")) == 1


def test_a_used_up_quota_is_told_at_once(
    tmp_path: Path, service: vertex_jobs.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vertex, "FIND_TIMEOUT_S", 3600.0)
    service.quota = 2
    with pytest.raises(Failed, match=r"custom_model_training_cpus.*a quota is used up"):
        launched(tmp_path, service)


@pytest.mark.parametrize("region", ["europe-west4", "us-central1"])
def test_a_region_or_project_without_the_service_is_told(
    region: str, tmp_path: Path, service: vertex_jobs.State
) -> None:
    service.region = "europe-west1"
    with pytest.raises(WrongInput, match=r"not found.*cloud\.region"):
        launched(tmp_path, service, 1, **{"cloud.region": region})


def test_a_missing_right_names_the_role(tmp_path: Path, service: vertex_jobs.State) -> None:
    service.server.fault(
        "JobService.CreateCustomJob",
        403,
        message="Permission 'aiplatform.customJobs.create' denied",
    )
    with pytest.raises(WrongInput, match=r"customJobs.create.*Vertex AI User"):
        launched(tmp_path, service)


def test_a_job_that_is_alive_is_found_again_by_a_command_that_knows_nothing_of_it(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    """As when whoever submitted it was killed before it had the answer, or the pipeline tries its
    step again on another machine.
    """
    launcher, first = launched(tmp_path, service, start=1)
    _, other = launched(tmp_path, service, start=1, name="else")
    forget(tmp_path)
    assert launcher.busy(job_of(launcher._recipe, start=2)) is None
    _, again = launched(tmp_path, service, start=2, **{"cloud.max_run": "9h"})
    assert again.id == first.id
    assert again.about["meet"] == f"{REPLICA}/jobs/train-1"
    assert other.id != first.id
    assert len(service.jobs) == 2


def test_the_same_command_on_another_machine_follows_the_job_and_changes_nothing_of_its_folder(
    tmp_path: Path,
    service: vertex_jobs.State,
    bucket: gcs.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the notes by which its nodes meet, though both machines count their starts from 1,
    nor the data that they read.
    """

    def on(machine: str) -> tuple[Recipe, Job]:
        (tmp_path / machine).mkdir()
        monkeypatch.chdir(tmp_path / machine)
        recipe = recipe_for(Path(), service.server.address, **{"launch.nodes": 1, "output": "runs"})
        recipe.folder.columns.mkdir(parents=True)
        write_marker(recipe.folder.columns, "manifest.json", {"made": machine}, [])
        return recipe, run_job.job_of(recipe, "train", distributed=True)

    recipe, job = on("first")
    handle = VertexLauncher(recipe).submit(stage_start(recipe, job))
    Rendezvous(handle.about["meet"]).leave(0, EXIT, rank=0, code=0)
    there = dict(bucket.objects)
    recipe, job = on("second")
    assert run_job.run_job(recipe, job, supervised=False).code == 0
    found = find_handle(recipe.folder.root, "train", "vertex")
    assert found is not None
    assert (found.id, found.about["meet"]) == (handle.id, handle.about["meet"])
    assert bucket.objects == there
    assert len(service.jobs) == 1


def test_a_job_that_does_something_else_is_not_taken_for_the_one_that_is_wanted(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    """Neither another recipe, nor other arguments, nor one of which that cannot be told."""
    launcher, first = launched(tmp_path, service)
    forget(tmp_path)
    other = VertexLauncher(
        recipe_for(tmp_path, service.server.address, **{"train.optimizer.lr": 0.5})
    )
    wanted = job_of(launcher._recipe, start=2)
    fresh = replace(wanted, argv=(*wanted.argv, "--fresh"))
    told = f"train runs already as vertex job {first.id}, submitted elsewhere with another recipe"
    for place, job in ((other, wanted), (launcher, fresh)):
        assert (place.busy(job) or "").startswith(told)
        with pytest.raises(Failed, match=told):
            place.submit(job)
    assert find_handle(tmp_path / "runs/small", "train", "vertex") is None
    del service.jobs[first.id].labels["ingot-work"]
    assert launcher.busy(wanted) is not None
    assert len(service.jobs) == 1


def forget(root: Path) -> None:
    """As on another machine."""
    for path in (root / "runs/small/jobs").glob("train.vertex.*"):
        path.unlink()


def test_of_several_alive_only_the_newest_is_left(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    _, first = launched(tmp_path, service)
    service.jobs[first.id].labels.pop("ingot-run")
    _, second = launched(tmp_path, service)
    service.jobs[first.id].labels["ingot-run"] = "small"
    _, third = launched(tmp_path, service)
    assert third.id == second.id
    assert service.jobs[first.id].state == STATE.JOB_STATE_CANCELLING


def test_notes_of_a_run_that_had_the_name_before_are_gone(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    old = Rendezvous(f"{REPLICA}/jobs/train-1")
    old.leave(0, "exit", rank=0, code=1)
    launched(tmp_path, service)
    assert old.notes("exit") == {}


def test_cancel_waits_until_the_job_is_stopped_and_may_be_asked_twice(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    launcher, handle = launched(tmp_path, service)
    launcher.cancel(handle)
    assert launcher.status(handle) == "cancelled"
    launcher.cancel(handle)
    assert len(service.server.requests("JobService.CancelCustomJob")) == 1


@pytest.mark.parametrize(
    ("codes", "state"),
    [((0, 0, 0), "succeeded"), ((1, 1, 1), "failed"), ((0,), "cancelled"), ((), "cancelled")],
)
def test_a_job_that_was_deleted_in_the_console_is_over(
    codes: tuple[int, ...], state: str, tmp_path: Path, service: vertex_jobs.State
) -> None:
    """Else every later command would wait for it to answer."""
    launcher, handle = launched(tmp_path, service)
    meeting = Rendezvous(handle.about["meet"])
    for node, code in enumerate(codes):
        meeting.leave(node, EXIT, rank=node, code=code)
    service.jobs.clear()
    assert launcher.status(handle) == state
    assert launcher.waited_s(handle) == 0.0
    launcher.cancel(handle)
    assert launcher.submit(job_of(launcher._recipe, 2)).id in service.jobs


def test_a_job_of_the_region_before_is_found_and_is_not_started_again(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    launcher, handle = launched(tmp_path, service)
    asked = list[str]()
    real = jobs.get_custom_job

    def get(client: clients.GoogleClients, name: str) -> jobs.CustomJobStatus | None:
        asked.append(client.cloud.region)
        return real(client, name)

    recipe = recipe_for(tmp_path, service.server.address, **{"cloud.region": "us-east4"})
    moved = VertexLauncher(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "get_custom_job", get)
        assert moved.status(handle) == "queued"
        again = moved.submit(job_of(recipe, 2))
        assert again.id == handle.id
        assert [job.state for job in service.alive] == [STATE.JOB_STATE_PENDING]
        assert "/locations/us-central1/" in again.log
        moved.cancel(handle)
    assert set(asked) == {"us-central1"}
    assert launcher.status(handle) == "cancelled"


def test_a_signal_goes_by_a_note_that_the_nodes_look_for(
    tmp_path: Path, service: vertex_jobs.State
) -> None:
    launcher, handle = launched(tmp_path, service)
    launcher.signal(handle, signal.SIGTERM)
    (asked,) = Rendezvous(handle.about["meet"]).signals(set())
    assert asked["number"] == signal.SIGTERM


def test_the_log_tells_who_says_what(tmp_path: Path, service: vertex_jobs.State) -> None:
    launcher, handle = launched(tmp_path, service)
    log, number = launcher.log(handle), handle.id.rpartition("/")[2]
    assert log.read() == b""
    service.say(number, "step 1", task="workerpool1-0")
    assert log.read() == b"[workerpool1-0] step 1\n"
    assert log.read() == b""
    alone, one = launched(tmp_path / "one", service, name="alone", **{"launch.nodes": 1})
    service.say(one.id.rpartition("/")[2], "step 2")
    assert alone.log(one).read() == b"step 2\n"


@pytest.mark.slow
def test_a_training_on_two_workers_whose_machines_are_taken_away_goes_on_from_its_checkpoint(
    root: Path,
    tmp_path: Path,
    service: vertex_jobs.State,
    bucket: gcs.Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The containers' commands really run, each in a folder of its own; all that they share is the
    bucket.
    """
    monkeypatch.setattr(remote_attempt, "HEARTBEAT_POLL_S", 0.5)
    monkeypatch.setattr(VertexLauncher, "poll_s", 0.5)
    monkeypatch.setattr(VertexLauncher, "_image", lambda self, job: IMAGE)
    service.workers = tmp_path / "workers"
    recipe = recipe_for(
        root,
        service.server.address,
        **{
            "launch.nodes": 2,
            "output": "runs",
            "train.steps": 12,
            "checkpoint.every": 3,
            "parallel.shard": 2,
            "launch.environment": "{OMP_NUM_THREADS: '1', GLOO_SOCKET_IFNAME: lo}",
        },
    )
    monkeypatch.chdir(root)
    taken: list[str] = []

    def get(request: Any, really: Any = service.get) -> Any:
        has_saved = any(
            name.startswith("ingot/runs/small/checkpoints/step-") and name.endswith("COMMIT.json")
            for name in list(bucket.objects)
        )
        if not taken and has_saved and (alive := service.alive):
            taken.append(alive[0].name)
            service.take(alive[0].name)
        return really(request)

    service.server.on("JobService.GetCustomJob", get)
    job = run_job.job_of(recipe, "train", distributed=True)
    ended = run_job.run_job(recipe, job, supervised=True)
    assert ended.code == 0
    assert len(taken) == 1
    assert len(service.jobs) == 2
    steps = [line["step"] for line in read_lines(recipe.folder.metrics) if "train/loss" in line]
    assert len(set(steps)) == len(steps)  # of those before, some may have gone with the machines
    assert steps[-8:] == list(range(5, 13))
    assert (
        "going on after step"
        in (
            service.workers / list(service.jobs)[1].rpartition("/")[2] / "workerpool0-0/log"
        ).read_text()
    )
    assert (recipe.folder.model / "config.json").exists()
    assert os.environ.get("CLUSTER_SPEC") is None
