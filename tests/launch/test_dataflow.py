"""Dataflow: what drives its pipelines, by which options, and that nothing of it is left when it is cancelled."""

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
from google.cloud import dataflow_v1beta3 as types

from ingot.base.errors import WrongInput
from ingot.config.recipe import Recipe
from ingot.launch.dataflow import DataflowLauncher
from ingot.launch.handles import find
from ingot.launch.job import Handle, Job
from ingot.launch.meeting import EXIT, Meeting
from tests import gcs, golden
from tests.data.engines.places import BEAM, needs_beam
from tests.fakes.google import Server
from tests.house.source import PROJECT
from tests.small import small_recipe

CLOUD = {
    "cloud__project": "proj", "cloud__bucket": "bucket", "cloud__service_account": "beam@proj.iam.gserviceaccount.com", "cloud__subnetwork": "private",
    "cloud__labels": "{team: data}", "launch__kind": "dataflow", "data__engine__workers": None,
    "data__engine": json.dumps({"kind": "beam", "python": sys.executable, "partitions": 3, "options": {"max_num_workers": "7"}}),
}
MIRROR = "gs://bucket/ingot/runs/small"
JOB = Job(
    "prepare", ("prepare", "runs/small/jobs/nodes.prepare.yaml"), environment={"COLOUR": "blue"}, image="us-docker.pkg.dev/proj/images/beam:1",
    meet=f"{MIRROR}/jobs/prepare-1", mirror=MIRROR,
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with gcs.serving(monkeypatch):
        running = Server()
        yield running
        running.shutdown()
        running.server_close()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> Callable[..., Recipe]:
    monkeypatch.chdir(tmp_path)
    return lambda **knobs: small_recipe(tmp_path, **{"cloud__endpoint": server.address, **CLOUD, "output": "runs", **knobs})


def engine_of(launcher: DataflowLauncher, job: Job = JOB) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(launcher._command(job)[-1].removeprefix("data.engine="))
    return found


def test_what_would_run_is_written_down(made: Callable[..., Recipe], tmp_path: Path) -> None:
    text = DataflowLauncher(made()).render(JOB)
    golden.check("dataflow.txt", text.replace(str(tmp_path), "/FOLDER").replace(sys.executable, "PYTHON"))


def test_every_option_comes_from_its_knob(made: Callable[..., Recipe]) -> None:
    assert engine_of(DataflowLauncher(made())) == {
        "kind": "beam", "runner": "DataflowRunner", "partitions": 3, "python": sys.executable, "shared": MIRROR,
        "options": {
            "project": "proj", "region": "us-central1", "temp_location": "gs://bucket/ingot/dataflow/temp",
            "staging_location": "gs://bucket/ingot/dataflow/staging", "sdk_container_image": "us-docker.pkg.dev/proj/images/beam:1",
            "labels": "ingot-run=small,ingot-verb=prepare,team=data", "job_name": "ingot-small-prepare",
            "service_account_email": "beam@proj.iam.gserviceaccount.com", "subnetwork": "regions/us-central1/subnetworks/private", "max_num_workers": "7",
        },
    }
    elsewhere = {"cloud__subnetwork": None, "cloud__network": "net", "cloud__service_account": None, "cloud__region": "europe-west4"}
    other = engine_of(DataflowLauncher(made(**elsewhere)))["options"]
    assert (other["network"], other["region"], "subnetwork" in other, "service_account_email" in other) == ("net", "europe-west4", False, False)
    options = json.dumps({"kind": "beam", "python": sys.executable, "runner": "PrismRunner", "options": {"region": "here"}})
    own = engine_of(DataflowLauncher(made(data__engine=options)))
    assert (own["runner"], own["options"]["region"]) == ("PrismRunner", "here")


@pytest.mark.parametrize(("change", "knobs", "told"), [
    ({"name": "train"}, {}, "not train"), ({"nodes": 2}, {}, r"launch\.nodes=1"), ({"mirror": None}, {}, r"cloud\.bucket"),
    ({"image": None}, {}, r"launch\.image"), ({}, {"data__engine": "{kind: spark}"}, "dataproc"),
    ({}, {"data__engine": "{kind: local}"}, "environment of its own"),
    ({}, {"data__engine": "{kind: beam, python: /nowhere/python}"}, "no interpreter"),
])
def test_what_it_cannot_do_it_says_before_anything_starts(change: dict[str, Any], knobs: dict[str, Any], told: str, made: Callable[..., Recipe]) -> None:
    recipe, job = made(**knobs), dataclasses.replace(JOB, **change)
    assert len(DataflowLauncher(recipe).can(job)) == 1
    with pytest.raises(WrongInput, match=told):
        DataflowLauncher(recipe).submit(job)
    assert find(recipe.folder.root, "prepare", "dataflow") is None
    assert DataflowLauncher(made()).can(JOB) == []


class Driven(DataflowLauncher):
    """Whose driver is a program of the test."""

    program = ""

    def _command(self, job: Job) -> list[str]:
        return [sys.executable, "-c", self.program]


def ended(launcher: DataflowLauncher, handle: Handle) -> str:
    until = time.monotonic() + 60
    while (state := launcher.status(handle)) == "running":
        assert time.monotonic() < until
        time.sleep(0.05)
    return state


@pytest.mark.parametrize(("code", "state"), [(0, "succeeded"), (2, "failed")])
def test_its_end_is_what_the_driver_notes(code: int, state: str, made: Callable[..., Recipe]) -> None:
    launcher = Driven(made())
    launcher.program = "import os; print(os.environ['COLOUR'])"
    Meeting(JOB.meet or "").leave(0, EXIT, rank=0, code=code, how="")
    handle = launcher.submit(JOB)
    assert ended(launcher, handle) == state
    assert launcher.log(handle).read() == b"blue\n"
    assert find(launcher._recipe.folder.root, "prepare", "dataflow") == handle


def test_a_driver_that_died_without_a_word_failed(made: Callable[..., Recipe]) -> None:
    launcher = Driven(made())
    launcher.program = "import os; os.kill(os.getpid(), 9)"
    assert ended(launcher, launcher.submit(JOB)) == "failed"


def test_a_signal_is_a_note(made: Callable[..., Recipe]) -> None:
    launcher = Driven(made())
    launcher.signal(launcher.submit(JOB), signal.SIGTERM)
    assert [note["number"] for note in Meeting(JOB.meet or "").signals(set())] == [signal.SIGTERM]


def test_cancelled_the_driver_ends_with_its_children_and_then_this_runs_jobs(made: Callable[..., Recipe], server: Server) -> None:
    running, ours, over = types.JobState.JOB_STATE_RUNNING, {"ingot-run": "small", "ingot-verb": "prepare", "team": "data"}, []
    jobs = {
        "a": types.Job(id="a", name="a", labels=ours, current_state=running),
        "b": types.Job(id="b", name="b", labels={"ingot-run": "other"}, current_state=running),
        "c": types.Job(id="c", name="c", labels=ours, current_state=types.JobState.JOB_STATE_DONE),
    }

    def update(request: Any) -> Any:
        assert request.job.requested_state == types.JobState.JOB_STATE_CANCELLED
        over.append((request.project_id, request.location, request.job_id))
        return jobs[request.job_id]

    server.on("JobsV1Beta3.ListJobs", lambda request: types.ListJobsResponse(jobs=list(jobs.values())))
    server.on("JobsV1Beta3.UpdateJob", update)
    launcher = Driven(made())
    launcher.program = (
        "import subprocess, sys, time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\nprint(child.pid, flush=True)\ntime.sleep(600)"
    )
    handle = launcher.submit(JOB)
    log, said = launcher.log(handle), b""
    while not said:
        said = log.read()
        time.sleep(0.05)
    assert launcher.status(handle) == "running"
    launcher.cancel(handle)
    assert launcher.status(handle) == "cancelled"
    assert over == [("proj", "us-central1", "a")]
    until = time.monotonic() + 20
    while Path(f"/proc/{int(said)}").exists() and Path(f"/proc/{int(said)}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)
    assert server.requests("JobsV1Beta3.ListJobs")[0].filter == types.ListJobsRequest.Filter.ACTIVE


@needs_beam
def test_beam_takes_these_options(made: Callable[..., Recipe]) -> None:
    """Beam's own parser, without the runner: its package for Google is not in that environment."""
    options = engine_of(DataflowLauncher(made()))["options"]
    program = (
        "import json, sys\nfrom ingot.data.engines.beam import BeamEngine, _beam\n"
        "_, made = _beam(BeamEngine('DirectRunner', 0, json.loads(sys.argv[1])))\nprint(json.dumps(made.get_all_options(), default=str))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([str(BEAM), "-c", program, json.dumps(options)], capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    known = json.loads(done.stdout.splitlines()[-1])
    assert known["labels"] == ["ingot-run=small", "ingot-verb=prepare", "team=data"]
    assert {name: known[name] for name in options if name != "labels"} == {
        **{name: value for name, value in options.items() if name != "labels"}, "max_num_workers": 7,
    }
