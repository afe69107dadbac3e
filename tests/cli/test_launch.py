"""`ingot launch ...` as a person types it: in the foreground, detached, looked at, followed,
cancelled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ingot.base.runlog import read_lines
from ingot.config.load import dump_recipe
from ingot.launch.supervisor.supervise import committed_steps
from tests.cli.commands import clean_environment, command, ingot
from tests.launch.blocking import wait_until
from tests.patience import PATIENCE_S
from tests.small import small_recipe


@pytest.fixture
def place(root: Path) -> Path:
    """A folder with data prepared and `r.yaml`, whose run is `runs/small`."""
    (root / "r.yaml").write_text(
        dump_recipe(small_recipe(root, checkpoint__every=2)).replace(f"{root}/", ""),
        encoding="utf-8",
    )
    return root


@pytest.mark.drawn("a training behind a launcher")
def test_a_training_in_the_foreground_leaves_a_handle(place: Path) -> None:
    done = ingot("launch", "train", "r.yaml", cwd=place, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("train: 6 steps")
    handle = json.loads((place / "runs/small/jobs/train.json").read_text())
    assert handle["argv"] == ["train", "r.yaml"]
    assert f"train: process {handle['id']}; `ingot launch status runs/small`" in done.stderr
    status = ingot("launch", "status", "r.yaml", cwd=place)
    assert status.stdout == f"train     succeeded  process {handle['id']}\n"
    logs = ingot("launch", "logs", "runs/small", cwd=place)
    assert logs.returncode == 2
    assert "train was started in a terminal, where its messages are" in logs.stderr


@pytest.mark.drawn("a training behind a launcher")
def test_a_detached_training_is_found_followed_cancelled_and_goes_on(place: Path) -> None:
    arguments = ("launch", "train", "r.yaml", "launch.detach=true")
    started = ingot(*arguments, "train.steps=100000", cwd=place, OMP_NUM_THREADS="1")
    assert started.returncode == 0, started.stderr
    handle = json.loads(started.stdout)
    run = small_recipe(place).folder
    try:
        wait_until(lambda: bool(committed_steps(run.checkpoints)), 120)
        status = ingot("launch", "status", "runs/small", cwd=place).stdout
        assert status.startswith(f"train     running    process {handle['id']}, for ")
        assert " steps done, " in status
        for again in (arguments, arguments[:-1]):
            refused = ingot(*again, cwd=place)
            assert refused.returncode == 1
            assert "runs/small is in use by process " in refused.stderr
            assert str(supervisor(handle["id"])) in refused.stderr
        follower = subprocess.Popen(
            command("launch", "logs", "runs/small", "--follow"),
            cwd=place,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        cancelled = ingot("launch", "cancel", "runs/small", cwd=place)
        assert cancelled.returncode == 0, cancelled.stderr
        assert cancelled.stderr == "train: cancelled\n"
        out, _ = follower.communicate(timeout=PATIENCE_S)
    finally:
        if psutil.pid_exists(int(handle["id"])):
            os.killpg(int(handle["id"]), signal.SIGKILL)
    assert follower.returncode == 0
    assert "committed; the same command goes on from there" in out
    assert out == ingot("launch", "logs", "runs/small", "--job", "train", cwd=place).stdout
    assert (run.root / "jobs/train.exit").read_text() == "75\n"
    assert (
        ingot("launch", "status", "runs/small", cwd=place).stdout
        == f"train     cancelled  process {handle['id']}\n"
    )
    nothing = ingot("launch", "cancel", "runs/small", cwd=place)
    assert nothing.returncode == 1
    assert nothing.stderr == "error: nothing runs there: train cancelled\n"


def supervisor(shell: str) -> int:
    (child,) = psutil.Process(int(shell)).children()
    return int(child.pid)


@pytest.mark.drawn
@pytest.mark.parametrize("verb", [("launch", "train"), ("run",)])
def test_a_killed_training_is_started_again(verb: tuple[str, ...], place: Path) -> None:
    """Under `ingot run` too, whose steps before it are done already or done again here."""
    process = subprocess.Popen(
        command(*verb, "r.yaml", "train.steps=100000", "checkpoint.every=40"),
        cwd=place,
        env=clean_environment(OMP_NUM_THREADS="1"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    run = small_recipe(place).folder
    try:
        wait_until(lambda: len(committed_steps(run.checkpoints)) > 0, 120)
        (rank,) = psutil.Process(process.pid).children()
        rank.kill()
        wait_until(
            lambda: [event["kind"] for event in read_lines(run.events)].count("start") == 2, 60
        )
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert re.search(
        r"rank 0 was ended by SIGKILL at step \d+; starting again from checkpoint \d+ \(restart 1"
        r" of 100\)\n",
        said,
    )
    kinds = [event["kind"] for event in read_lines(run.events)]
    assert kinds.index("restart") < kinds.index("lost")
    restart = next(event for event in read_lines(run.events) if event["kind"] == "restart")
    assert restart["attempt"] == 2


def test_another_verb_is_a_job_without_restarts(place: Path) -> None:
    done = ingot("launch", "ingest", "r.yaml", "--again", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ingest: ")
    failed = ingot("launch", "gate", "r.yaml", cwd=place)
    assert failed.returncode != 0
    lines = ingot("launch", "status", "runs/small", cwd=place).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["gate", "failed"],
        ["ingest", "succeeded"],
    ], "the last one first"


def test_what_a_killed_job_said_is_followed_to_its_end_and_a_job_of_another_version_hides_none(
    place: Path,
) -> None:
    jobs = place / "runs/small/jobs"
    jobs.mkdir(parents=True)
    (place / "log").write_text("its last word\n")
    about = {"id": "1", "argv": ["train"], "started": 1.0, "about": {}}
    (jobs / "train.json").write_text(
        json.dumps({**about, "name": "train", "kind": "local", "log": str(place / "log")})
    )
    (jobs / "evaluate.slurm.json").write_text(
        json.dumps({**about, "name": "evaluate", "kind": "slurm", "log": ""})
    )
    (jobs / "evaluate.slurm.yaml").write_text("knob_of_tomorrow: 1\n")
    followed = ingot("launch", "logs", "runs/small", "--follow", cwd=place)
    assert (followed.returncode, followed.stdout) == (0, "its last word\n")
    reader, writer = os.pipe()
    os.close(reader)
    unheard = subprocess.run(
        command("launch", "logs", "runs/small", "--follow"),
        cwd=place,
        env=clean_environment(),
        stdout=writer,
        stderr=writer,
        check=False,
    )
    os.close(writer)
    assert unheard.returncode in (1, 141), "who follows ends with its reader"
    status = ingot("launch", "status", "runs/small", cwd=place)
    assert status.returncode == 0, status.stderr
    lines = status.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["train", "unknown"], ["evaluate", "unknown"]]
    assert "slurm 1, which cannot be asked: " in lines[1]


def test_a_dry_run_prints_what_would_be_started(place: Path) -> None:
    here = ingot(
        "launch",
        "train",
        "r.yaml",
        "launch.processes=2",
        "--fresh",
        "--dry-run",
        cwd=place,
        OMP_NUM_THREADS="1",
    )
    assert here.returncode == 0, here.stderr
    assert (
        f"{sys.executable} -P -m ingot.launch 2 train r.yaml launch.processes=2 --fresh &\n"
        in here.stdout
    )
    detached = ingot("launch", "train", "r.yaml", "launch.detach=true", "--dry-run", cwd=place)
    assert (
        f"{sys.executable} -P -m ingot launch train r.yaml launch.detach=true launch.detach=false"
        " --handled &\n" in detached.stdout
    )
    assert (
        subprocess.run(["sh", "-n"], input=detached.stdout, text=True, check=False).returncode == 0
    )
    assert not (place / "runs/small/jobs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("status", "r.yaml"),
            "runs/small has no job; start one with `ingot launch train RECIPE.yaml`",
        ),
        (
            ("logs", "r.yaml", "--job", "gate"),
            "runs/small has no job of gate; start one with `ingot launch gate RECIPE.yaml`",
        ),
        (("cancel", "missing.yaml"), "recipe missing.yaml does not exist"),
        (("train", "missing.yaml"), "recipe missing.yaml does not exist"),
        (("serve", "r.yaml"), "No such command 'serve'"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    arguments: tuple[str, ...], says: str, place: Path
) -> None:
    done = ingot("launch", *arguments, cwd=place)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
