"""Dataflow: what drives its pipelines, by which options, and that nothing of it is left when it is
cancelled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.markers import fingerprint
from ingot.base.processes import own_python
from ingot.base.runfolder import folder_lock
from ingot.cloud import clients, data_jobs
from ingot.config.recipe import Recipe
from ingot.launch.handles import find_handle, jobs_folder
from ingot.launch.job import Handle, Job
from ingot.launch.places.dataflow import DataflowLauncher
from ingot.launch.rendezvous import EXIT, Rendezvous
from tests import gcs, golden
from tests.data.engines.places import BEAM, needs_beam
from tests.fakes import dataflow
from tests.fakes.dataflow import STATES
from tests.fakes.google import Refused, Server
from tests.house.source import PROJECT
from tests.patience import PATIENCE_S
from tests.small import small_recipe

CLOUD = {
    "cloud__project": "proj",
    "cloud__bucket": "bucket",
    "cloud__service_account": "beam@proj.iam.gserviceaccount.com",
    "cloud__subnetwork": "private",
    "cloud__labels": "{team: data}",
    "launch__kind": "dataflow",
    "data__engine__workers": None,
    "data__engine": json.dumps(
        {
            "kind": "beam",
            "python": sys.executable,
            "partitions": 3,
            "options": {"max_num_workers": "7"},
        }
    ),
}
MIRROR = "gs://bucket/ingot/runs/small"
JOB = Job(
    "prepare",
    ("prepare", "runs/small/jobs/nodes.prepare.yaml"),
    environment={"COLOUR": "blue"},
    image="us-docker.pkg.dev/proj/images/beam:1",
    rendezvous=f"{MIRROR}/jobs/prepare-1",
    run_folder_url=MIRROR,
)
NAME = f"ingot-small-{fingerprint(MIRROR)[:6]}-prepare"
OURS = {
    "ingot-run": "small",
    "ingot-verb": "prepare",
    "ingot-replica": fingerprint(MIRROR),
    "ingot-attempt": "1",
    "ingot-start": "drawn-by-submit",
    "team": "data",
}
LABELS = ",".join(f"{name}={value}" for name, value in sorted(OURS.items()))
WALLTIME = "max_workflow_runtime_walltime_seconds"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[dataflow.State]:
    monkeypatch.setattr(clients, "FIRST_WAIT_S", 0.01)
    with gcs.serving(monkeypatch):
        running = Server()
        yield dataflow.install(running)
        running.server_close()


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: dataflow.State
) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)
    return lambda **knobs: small_recipe(
        tmp_path, **{"cloud__endpoint": service.server.address, **CLOUD, "output": "runs", **knobs}
    )


def engine_of(launcher: DataflowLauncher, job: Job = JOB) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(launcher._command(job)[-1].removeprefix("data.engine="))
    return found


def test_what_would_run_is_written_down(made: Callable[..., Recipe], tmp_path: Path) -> None:
    text = DataflowLauncher(made()).render(JOB).replace(str(tmp_path), "/FOLDER")
    for python in (shlex.join(own_python()), sys.executable):
        text = text.replace(python, "PYTHON")
    golden.check("dataflow.txt", text)


def test_every_option_comes_from_its_knob(made: Callable[..., Recipe]) -> None:
    assert engine_of(DataflowLauncher(made())) == {
        "kind": "beam",
        "runner": "DataflowRunner",
        "partitions": 3,
        "python": sys.executable,
        "shared": MIRROR,
        "options": {
            "project": "proj",
            "region": "us-central1",
            "temp_location": "gs://bucket/ingot/dataflow/temp",
            "staging_location": "gs://bucket/ingot/dataflow/staging",
            "sdk_container_image": "us-docker.pkg.dev/proj/images/beam:1",
            "labels": LABELS,
            "job_name": NAME,
            "dataflow_service_options": f"{WALLTIME}=604800",
            "number_of_worker_harness_threads": "1",
            "service_account_email": "beam@proj.iam.gserviceaccount.com",
            "subnetwork": "regions/us-central1/subnetworks/private",
            "max_num_workers": "7",
        },
    }
    elsewhere = {
        "cloud__subnetwork": None,
        "cloud__network": "net",
        "cloud__service_account": None,
        "cloud__region": "europe-west4",
    }
    other = engine_of(DataflowLauncher(made(**elsewhere)))["options"]
    assert (
        other["network"],
        other["region"],
        "subnetwork" in other,
        "service_account_email" in other,
    ) == ("net", "europe-west4", False, False)
    options = json.dumps(
        {
            "kind": "beam",
            "python": sys.executable,
            "runner": "PrismRunner",
            "options": {"region": "here"},
        }
    )
    own = engine_of(DataflowLauncher(made(data__engine=options)))
    assert (own["runner"], own["options"]["region"]) == ("PrismRunner", "here")


def test_labels_and_service_options_of_the_recipe_go_along_with_ours(
    made: Callable[..., Recipe],
) -> None:
    def options(**given: str) -> dict[str, str]:
        recipe = made(
            data__engine=json.dumps({"kind": "beam", "python": sys.executable, "options": given})
        )
        found: dict[str, str] = engine_of(
            DataflowLauncher(recipe), dataclasses.replace(JOB, time_limit_s=90.5)
        )["options"]
        return found

    both = options(
        labels="team=search,cost=low,ingot-run=theirs",
        dataflow_service_options="enable_prime,graph_validate_only",
    )
    assert both["labels"] == ",".join(
        f"{name}={value}"
        for name, value in sorted({**OURS, "team": "search", "cost": "low"}.items())
    )
    assert both["dataflow_service_options"] == f"enable_prime,graph_validate_only,{WALLTIME}=90"
    assert (
        options(dataflow_service_options=f"{WALLTIME}=60")["dataflow_service_options"]
        == f"{WALLTIME}=60"
    )


def test_secrets_are_references_that_the_driver_resolves(
    made: Callable[..., Recipe], service: dataflow.State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's own program runs, and finds its secret refused: it asked for it."""
    asked = []

    def access(request: Any) -> Any:
        asked.append(request.name)
        raise Refused(403, "Permission denied on secret")

    service.server.on("SecretManagerService.AccessSecretVersion", access)
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    launcher = DataflowLauncher(made(cloud__secrets="{HF_TOKEN: 'secret:hf-token/3'}"))
    shown = launcher.render(JOB)
    assert "secret:hf-token/3" in shown
    assert "hf_very_secret" not in shown
    handle = launcher.submit(JOB)
    assert ended(launcher, handle) == "failed"
    assert asked == ["projects/proj/secrets/hf-token/versions/3"]
    assert b"hf-token for $HF_TOKEN" in launcher.log(handle).read()


@pytest.mark.parametrize(
    ("change", "knobs", "told"),
    [
        ({"name": "train"}, {}, "not train"),
        ({"nodes": 2}, {}, r"launch\.nodes=1"),
        ({"run_folder_url": None}, {}, r"cloud\.bucket"),
        ({"image": None}, {}, r"launch\.image"),
        ({}, {"data__engine": "{kind: spark}"}, "dataproc"),
        ({}, {"data__engine": "{kind: local}"}, "environment of its own"),
        ({}, {"data__engine": "{kind: beam, python: /nowhere/python}"}, "no interpreter"),
    ],
)
def test_what_it_cannot_do_it_says_before_anything_starts(
    change: dict[str, Any], knobs: dict[str, Any], told: str, made: Callable[..., Recipe]
) -> None:
    recipe, job = made(**knobs), dataclasses.replace(JOB, **change)
    assert len(DataflowLauncher(recipe).can(job)) == 1
    with pytest.raises(WrongInput, match=told):
        DataflowLauncher(recipe).submit(job)
    assert find_handle(recipe.folder.root, "prepare", "dataflow") is None
    assert DataflowLauncher(made()).can(JOB) == []


def test_what_has_no_beam_is_not_rendered_either(made: Callable[..., Recipe]) -> None:
    with pytest.raises(WrongInput, match=r"set data\.engine="):
        DataflowLauncher(made(**{"data.engine": {"kind": "local"}})).render(JOB)


class Driven(DataflowLauncher):
    """Whose driver is a program of the test."""

    program = ""

    def _driver(self, job: Job, start: str) -> list[str]:
        return [sys.executable, "-c", self.program]


def ended(launcher: DataflowLauncher, handle: Handle) -> str:
    until = time.monotonic() + PATIENCE_S
    while (state := launcher.status(handle)) == "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    return state


@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (2, "failed")])
def test_its_end_is_what_the_driver_notes(
    code: int, state: str, made: Callable[..., Recipe]
) -> None:
    launcher = Driven(made())
    launcher.program = "import os; print(os.environ['COLOUR'])"
    Rendezvous(JOB.rendezvous or "").leave(0, EXIT, rank=0, code=code, how="")
    handle = launcher.submit(JOB)
    assert ended(launcher, handle) == state
    assert launcher.log(handle).read() == b"blue\n"
    assert find_handle(launcher._recipe.folder.root, "prepare", "dataflow") == handle


def test_a_driver_that_died_without_a_word_failed(made: Callable[..., Recipe]) -> None:
    launcher = Driven(made())
    launcher.program = "import os; os.kill(os.getpid(), 9)"
    assert ended(launcher, launcher.submit(JOB)) == "failed"


def test_a_signal_is_a_note(made: Callable[..., Recipe]) -> None:
    launcher = Driven(made())
    launcher.signal(launcher.submit(JOB), signal.SIGTERM)
    assert [note["number"] for note in Rendezvous(JOB.rendezvous or "").signals(set())] == [
        signal.SIGTERM
    ]


def some_jobs(service: dataflow.State, handle: Handle) -> None:
    """Of which `a` is of this start and runs."""
    ours = {**OURS, "ingot-start": handle.about["start"]}
    service.make("other", "else", ours)
    service.make(
        "same-name", NAME, {**ours, "ingot-replica": fingerprint("gs://another/runs/small")}
    )
    service.make("earlier-start", NAME, {**ours, "ingot-attempt": "7"})
    service.make("another-computers", NAME, {**ours, "ingot-start": "theirs"})
    service.make("over", NAME, ours, STATES.JOB_STATE_DONE)
    service.make("going", NAME, ours, STATES.JOB_STATE_CANCELLING)
    service.make("a", NAME, ours)


def test_cancelled_the_driver_ends_with_its_children_and_then_this_runs_jobs(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    launcher = Driven(made())
    launcher.program = (
        "import subprocess, sys, time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nchild"
        " = subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(600)'])\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    handle = launcher.submit(JOB)
    some_jobs(service, handle)
    log, said = launcher.log(handle), b""
    while not said:
        said = log.read()
        time.sleep(0.05)
    assert launcher.status(handle) == "running"
    launcher.cancel(handle)
    assert launcher.status(handle) == "cancelled"
    assert service.cancelled == ["a"]
    assert {request.job_id for request in service.server.requests("JobsV1Beta3.GetJob")} == {
        "same-name",
        "earlier-start",
        "another-computers",
        "a",
    }
    until = time.monotonic() + PATIENCE_S
    while (
        Path(f"/proc/{int(said)}").exists()
        and Path(f"/proc/{int(said)}/stat").read_text().split()[2] != "Z"
    ):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.drawn("a driver of Beam")
def test_a_driver_that_ran_out_of_time_is_over_and_takes_its_job_with_it(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    launcher = Driven(made())
    launcher.program = "import time; time.sleep(600)"
    handle = launcher.submit(dataclasses.replace(JOB, time_limit_s=8.0))
    some_jobs(service, handle)
    assert launcher.status(handle) == "running"
    assert service.cancelled == []
    assert ended(launcher, handle) == "failed"
    assert time.time() - handle.started < 60
    assert service.cancelled == ["a"]
    assert launcher.status(handle) == "failed"
    assert service.cancelled == ["a"], "it is asked once"


def test_one_that_did_its_work_asks_for_nothing(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    launcher = Driven(made())
    Rendezvous(JOB.rendezvous or "").leave(0, EXIT, rank=0, code=0, how="")
    handle = launcher.submit(JOB)
    service.server.calls.clear()
    assert ended(launcher, handle) == "succeeded"
    assert not service.server.calls


@pytest.mark.parametrize("start", ["1", "2"])
def test_what_another_computer_started_is_left_alone_and_not_started_again(
    made: Callable[..., Recipe], service: dataflow.State, start: str
) -> None:
    """Whether the number of its start is ours too, or another."""
    launcher = Driven(made())
    launcher.program = "import os; os.kill(os.getpid(), 9)"
    handle = launcher.submit(JOB)
    theirs = {**OURS, "ingot-attempt": start, "ingot-start": "theirs"}
    service.make("pipeline-of-theirs", NAME, theirs)
    assert ended(launcher, handle) == "failed"
    told = "the Dataflow job pipeline-of-theirs works on this run and was started elsewhere"
    assert (launcher.busy(JOB) or "").startswith(told)
    with pytest.raises(Failed, match=told):
        launcher.submit(dataclasses.replace(JOB, rendezvous=f"{MIRROR}/jobs/prepare-2"))
    assert find_handle(launcher._recipe.folder.root, "prepare", "dataflow") == handle
    launcher.cancel(handle)
    assert service.cancelled == []
    service.make("pipeline-of-theirs", NAME, theirs, STATES.JOB_STATE_CANCELLING)
    assert launcher.busy(JOB) is None


def test_what_our_last_driver_left_does_not_prevent_the_next(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    launcher = Driven(made())
    launcher.program = "import os; os.kill(os.getpid(), 9)"
    handle = launcher.submit(JOB)
    service.make("a", NAME, {**OURS, "ingot-start": handle.about["start"]})
    assert launcher.busy(JOB) is None
    assert ended(launcher, handle) == "failed"
    assert service.cancelled == ["a"]


def test_where_beam_makes_its_jobs_there_they_are_looked_for(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    service.project, service.region = "theirs", "europe-west4"
    options = {"project": "theirs", "region": "europe-west4", "job_name": "mine"}
    launcher = Driven(
        made(
            data__engine=json.dumps({"kind": "beam", "python": sys.executable, "options": options})
        )
    )
    handle = launcher.submit(JOB)
    service.make("a", "mine", {**OURS, "ingot-start": handle.about["start"]})
    launcher.cancel(handle)
    assert service.cancelled == ["a"]


def test_a_page_that_fails_is_told_in_one_line(
    made: Callable[..., Recipe], service: dataflow.State
) -> None:
    some_jobs(service, Driven(made()).submit(JOB))
    listed = service.list

    def fails_later(request: Any) -> Any:
        if request.page_token:
            raise Refused(403, "no more of it")
        return listed(request)

    service.server.on("JobsV1Beta3.ListJobs", fails_later)
    with pytest.raises(WrongInput, match=r"could not list Dataflow jobs: .*no more of it"):
        data_jobs.active_dataflow_jobs(clients.GoogleClients(made().cloud), NAME, OURS)


def test_a_command_that_is_repeated_while_it_runs_starts_no_second_driver(
    made: Callable[..., Recipe],
) -> None:
    launcher = Driven(made())
    launcher.program = "import time; time.sleep(600)"
    first = launcher.submit(JOB)
    again = dataclasses.replace(JOB, rendezvous=f"{MIRROR}/jobs/prepare-2")
    assert Driven(made()).submit(again) == first
    with (
        folder_lock(jobs_folder(launcher._recipe.folder.root), "prepare.dataflow.lock"),
        pytest.raises(Failed, match="in use"),
    ):
        launcher.submit(again)
    launcher.cancel(first)
    assert launcher.submit(again).id != first.id
    launcher.cancel(find_handle(launcher._recipe.folder.root, "prepare", "dataflow") or first)


def test_a_driver_is_ours_when_this_machine_is_called_otherwise(
    made: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop is in another network, and whatever boot it was by which its name is still ours:
    a second driver would be paid for as well.
    """
    launcher = Driven(made())
    launcher.program = "import time; time.sleep(600)"
    handle = launcher.submit(JOB)
    monkeypatch.setattr(socket, "gethostname", lambda: "mac.home.example")
    assert launcher.status(handle) == "running"
    again = dataclasses.replace(JOB, rendezvous=f"{MIRROR}/jobs/prepare-2")
    assert Driven(made()).submit(again) == handle
    launcher.cancel(handle)
    assert launcher.status(handle) == "cancelled"
    elsewhere = dataclasses.replace(handle, about={**handle.about, "machine": "another"})
    assert not launcher._is_here(elsewhere)
    monkeypatch.setattr(socket, "gethostname", lambda: handle.about["host"])
    assert launcher._is_here(elsewhere), "it was started again"


@pytest.mark.drawn("a driver of Beam")
@needs_beam
def test_beam_takes_these_options(made: Callable[..., Recipe]) -> None:
    """Beam's own parser, without the runner: its package for Google is not in that environment."""
    options = engine_of(DataflowLauncher(made()))["options"]
    program = (
        "import json, sys\nfrom ingot.data.engines.beam import BeamEngine, _beam\n_, made ="
        " _beam(BeamEngine('DirectRunner', 0,"
        " json.loads(sys.argv[1])))\nprint(json.dumps(made.get_all_options(), default=str))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [str(BEAM), "-c", program, json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    assert known["labels"] == LABELS.split(",")
    assert known["dataflow_service_options"] == [f"{WALLTIME}=604800"]
    single = [name for name in options if name not in ("labels", "dataflow_service_options")]
    assert {name: known[name] for name in single} == {
        **{name: options[name] for name in single},
        "max_num_workers": 7,
        "number_of_worker_harness_threads": 1,
    }
