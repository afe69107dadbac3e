"""What goes between a run folder and its replica while a job runs, and what a launcher brings back:
its own words are not lost to the job's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.environment import REPLICA_VARIABLE
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.remote.bucket import open_bucket
from ingot.base.remote.deferred import deferred_files_of
from ingot.base.remote.index import read_index
from ingot.base.remote.replica import pull, push
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, read_lines
from ingot.launch import run_folder_sync
from ingot.launch.job import Job
from ingot.launch.run_folder_sync import RunFolderPusher, pull_results, pull_run_folder
from tests import gcs
from tests.launch.blocking import wait_until

MIRROR = "gs://bucket/ingot/runs/one"
NODES = "name: one\ndata: {train: [{source: text}]}\n"
PARTS = ("train.tokens-00000.bin", "train.tokens-00000.idx")
JOB = Job("train", ("train",), 1, 2, run_folder_url=MIRROR)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run folder as the launcher has sent it."""
    root = tmp_path / "run"
    fill(
        root,
        {
            "recipe.yaml": "name: one",
            "jobs/nodes.train.yaml": NODES,
            "jobs/train.gce.json": "{}",
            "logs/train.log": "",
            "metrics.jsonl": "",
        },
    )
    append_line(root / "events.jsonl", {"kind": "submitted"})
    push(root, MIRROR)
    return root


def fill(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def generation(server: gcs.Server, name: str) -> int:
    found = server.objects.get(f"ingot/runs/one/{name}")
    return found.generation if found else 0


def test_a_launcher_brings_back_what_a_job_made_and_keeps_what_is_its_own(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    pull_run_folder(MIRROR, node, "train")
    fill(
        root,
        {
            "logs/train.log": "said",
            "jobs/train.gce.json": '{"id": 1}',
            "jobs/train-1/HERE": "",
            "recipe.yaml": "name: mine",
        },
    )
    for event in ({"kind": "hang"}, {"kind": "restart"}):
        append_line(root / "events.jsonl", event)
    for event in ({"kind": "start"}, {"kind": "finish"}):
        append_line(node / "events.jsonl", event)
    fill(
        node,
        {
            "model/w": "weights",
            "metrics.jsonl": "1\n",
            "logs/train.log": "stale",
            "jobs/train.gce.json": "stale",
            "logs/stacks-rank0.txt": "stacks",
        },
    )
    push(node, MIRROR)
    for _ in range(2):  # the second time there is nothing to do
        pull_results(MIRROR, root)
        assert [event["kind"] for event in read_lines(root / "events.jsonl")] == [
            "submitted",
            "start",
            "finish",
            "hang",
            "restart",
        ]
        kept = {
            path: (root / path).read_text()
            for path in ("logs/train.log", "jobs/train.gce.json", "jobs/train-1/HERE")
        }
        assert kept == {
            "logs/train.log": "said",
            "jobs/train.gce.json": '{"id": 1}',
            "jobs/train-1/HERE": "",
        }
        made = {
            path: (root / path).read_text()
            for path in ("model/w", "metrics.jsonl", "logs/stacks-rank0.txt", "recipe.yaml")
        }
        assert made == {
            "model/w": "weights",
            "metrics.jsonl": "1\n",
            "logs/stacks-rank0.txt": "stacks",
            "recipe.yaml": "name: mine",
        }
    push(root, MIRROR)
    pull(MIRROR, tmp_path / "third")
    assert len(list(read_lines(tmp_path / "third/events.jsonl"))) == 5
    assert (tmp_path / "third/logs/train.log").read_text() == "said"


def test_what_was_prepared_here_since_the_last_job_is_not_replaced_by_what_that_one_read(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    """Nor is the record of a step brought back that was removed because the step began anew."""
    manifest, prepared = "data/columns/manifest.json", "reports/steps/prepare.json"
    fill(root, {manifest: "old", prepared: "old", "reports/steps/evaluate.json": "old"})
    push(root, MIRROR)
    node = tmp_path / "node"
    pull_run_folder(MIRROR, node, "train")
    fill(node, {"model/w": "weights", "reports/steps/train.json": "made of old"})
    push(node, MIRROR)
    fill(root, {manifest: "new", prepared: "new"})
    (root / "reports/steps/evaluate.json").unlink()
    for _ in range(2):  # at the end of that job, and before the next one
        pull_results(MIRROR, root)
        assert (root / manifest).read_text() == (root / prepared).read_text() == "new"
        assert not (root / "reports/steps/evaluate.json").exists()
        assert (root / "reports/steps/train.json").read_text() == "made of old"
    push(root, MIRROR)
    pull_run_folder(MIRROR, node, "train")
    assert (node / manifest).read_text() == (node / prepared).read_text() == "new"
    assert not (node / "reports/steps/evaluate.json").exists()


def test_what_was_deleted_here_to_make_room_comes_back_and_is_not_deleted_there(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    """Beside what was made anew, fewer files are no accident."""
    fill(root, {"data/columns/manifest.json": "old", "data/columns/part-1": "", "model/w": "1"})
    push(root, MIRROR)
    shutil.rmtree(root / "data")
    shutil.rmtree(root / "model")
    pull_results(MIRROR, root)
    assert (root / "model/w").read_text() == "1"
    assert (root / "data/columns/part-1").exists()
    fill(root, {"data/columns/manifest.json": "new"})
    (root / "data/columns/part-1").unlink()
    (root / "model/w").unlink()
    pull_results(MIRROR, root)
    push(root, MIRROR)
    entries = read_index(open_bucket(MIRROR)).entries
    assert "data/columns/part-1" not in entries
    assert "model/w" in entries


def test_a_node_in_the_launchers_own_folder_leaves_alone_what_that_goes_on_writing(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    fill(
        root,
        {
            "logs/train.log": "said since",
            "jobs/train.gce.json": "a handle",
            "jobs/nodes.train.yaml": "of a start before",
            "recipe.yaml": "other",
        },
    )
    pull_run_folder(MIRROR, root, "train")
    texts = [
        (root / name).read_text()
        for name in (
            "logs/train.log",
            "jobs/train.gce.json",
            "jobs/nodes.train.yaml",
            "recipe.yaml",
        )
    ]
    assert texts == ["said since", "a handle", NODES, "name: one"]


TASKS = "evaluate: {tasks: [{kind: rouge}]}\n"


@pytest.mark.parametrize(
    ("verb", "knobs", "left"),
    [
        ("train", "", {"raw"}),
        ("train", TASKS, set()),
        ("train", "window", {"raw", "columns"}),
        ("train", f"{TASKS}window", {"columns"}),
        ("evaluate", "", {"columns"}),
        ("prepare", "window", set()),
        ("ingest", "", set()),
    ],
)
def test_what_a_verb_does_not_read_or_a_part_at_a_time_stays_in_the_bucket(
    server: gcs.Server, root: Path, tmp_path: Path, verb: str, knobs: str, left: set[str]
) -> None:
    nodes = (
        f"{NODES.replace('{train', '{window: 2, train')}{knobs.removesuffix('window')}"
        if knobs.endswith("window")
        else NODES + knobs
    )
    large = {"raw": ["train-00000.parquet"], "columns": PARTS}
    fill(
        root,
        {
            f"jobs/nodes.{verb}.yaml": nodes,
            **{
                f"data/{kind}/{name}": name
                for kind in large
                for name in ("manifest.json", *large[kind])
            },
        },
    )
    push(root, MIRROR)
    node = tmp_path / "node"
    for _ in range(2):  # a start, and another one of the same machine
        pull_run_folder(MIRROR, node, verb)
        columns = node / "data/columns"
        for kind, names in large.items():
            found = sorted(
                path.name
                for path in (node / "data" / kind).iterdir()
                if not path.name.startswith(".")
            )
            assert found == ["manifest.json", *([] if kind in left else names)]
        assert (deferred_files_of(columns) is not None) == ("columns" in left)
        push(node, MIRROR)
    assert {f"ingot/runs/one/data/{kind}/{name}" for kind in large for name in large[kind]} <= set(
        server.objects
    )
    # A verb that needs all of it finds nothing left over from one that does not.
    pull_run_folder(MIRROR, node, "prepare")
    assert all((node / "data" / kind / name).exists() for kind in large for name in large[kind])
    assert deferred_files_of(columns) is None
    # Where everything is at hand, as on the launcher's own machine, nothing is left for deferred_files_of.
    pull_run_folder(MIRROR, root, verb)
    assert deferred_files_of(root / "data/columns") is None


def test_a_launcher_brings_back_all_but_the_data_that_it_left_there_itself(
    server: gcs.Server, root: Path, tmp_path: Path
) -> None:
    large = ("data/raw/train-00000.parquet", "data/columns/train.tokens-00000.bin")
    fill(
        root,
        {
            **dict.fromkeys(large, "large"),
            "data/columns/manifest.json": "{}",
            "model/config.json": "{}",
        },
    )
    push(root, MIRROR)
    for submits in (False, True):  # the second one in a container of a pipeline
        launcher = tmp_path / f"launcher-{submits}"
        if submits:
            pull_run_folder(MIRROR, launcher, "submit")
        pull_results(MIRROR, launcher)
        assert (launcher / "model/config.json").exists()
        assert (launcher / "data/columns/manifest.json").exists()
        assert [(launcher / path).exists() for path in large] == [not submits] * 2
        push(launcher, MIRROR)
    assert {f"ingot/runs/one/{path}" for path in large} <= set(server.objects)


def test_what_was_logged_is_sent_while_the_job_runs(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that goes on after this one was reclaimed has nothing else of it."""
    monkeypatch.setattr(run_folder_sync, "HEARTBEAT_INTERVAL_S", 0.05)
    run = RunFolder(root)
    logs = [run.metrics, run.samples, run.events, run.root / "left_out.json"]
    for path in logs:
        append_line(path, {"step": 1})

    def sent() -> bool:
        return {path.name for path in logs} <= read_index(open_bucket(MIRROR)).entries.keys()

    with RunFolderPusher(MIRROR, root, 0):
        wait_until(sent)


def test_signs_of_life_go_on_while_what_there_is_to_show_takes_long(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_sync, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(run_folder_sync, "PROGRESS_INTERVAL_S", 0.05)
    slow, over = threading.Event(), threading.Event()

    def take_long(*arguments: object, **knobs: object) -> None:
        slow.set()
        over.wait(60)

    monkeypatch.setattr(run_folder_sync, "push", take_long)
    heart = HeartbeatWriter(root / "heartbeats", rank=0, local_rank=0, attempt=1)
    heart.beat("step")
    name = next((root / "heartbeats").iterdir()).name
    with RunFolderPusher(JOB.run_folder_url or "", root, 0):
        try:
            assert slow.wait(60)
            before = generation(server, f"heartbeats/{name}")
            wait_until(lambda: generation(server, f"heartbeats/{name}") > before)
        finally:
            over.set()
    heart.close()


def test_a_bucket_that_does_not_answer_is_not_waited_for_by_signs_of_life(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_sync, "HEARTBEAT_INTERVAL_S", 1.5)
    HeartbeatWriter(root / "heartbeats", rank=0, local_rank=0, attempt=1).close()
    name = next((root / "heartbeats").iterdir()).name
    server.fault("insert", delay_s=60, code=503)
    with RunFolderPusher(JOB.run_folder_url or "", root, 1):
        wait_until(lambda: generation(server, f"heartbeats/{name}") > 0, timeout_s=30)


def test_every_node_shows_stacks_that_were_written_since_it_began(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_sync, "HEARTBEAT_INTERVAL_S", 0.05)
    fill(root, {"logs/stacks-rank2.txt": "of a start before", "logs/stacks-rank3.txt": ""})
    with RunFolderPusher(JOB.run_folder_url or "", root, 1):
        fill(root, {"logs/stacks-rank3.txt": "once"})
        wait_until(lambda: generation(server, "stacks/stacks-rank3.txt") > 0)
        first = generation(server, "stacks/stacks-rank3.txt")
        fill(root, {"logs/stacks-rank3.txt": "once, twice"})
        wait_until(lambda: generation(server, "stacks/stacks-rank3.txt") > first)
    assert server.objects["ingot/runs/one/stacks/stacks-rank3.txt"].data == b"once, twice"
    assert generation(server, "stacks/stacks-rank2.txt") == 0


def test_ranks_are_told_of_the_replica_as_long_as_it_is_sent_to(
    server: gcs.Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REPLICA_VARIABLE, raising=False)
    with RunFolderPusher(JOB.run_folder_url or "", root, 1):
        said = subprocess.run(
            [sys.executable, "-c", f"import os; print(os.environ[{REPLICA_VARIABLE!r}])"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.strip() == MIRROR
    assert REPLICA_VARIABLE not in os.environ
