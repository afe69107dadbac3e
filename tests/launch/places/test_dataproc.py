"""Batches of Spark as a service, by the real client against a service that checks what it is asked:
made once, followed, ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.remote.replica import pull, replica_url
from ingot.base.runfolder import folder_lock
from ingot.cloud import clients, data_jobs
from ingot.config.recipe import Recipe
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.launch.handles import find_handle, jobs_folder, work_fingerprint
from ingot.launch.job import AdoptingLauncher, Job
from ingot.launch.places.dataproc import DataprocLauncher
from ingot.launch.rendezvous import EXIT, Rendezvous
from ingot.launch.staging import put_inputs, recipe_for_nodes
from tests import gcs, golden
from tests.data.engines.places import SPARK, needs_spark
from tests.data.small import everything
from tests.fakes import dataproc
from tests.fakes.google import Refused, Server
from tests.house.source import PROJECT
from tests.patience import PATIENCE_S
from tests.small import small_recipe, write_documents

IMAGE = "us-central1-docker.pkg.dev/proj/images/ingot-spark:latest"
CLOUD = {
    "cloud__project": "proj",
    "cloud__bucket": "bucket",
    "cloud__repository": "images",
    "cloud__service_account": "spark@proj.iam.gserviceaccount.com",
    "cloud__subnetwork": "private",
    "cloud__max_run": "2h",
    "cloud__labels": '{team: "Data Team"}',
    "cloud__secrets": '{HF_TOKEN: "secret:hf-token/3"}',
    "pipeline__spark__properties": '{spark.executor.instances: "20"}',
    "launch__kind": "dataproc",
}
MIRROR = "gs://bucket/ingot/runs/small"
OURS = {"ingot-run": "small", "ingot-verb": "prepare", "ingot-replica": fingerprint(MIRROR)}
JOB = Job(
    "prepare",
    ("prepare", "runs/small/jobs/nodes.prepare.yaml"),
    environment={"COLOUR": "blue"},
    rendezvous=f"{MIRROR}/jobs/prepare-1",
    run_folder_url=MIRROR,
)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


@pytest.fixture
def service(bucket: gcs.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dataproc.State]:
    monkeypatch.setattr(data_jobs, "LOOK_S", 0.05)
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.05)
    server = Server()
    yield dataproc.install(server, bucket)
    server.server_close()


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: dataproc.State
) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)

    def make(**knobs: Any) -> Recipe:
        return small_recipe(
            tmp_path,
            **{"cloud__endpoint": service.server.address, **CLOUD, "output": "runs", **knobs},
        )

    return make


def wait_for(
    state: str, launcher: DataprocLauncher, handle: Any, seconds: float = PATIENCE_S
) -> None:
    until = time.monotonic() + seconds
    while (now := launcher.status(handle)) != state:
        assert time.monotonic() < until, f"still {now}"
        time.sleep(0.05)


def test_what_would_be_sent_is_written_down(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    recipe = made()
    text = DataprocLauncher(recipe).render(JOB).replace(work_fingerprint(recipe, JOB.argv), "WORK")
    golden.check("dataproc.txt", text.replace(service.server.address, "http://ENDPOINT"))
    assert not service.server.calls


def test_a_batch_is_made_as_it_was_rendered(
    made: Callable[..., Recipe], service: dataproc.State, bucket: gcs.Server
) -> None:
    recipe = made()
    launcher = DataprocLauncher(recipe)
    handle = launcher.submit(JOB)
    (request,) = service.server.requests("BatchController.CreateBatch")
    batch = request.batch
    assert request.parent == "projects/proj/locations/us-central1"
    assert (request.batch_id, len(request.request_id)) == (handle.id, 36)
    script = batch.pyspark_batch.main_python_file_uri
    assert bucket.objects[script.removeprefix("gs://bucket/")].data.startswith(
        b'"""What Spark starts'
    )
    about, *args = batch.pyspark_batch.args
    assert json.loads(about) == {
        "environment": {"COLOUR": "blue"},
        "secrets": {"HF_TOKEN": "secret:hf-token/3"},
        "cloud": {"project": "proj", "region": "us-central1", "endpoint": service.server.address},
    }
    engine = args.pop()
    assert args == [
        "--rendezvous",
        JOB.rendezvous,
        "--run-folder-url",
        MIRROR,
        "--run-folder",
        "runs/small",
        "--",
        "prepare",
        "runs/small/jobs/nodes.prepare.yaml",
    ]
    assert engine == f'data.engine={{"kind": "spark", "shared": "{MIRROR}"}}'
    assert (batch.runtime_config.version, batch.runtime_config.container_image) == ("2.3", IMAGE)
    assert dict(batch.runtime_config.properties) == {
        "spark.executor.instances": "20",
        "spark.executorEnv.COLOUR": "blue",
    }
    execution = batch.environment_config.execution_config
    assert execution.service_account == "spark@proj.iam.gserviceaccount.com"
    assert execution.subnetwork_uri == "projects/proj/regions/us-central1/subnetworks/private"
    assert not execution.network_uri
    assert (
        execution.ttl.total_seconds(),
        list(execution.network_tags),
        execution.staging_bucket,
    ) == (7200, ["ingot"], "bucket")
    labels = dict(batch.labels)
    assert labels.pop("team").startswith("data-team")
    assert labels == {
        **OURS,
        "ingot-attempt": "1",
        "ingot-work": work_fingerprint(recipe, JOB.argv),
    }


@pytest.mark.parametrize(
    ("knobs", "field", "value"),
    [
        ({"pipeline__spark__version": '"1.2"'}, "runtime_config.version", "1.2"),
        (
            {"cloud__images": '{spark: "europe-docker.pkg.dev/p/r/s:1"}'},
            "runtime_config.container_image",
            "europe-docker.pkg.dev/p/r/s:1",
        ),
        ({"cloud__max_run": "20m"}, "environment_config.execution_config.ttl", "0:20:00"),
        (
            {"cloud__subnetwork": None, "cloud__network": "net"},
            "environment_config.execution_config.network_uri",
            "projects/proj/global/networks/net",
        ),
        (
            {"cloud__subnetwork": "projects/host/regions/us-central1/subnetworks/default"},
            "environment_config.execution_config.subnetwork_uri",
            "projects/host/regions/us-central1/subnetworks/default",
        ),
        (
            {"cloud__service_account": None},
            "environment_config.execution_config.service_account",
            "",
        ),
    ],
)
def test_knobs_reach_the_request(
    knobs: dict[str, Any],
    field: str,
    value: str,
    made: Callable[..., Recipe],
    service: dataproc.State,
) -> None:
    DataprocLauncher(made(**knobs)).submit(JOB)
    found = service.server.requests("BatchController.CreateBatch")[0].batch
    for name in field.split("."):
        found = getattr(found, name)
    assert str(found) == value


def test_settings_of_a_spark_engine_go_along(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    DataprocLauncher(
        made(
            data__engine__workers=None,
            data__engine='{kind: spark, partitions: 9, conf: {a: b}, master: "local[2]"}',
        )
    ).submit(JOB)
    engine = service.server.requests("BatchController.CreateBatch")[0].batch.pyspark_batch.args[-1]
    assert json.loads(engine.removeprefix("data.engine=")) == {
        "kind": "spark",
        "shared": MIRROR,
        "partitions": 9,
        "conf": {"a": "b"},
    }


@pytest.mark.parametrize(
    ("change", "knobs", "told"),
    [
        ({"name": "train"}, {}, "not train"),
        ({"nodes": 2}, {}, r"launch\.nodes=1"),
        ({"run_folder_url": None}, {}, r"cloud\.bucket"),
        ({"secrets": ("TOKEN",)}, {}, r"cloud\.secrets"),
        ({"time_limit_s": 60.0}, {}, "10 minutes"),
        ({}, {"cloud__max_run": "30d"}, "14 days"),
        ({}, {"cloud__repository": None}, r"cloud\.images\.spark"),
        ({}, {"data__engine__workers": None, "data__engine": "{kind: beam}"}, "dataflow"),
        ({}, {"pipeline__spark__properties": '{executor.instances: "2"}'}, r"spark\.NAME"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_is_sent(
    change: dict[str, Any],
    knobs: dict[str, Any],
    told: str,
    made: Callable[..., Recipe],
    service: dataproc.State,
    bucket: gcs.Server,
) -> None:
    launcher, job = DataprocLauncher(made(**knobs)), dataclasses.replace(JOB, **change)
    assert len(launcher.can(job)) == 1
    with pytest.raises(WrongInput, match=told):
        launcher.submit(job)
    assert not service.server.calls
    assert not bucket.objects


def test_it_can_do_what_it_can(made: Callable[..., Recipe]) -> None:
    assert DataprocLauncher(made()).can(JOB) == []
    assert DataprocLauncher(made()).can(dataclasses.replace(JOB, name="ingest")) == []


def test_states_and_what_it_says(made: Callable[..., Recipe], service: dataproc.State) -> None:
    launcher = DataprocLauncher(made())
    service.running_s = 10**6
    handle = launcher.submit(JOB)
    log = launcher.log(handle)
    assert launcher.status(handle) == "queued"
    assert log.read() == b""
    wait_for("running", launcher, handle)
    (running,) = service.batches.values()
    service.say(running.batch, 0, b"one\n")
    assert log.read() == b"one\n"
    service.say(running.batch, 0, b"one\ntwo\n")
    service.say(running.batch, 1, b"three\n")
    assert log.read() == b"two\nthree\n"
    assert log.read() == b""
    service.running_s = 0
    assert launcher.status(handle) == "succeeded"
    service.fails = "Insufficient quota"
    assert launcher.status(handle) == "failed"


def test_a_lost_answer_makes_no_second_batch(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    service.server.fault("BatchController.CreateBatch", 503, lose=True)
    launcher = DataprocLauncher(made())
    handle = launcher.submit(JOB)
    assert [
        request.batch_id for request in service.server.requests("BatchController.CreateBatch")
    ] == [handle.id, handle.id]
    assert list(service.batches) == [handle.id]


AGAIN = dataclasses.replace(JOB, rendezvous=f"{MIRROR}/jobs/prepare-2")
"""The same job of another command."""


@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_command_that_is_repeated_while_it_runs_makes_no_second_batch(
    when: str, made: Callable[..., Recipe], service: dataproc.State
) -> None:
    service.pending_s, service.running_s = (10**6, 1) if when == "queued" else (0, 10**6)
    recipe = made()
    first = DataprocLauncher(recipe).submit(JOB)
    wait_for(when, DataprocLauncher(recipe), first)
    assert DataprocLauncher(recipe).submit(AGAIN) == first
    assert list(service.batches) == [first.id]
    with (
        folder_lock(jobs_folder(recipe.folder.root), "prepare.dataproc.lock"),
        pytest.raises(Failed, match="in use"),
    ):
        DataprocLauncher(recipe).submit(AGAIN)
    DataprocLauncher(recipe).cancel(first)
    assert DataprocLauncher(recipe).submit(AGAIN).id != first.id, "another start is another batch"


def test_a_batch_whose_handle_is_lost_is_found_by_its_labels(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    """As when the pipeline tries its step again in another container."""
    service.running_s = 10**6
    DataprocLauncher(made(name="other")).submit(
        dataclasses.replace(JOB, run_folder_url="gs://bucket/ingot/runs/other")
    )
    recipe = made()
    first = DataprocLauncher(recipe).submit(JOB)
    (jobs_folder(recipe.folder.root) / "prepare.dataproc.json").unlink()
    launcher = DataprocLauncher(recipe)
    assert isinstance(launcher, AdoptingLauncher)
    assert launcher.runs(AGAIN)
    again = DataprocLauncher(recipe).submit(AGAIN)
    assert (again.id, again.about["meet"]) == (first.id, JOB.rendezvous)
    assert find_handle(recipe.folder.root, "prepare", "dataproc") == again
    assert len(service.batches) == 2
    changed = DataprocLauncher(made(tokenizer__vocab_size=300))
    (jobs_folder(recipe.folder.root) / "prepare.dataproc.json").unlink()
    assert f"{first.id}, submitted elsewhere with another recipe" in (changed.busy(AGAIN) or "")
    with pytest.raises(Failed, match="submitted elsewhere with another recipe"):
        changed.submit(AGAIN)
    assert DataprocLauncher(recipe).busy(AGAIN) is None
    assert DataprocLauncher(recipe).submit(AGAIN) is not None
    elsewhere = dataclasses.replace(JOB, run_folder_url="gs://another/runs/small")
    (jobs_folder(recipe.folder.root) / "prepare.dataproc.json").unlink()
    assert DataprocLauncher(recipe).submit(elsewhere).id != first.id, (
        "a run of this name with another replica"
    )


def test_a_service_that_is_busy_is_asked_again(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    launcher = DataprocLauncher(made())
    service.server.fault("BatchController.CreateBatch", 429, times=2)
    handle = launcher.submit(JOB)
    service.server.fault("BatchController.GetBatch", 503, times=2)
    # It may have begun while the client waited before it asked again.
    assert launcher.status(handle) in ("queued", "running")


@pytest.mark.parametrize(
    ("code", "told"), [(403, "Dataproc Editor"), (404, r"cloud\.project"), (400, "mend the recipe")]
)
def test_what_the_service_refuses_is_one_line(
    code: int, told: str, made: Callable[..., Recipe], service: dataproc.State
) -> None:
    service.server.fault("BatchController.CreateBatch", code)
    with pytest.raises(WrongInput, match=told) as refused:
        DataprocLauncher(made()).submit(JOB)
    assert "\n" not in str(refused.value)
    assert not service.batches


def test_another_regions_subnetwork_and_an_unknown_runtime_are_refused(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    with pytest.raises(WrongInput, match="not found in region"):
        DataprocLauncher(made(cloud__subnetwork="elsewhere")).submit(JOB)
    with pytest.raises(WrongInput, match=r"runtime version: 9\.9"):
        DataprocLauncher(made(pipeline__spark__version='"9.9"')).submit(JOB)


def test_killed_before_or_after_the_request_the_handle_tells_which(
    made: Callable[..., Recipe], service: dataproc.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = made()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_jobs, "create_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            DataprocLauncher(recipe).submit(JOB)
    handle = find_handle(recipe.folder.root, "prepare", "dataproc")
    assert handle is not None
    assert DataprocLauncher(recipe).status(handle) == "failed", "there is none"
    DataprocLauncher(recipe).cancel(handle)
    create = data_jobs.create_batch

    def killed_after(*arguments: Any) -> None:
        create(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(data_jobs, "create_batch", killed_after)
        with pytest.raises(KeyboardInterrupt):
            DataprocLauncher(recipe).submit(JOB)
    handle = find_handle(recipe.folder.root, "prepare", "dataproc")
    assert handle is not None
    assert service.alive == [handle.id]
    DataprocLauncher(recipe).cancel(handle)
    assert service.alive == []


@pytest.mark.parametrize("when", ["queued", "running", "succeeded"])
def test_cancelled_it_is_stopped(
    when: str, made: Callable[..., Recipe], service: dataproc.State
) -> None:
    launcher = DataprocLauncher(made())
    service.pending_s, service.running_s = {
        "queued": (10**6, 1),
        "running": (0, 10**6),
        "succeeded": (0, 0),
    }[when]
    handle = launcher.submit(JOB)
    wait_for(when, launcher, handle)
    launcher.cancel(handle)
    assert launcher.status(handle) == ("succeeded" if when == "succeeded" else "cancelled")
    assert service.alive == []


def test_one_that_does_not_end_is_told(
    made: Callable[..., Recipe], service: dataproc.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_jobs, "GONE_S", 0.0)
    service.pending_s = service.ending_s = 10**6
    launcher = DataprocLauncher(made())
    handle = launcher.submit(JOB)
    with pytest.raises(Failed, match="still is CANCELLING"):
        launcher.cancel(handle)


def test_a_signal_is_a_note_for_the_driver(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    launcher = DataprocLauncher(made())
    launcher.signal(launcher.submit(JOB), signal.SIGTERM)
    (note,) = Rendezvous(JOB.rendezvous or "").signals(set())
    assert note["number"] == signal.SIGTERM


def test_a_runs_batches_are_found_by_their_labels(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    recipe = made()
    handle = DataprocLauncher(recipe).submit(JOB)
    DataprocLauncher(made(name="other")).submit(JOB)
    found = data_jobs.labelled_batches(
        clients.GoogleClients(recipe.cloud), {"ingot-run": "small", "ingot-verb": "prepare"}
    )
    assert [standing.name.rpartition("/")[2] for standing in found] == [handle.id]


def test_a_page_that_fails_is_told_in_one_line(
    made: Callable[..., Recipe], service: dataproc.State
) -> None:
    recipe = made()
    for number in range(5):
        DataprocLauncher(recipe).submit(
            dataclasses.replace(
                JOB,
                run_folder_url=f"gs://bucket/runs/{number}",
                rendezvous=f"gs://bucket/runs/{number}/jobs/prepare-1",
            )
        )
        (jobs_folder(recipe.folder.root) / "prepare.dataproc.json").unlink()
    assert (
        len(data_jobs.labelled_batches(clients.GoogleClients(recipe.cloud), {"ingot-run": "small"}))
        == 5
    )
    listed = service.server.handlers["BatchController.ListBatches"]

    def fails_later(request: Any) -> Any:
        if request.page_token:
            raise Refused(403, "no more of it")
        return listed(request)

    service.server.on("BatchController.ListBatches", fails_later)
    with pytest.raises(WrongInput, match=r"could not list Spark batches: .*no more of it"):
        data_jobs.labelled_batches(clients.GoogleClients(recipe.cloud), {"ingot-run": "small"})


@pytest.mark.parametrize("name", ["x" * 100, "Ünicode Name", "a_b.c-", "9"])
def test_any_runs_name_makes_an_id_that_the_service_takes(
    name: str, made: Callable[..., Recipe], service: dataproc.State
) -> None:
    launcher = DataprocLauncher(made())
    launcher._recipe = launcher._recipe.model_copy(update={"name": name})
    launcher.submit(JOB)
    assert len(service.batches) == 1


@pytest.mark.drawn("another engine, the same files")
@needs_spark
def test_the_batch_really_prepares_what_this_machine_would(
    made: Callable[..., Recipe], service: dataproc.State, bucket: gcs.Server, tmp_path: Path
) -> None:
    """Spark's own submit runs the driver that was uploaded, in a folder of its own; all it has of
    this machine is the bucket.
    """
    write_documents(tmp_path / "text")
    recipe = made(cloud__secrets=None)
    ingest(recipe)
    mirror = replica_url("bucket", recipe.name)
    job = dataclasses.replace(
        JOB,
        run_folder_url=mirror,
        rendezvous=f"{mirror}/jobs/prepare-1",
        environment={"TOKENIZERS_PARALLELISM": "false"},
    )
    put_inputs(recipe, job)
    assert recipe_for_nodes(recipe, mirror).launch.kind == "local"

    def submit(batch: Any) -> tuple[int, bytes]:
        machine = tmp_path / "machine"
        machine.mkdir()
        main = machine / "main.py"
        main.write_bytes(
            bucket.objects[
                batch.pyspark_batch.main_python_file_uri.removeprefix("gs://bucket/")
            ].data
        )
        conf = [
            item
            for name, value in {**SPARK, **dict(batch.runtime_config.properties)}.items()
            for item in ("--conf", f"{name}={value}")
        ]
        program = [
            str(Path(sys.executable).with_name("spark-submit")),
            "--master",
            "local[2]",
            *conf,
            str(main),
            *batch.pyspark_batch.args,
        ]
        pythons = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        environment = {**os.environ, **pythons, "PYTHONPATH": str(PROJECT), "TMPDIR": str(machine)}
        done = subprocess.run(
            program,
            cwd=machine,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    service.submit = submit
    launcher = DataprocLauncher(recipe)
    handle = launcher.submit(job)
    log = launcher.log(handle)
    until = time.monotonic() + 300
    while launcher.status(handle) in ("queued", "running"):
        assert time.monotonic() < until
        time.sleep(0.2)
    said = log.read().decode()
    assert launcher.status(handle) == "succeeded", said
    assert "Starting job: collect" in said, "Spark did it"
    assert Rendezvous(job.rendezvous or "").notes(EXIT)[0]["code"] == 0
    assert pull(mirror, recipe.folder.root)
    spark = everything(recipe.folder.columns)
    here = small_recipe(tmp_path, output=str(tmp_path / "here"))
    ingest(here)
    prepare(here)
    assert spark == everything(here.folder.columns)
    assert not [name for name in bucket.objects if "/engine/" in name]
