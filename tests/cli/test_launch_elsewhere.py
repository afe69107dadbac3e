"""`ingot launch` to machines that are paid, as a person types it: whatever becomes of the command,
none is left, and nothing wrong makes one.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.storage import write_atomic
from ingot.config.load import dump_recipe
from tests import gcs
from tests.cli.commands import ingot
from tests.fakes import compute, google, vertex_jobs
from tests.launch import nodes
from tests.launch.blocking import wait_until
from tests.small import small_recipe

IMAGE = "us-central1-docker.pkg.dev/p/ingot/ingot-train:latest"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as server:
        yield server


@pytest.fixture
def server() -> Iterator[google.Server]:
    server = google.Server()
    try:
        yield server
    finally:
        server.server_close()


def written(root: Path, kind: str, address: str | None, **knobs: Any) -> Path:
    recipe = small_recipe(
        root,
        **{
            "output": "runs",
            "data.train": [{"source": "text"}],
            "launch.kind": kind,
            "launch.nodes": 2,
            "cloud.project": "p",
            "cloud.bucket": "bucket",
            "cloud.endpoint": address,
            "cloud.images.train": IMAGE,
            **knobs,
        },
    )
    write_atomic(root / "r.yaml", dump_recipe(recipe))
    return root / "r.yaml"


def launched(root: Path, ready: Any) -> subprocess.Popen[str]:
    process = nodes.ingot("launch", "train", "r.yaml", cwd=root)
    nodes.wait_for(process, ready)
    return process


@pytest.mark.drawn("commands that are stopped while they start machines")
def test_interrupted_while_machines_come_up_it_leaves_none(
    root: Path, bucket: gcs.Server, server: google.Server
) -> None:
    cloud = compute.install(server)
    written(root, "gce", server.address)
    process = launched(root, lambda: len(cloud.names()) == 2)
    process.send_signal(signal.SIGINT)
    code, _, said = nodes.ended(process)
    assert code == 130, said
    cloud.settle()
    assert cloud.names() == []
    [line, other] = ingot("launch", "status", "r.yaml", cwd=root).stdout.splitlines()
    assert {line.split()[1], other.split()[1]} <= {"cancelled", "failed"}


@pytest.mark.drawn("commands that are stopped while they start machines")
def test_killed_it_leaves_a_job_that_the_next_command_finds_and_ends(
    root: Path, bucket: gcs.Server, server: google.Server
) -> None:
    """And that a second one does not start twice."""
    cloud = compute.install(server)
    written(root, "gce", server.address)
    process = launched(
        root,
        lambda: (
            (root / "runs/small/jobs/train.gce.json").exists()
            and "machines" in (root / "runs/small/jobs/train.gce.json").read_text()
        ),
    )
    process.kill()
    process.communicate()
    machines = cloud.names()
    assert len(machines) == 2
    again = nodes.ingot("launch", "train", "r.yaml", cwd=root)
    nodes.until_it_says(again, "train: gce ")
    assert cloud.names() == machines
    again.kill()
    again.communicate()
    states = [
        line.split()[:3]
        for line in ingot("launch", "status", "r.yaml", cwd=root).stdout.splitlines()
    ]
    assert ["train", "queued", "gce"] in states
    done = ingot("launch", "cancel", "r.yaml", cwd=root)
    assert done.returncode == 0, done.stderr
    assert "train: cancelled" in done.stderr
    cloud.settle()
    assert cloud.names() == []


@pytest.mark.drawn("commands that are stopped while they start machines")
def test_interrupted_again_a_custom_job_that_does_not_listen_is_cancelled(
    root: Path, bucket: gcs.Server, server: google.Server
) -> None:
    service = vertex_jobs.install(server)
    service.runs, service.project = 10**6, "p"
    written(root, "vertex", server.address)
    process = launched(root, lambda: len(service.jobs) == 1)
    nodes.until_it_says(process, "train: running (vertex")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: any("/signal-" in name for name in bucket.objects))
    time.sleep(2.1)  # within two seconds it would count as the same request
    process.send_signal(signal.SIGINT)
    code, _, said = nodes.ended(process)
    assert code == 130, said
    assert service.alive == []


@pytest.mark.parametrize(
    ("kind", "about", "told"),
    [
        ("gce", "location", "lies in"),
        ("gce", "bucket", "nowhere"),
        ("gce", "columns", "run `ingot ingest` and `ingot prepare`"),
        ("gce", "machine", "n1-standard-8"),
        ("gce", "output", "output"),
        ("vertex", "bucket", "nowhere"),
        ("vertex", "machine", "n1-standard-8"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_made(
    kind: str, about: str, told: str, root: Path, bucket: gcs.Server, server: google.Server
) -> None:
    written(
        root,
        kind,
        server.address,
        **{
            "bucket": {"cloud.bucket": "nowhere"},
            "machine": {"launch.machine.type": "n1-standrad-8"},
            "output": {"output": str(root / "runs")},
        }.get(about, {}),
    )
    if about == "location":
        bucket.location = "EUROPE-WEST4"
    if about == "columns":
        (root / "runs/small/data/columns/manifest.json").unlink()
    done = ingot("launch", "train", "r.yaml", cwd=root)
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("train: process")]
    assert line.startswith("error: ")
    assert told in line
    assert (server.calls, bucket.objects) == ([], {})


@pytest.mark.parametrize("kind", ["gce", "vertex"])
def test_without_credentials_it_is_one_line(kind: str, root: Path, tmp_path: Path) -> None:
    written(root, kind, None)
    done = ingot(
        "launch",
        "train",
        "r.yaml",
        cwd=root,
        HOME=str(tmp_path),
        NO_GCE_CHECK="true",
        CLOUDSDK_CONFIG=str(tmp_path),
    )
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("train: process")]
    assert "gcloud auth application-default login" in line
