"""Slurm: a real cluster of two nodes on this machine, real trainings on it, and what happens when a
node or an answer is lost.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.config.recipe import Recipe
from ingot.launch.attempt import StopRequests, follow
from ingot.launch.handles import find_handle
from ingot.launch.job import Handle, Job
from ingot.launch.places import slurm_cluster
from ingot.launch.places.slurm import NO_REQUEST, SlurmLauncher
from ingot.launch.run_job import job_of
from ingot.launch.staging import with_next_rendezvous
from ingot.launch.supervisor.remote_attempt import RemoteAttempt
from tests import golden
from tests.launch.blocking import blocking_argv, wait_until, waiting_on
from tests.launch.nodes import (
    ENDLESS,
    end_all,
    ended,
    events,
    ingot,
    only_ranks,
    ranks_of,
    recipe_for,
    reference,
    steps,
    until_it_says,
    wait_for,
    weights,
    written,
)
from tests.launch.slurm_cluster import Cluster
from tests.launch.sshd import need
from tests.patience import PATIENCE_S
from tests.small import small_recipe

SECRET = "hush-77aa"


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)


@pytest.fixture(scope="module")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need("slurmctld", "slurmd", "munged", "sbatch")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("SLURM_CONF", str(running_cluster.conf))
    monkeypatch.setattr(SlurmLauncher, "poll_s", 0.3)
    assert running_cluster.jobs() == []
    return running_cluster


@pytest.fixture
def expected(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return reference(prepared_root, tmp_path_factory.getbasetemp())


def on_cluster(root: Path, **knobs: Any) -> Recipe:
    return recipe_for(root, **{"launch__kind": "slurm", "launch__nodes": 2, **knobs})


def handle_of(recipe: Recipe, name: str = "train") -> Handle | None:
    return find_handle(recipe.folder.root, name, "slurm")


def gone(root: Path, slurm: Cluster, seconds: float = PATIENCE_S) -> None:
    wait_until(lambda: not ranks_of(root) and slurm.jobs() == [], seconds)


def script_of(tmp_path: Path, job: Job, **knobs: Any) -> str:
    recipe = small_recipe(
        tmp_path,
        launch__kind="slurm",
        launch__folder="/scratch/team",
        launch__python="/opt/py/bin/python",
        **knobs,
    )
    return SlurmLauncher(recipe).render(job)


def test_the_script_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    meet = str(tmp_path / "runs" / "small" / "jobs" / "train-1")
    job = Job(
        "train",
        ("train", "my recipe.yaml", "train.steps=10"),
        8,
        2,
        {"NCCL_SOCKET_IFNAME": "eth0"},
        ("WANDB_API_KEY",),
        rendezvous=meet,
    )
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    full = script_of(
        tmp_path,
        job,
        launch__slurm__account="acct",
        launch__slurm__partition="gpu",
        launch__slurm__time="1d",
        launch__slurm__gpus=8,
        launch__slurm__image="registry/team#ingot:1",
        launch__slurm__mounts=["/data:/data"],
        launch__slurm__signal_s=600,
        launch__slurm__options={"constraint": "h100", "cpus-per-task": "64"},
    )
    least = script_of(tmp_path, Job("evaluate", ("evaluate", "r.yaml"), rendezvous=meet))
    for name, text in (("slurm-full.sh", full), ("slurm-least.sh", least)):
        assert SECRET not in text
        golden.check(name, text)
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "--exclusive" in least
    assert "--exclusive" not in full, "the person said how many cores"
    assert "--exclusive" not in script_of(
        tmp_path, Job("evaluate", ("evaluate",), rendezvous=meet), launch__slurm__gpus=1
    ), "one of several devices of a node"
    prepares = Job("prepare", ("prepare",), rendezvous=meet)
    text = script_of(tmp_path, prepares, launch__slurm__gpus=2)
    assert "gpus-per-node" not in text, "it computes on none"
    assert "--cpus-per-task" in text


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:30:15", 5415),
        ("2-3", 183_600),
        ("2-00:00:30", 172_830),
        ("UNLIMITED", None),
        ("NONE", None),
    ],
)
def test_times_are_read_as_slurm_writes_them(written: str, seconds: float | None) -> None:
    assert slurm_cluster.parse_time(written) == seconds
    if seconds:
        assert slurm_cluster.parse_time(slurm_cluster.format_time(seconds)) == seconds


def test_every_state_of_slurm_is_one_of_ours() -> None:
    assert {
        name: slurm_cluster.STATES[name]
        for name in (
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "CANCELLED",
            "FAILED",
            "OUT_OF_MEMORY",
            "PENDING",
            "COMPLETING",
            "SUSPENDED",
        )
    } == {
        "TIMEOUT": "preempted",
        "NODE_FAIL": "preempted",
        "PREEMPTED": "preempted",
        "CANCELLED": "cancelled",
        "FAILED": "failed",
        "OUT_OF_MEMORY": "failed",
        "PENDING": "queued",
        "COMPLETING": "running",
        "SUSPENDED": "suspended",
    }


def test_what_the_cluster_cannot_do_is_refused_with_the_knob(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons(nodes: int = 1, **knobs: Any) -> list[str]:
        return SlurmLauncher(small_recipe(tmp_path, launch__kind="slurm", **knobs)).can(
            Job("train", ("train",), nodes=nodes)
        )

    assert reasons(2) == []
    assert (
        reasons(
            launch__slurm__partition="one", launch__slurm__time="5m", launch__slurm__signal_s=60
        )
        == []
    )
    assert reasons(launch__slurm__partition="mian") == [
        "launch.slurm.partition mian is unknown; there are main, one; nearest: main"
    ]
    assert reasons(3) == [
        "launch.nodes=3 and partition main gives 2; lower it, or choose another"
        " launch.slurm.partition"
    ]
    assert reasons(2, launch__slurm__partition="one") == [
        "launch.nodes=2 and partition one gives 1; lower it, or choose another"
        " launch.slurm.partition"
    ]
    assert reasons(launch__slurm__time="2h") == [
        "launch.slurm.time 2h 00m is beyond the limit of partition main, 1h 00m"
    ]
    assert "no longer than launch.slurm.signal_s" in reasons(launch__slurm__time="5m")[0]
    assert "launch.slurm.options.output" in reasons(launch__slurm__options={"output": "x"})[0]
    assert "launch.code=sync" in reasons(launch__code="sync")[0]
    assert "launch.slurm.image" in reasons(launch__code="image")[0]
    fake = tmp_path / "bin"
    program(fake, "sbatch", "echo slurm 19.05.1")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
        assert reasons() == ["Slurm 19.05 is too old; 20.11 or newer is needed"]
        patch.setenv("PATH", str(tmp_path))
        assert reasons() == ["sbatch is not installed here; log in to a node of the Slurm cluster"]
    (fake / "sbatch").unlink()
    program(
        fake,
        "scontrol",
        "echo 'slurm_load_partitions error: Unable to contact slurm controller (connect failure)'"
        " >&2; exit 1",
    )
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    (reason,) = reasons()
    assert (
        "Unable to contact slurm controller (connect failure); see whether Slurm's controller is up"
        " (`scontrol ping`)" in reason
    )


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def waiting(root: Path, **knobs: Any) -> tuple[SlurmLauncher, Job]:
    """A job on both nodes that waits for ever."""
    recipe = on_cluster(root, **knobs)
    job = dataclasses.replace(job_of(recipe, "show", distributed=True), argv=blocking_argv(root))
    return SlurmLauncher(recipe), with_next_rendezvous(recipe, job)


@pytest.mark.drawn("jobs of Slurm", keep=2)
def test_a_lost_answer_makes_no_second_job_and_secrets_are_nowhere(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN_OF_MINE", SECRET)
    monkeypatch.setattr("ingot.launch.places.slurm.RETRY_S", 0.1)
    # The first time the answer is lost, and the job is there; before that the controller is not
    # reached at all.
    program(
        tmp_path / "bin",
        "sbatch",
        f"""
[ "$1" = --version ] && exec /usr/bin/sbatch "$@"
echo x >> {tmp_path}/asked
[ $(wc -l < {tmp_path}/asked) -ge 2 ] && /usr/bin/sbatch "$@" > {tmp_path}/answer
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    launcher, job = waiting(tmp_path, launch__secrets=["TOKEN_OF_MINE"])
    handle = launcher.submit(job)
    assert [handle.id] == slurm.jobs() == (tmp_path / "answer").read_text().split()
    assert handle_of(launcher.recipe, "show") == handle
    wait_until(lambda: len(waiting_on(job.argv)) == 2)
    assert launcher.status(handle) == "running"
    for process in waiting_on(job.argv):
        assert process.environ()["TOKEN_OF_MINE"] == SECRET
    told = [
        slurm.ask("scontrol", "show", "job", handle.id),
        slurm.ask("scontrol", "write", "batch_script", handle.id, "-"),
    ]
    assert "ingot-small-show" in told[0]
    assert not any(SECRET in text for text in told)
    kept = [
        path
        for folder in (slurm.folder, tmp_path)
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert kept == []
    # The same command finds the job that runs; another one is refused.
    assert launcher.submit(with_next_rendezvous(launcher.recipe, job)) == handle
    with pytest.raises(Failed, match=f"as slurm job {handle.id} with other arguments"):
        launcher.submit(Job("show", ("show", "else"), 1, 2, rendezvous=job.rendezvous))
    # Signals reach the ranks of both nodes, and nothing else.
    launcher.signal(handle, signal.SIGTERM)
    wait_until(lambda: launcher.status(handle) == "cancelled")
    assert launcher.log(handle).read().decode().count("stopped by SIGTERM") == 2
    gone(tmp_path, slurm)


@pytest.mark.drawn("jobs of Slurm", keep=2)
def test_a_submission_that_nobody_answers_for_is_asked_about_before_another_is_made(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN_OF_MINE", SECRET)
    monkeypatch.setattr("ingot.launch.places.slurm.RETRY_S", 0.1)
    monkeypatch.setattr("ingot.launch.supervisor.remote_attempt.RETRY_S", 0.1)
    lost = "slurm_load_jobs error: Socket timed out on send/recv operation"
    program(
        tmp_path / "bin",
        "sbatch",
        f"""
[ "$1" = --version ] || echo "$@" >> {tmp_path}/submitted
/usr/bin/sbatch "$@"
[ "$1" = --version ] && exit 0
echo '{lost}' >&2; exit 1""",
    )
    program(
        tmp_path / "bin",
        "squeue",
        f"""
echo x >> {tmp_path}/asked
[ $(wc -l < {tmp_path}/asked) = 1 ] || exec /usr/bin/squeue "$@"
echo '{lost}' >&2; exit 1""",
    )
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        launcher, job = waiting(tmp_path, launch__secrets=["TOKEN_OF_MINE"])
        attempt = RemoteAttempt(launcher, job, launcher.recipe.folder.root, patience_s=60)
        assert attempt.handle is None
        wait_until(lambda: attempt.poll() is None and attempt.handle is not None)
        assert attempt.handle is not None
        assert slurm.jobs() == [attempt.handle.id]
        assert len((tmp_path / "submitted").read_text().splitlines()) == 1
        wait_until(lambda: len(waiting_on(job.argv)) == 2)
        assert {process.environ()["TOKEN_OF_MINE"] for process in waiting_on(job.argv)} == {
            SECRET
        }, "kept for nodes that might come"
        attempt.stop()
        gone(tmp_path, slurm)
        # Another command of the same verb finds it too, whoever had asked.
        (tmp_path / "asked").unlink()
        with pytest.raises(Failed, match="whether show was submitted is unknown"):
            launcher.submit(with_next_rendezvous(launcher.recipe, job))
    (job_id,) = slurm.jobs()
    assert launcher.submit(with_next_rendezvous(launcher.recipe, job)).id == job_id
    assert slurm.jobs() == [job_id]
    slurm.ask("scancel", job_id)
    gone(tmp_path, slurm)


def test_a_refusal_of_sbatch_leaves_nothing_to_ask_about(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN_OF_MINE", SECRET)
    launcher, job = waiting(
        tmp_path,
        launch__secrets=["TOKEN_OF_MINE"],
        launch__slurm__options={"constraint": "nowhere"},
    )
    with pytest.raises(Failed, match="sbatch: "):
        launcher.submit(job)
    left = {path.name: path.read_text() for path in Path(job.rendezvous or "").iterdir()}
    assert left.keys() == {"slurm.current", "slurm.sh"}
    assert left["slurm.current"] == NO_REQUEST


def test_a_controller_that_does_not_answer_is_no_fault_of_the_recipe(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart waits for it to answer; what is wrong with the recipe ends it."""
    monkeypatch.chdir(tmp_path)
    program(
        tmp_path / "bin",
        "scontrol",
        "echo 'slurm_load_partitions error: Unable to contact slurm controller (connect failure)'"
        " >&2; exit 1",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    launcher, job = waiting(tmp_path)
    with pytest.raises(Failed, match="Unable to contact slurm controller"):
        launcher.submit(job)
    launcher, job = (
        SlurmLauncher(on_cluster(tmp_path, launch__code="sync")),
        with_next_rendezvous(launcher.recipe, job),
    )
    with pytest.raises(WrongInput, match=r"launch\.code=sync"):
        launcher.submit(job)


@pytest.mark.drawn("jobs of Slurm", keep=2)
def test_a_job_of_another_recipe_is_not_taken_over(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe file that was edited has the same name."""
    monkeypatch.chdir(tmp_path)
    launcher, job = waiting(tmp_path)
    handle = launcher.submit(job)
    for knobs in ({"train__optimizer__lr": 0.5}, {"launch__processes": 3}):
        other = SlurmLauncher(on_cluster(tmp_path, **knobs))
        with pytest.raises(
            Failed,
            match=(
                f"as slurm job {handle.id} with another recipe; wait for it, or `ingot launch"
                " cancel"
            ),
        ):
            other.submit(with_next_rendezvous(other.recipe, job))
    elsewhere = SlurmLauncher(on_cluster(tmp_path, launch__slurm__time="30m", serve__port=9999))
    assert elsewhere.submit(with_next_rendezvous(elsewhere.recipe, job)) == handle
    assert slurm.jobs() == [handle.id]
    launcher.cancel(handle)
    gone(tmp_path, slurm)


@pytest.mark.drawn("jobs of Slurm", keep=2)
def test_a_persons_variables_do_not_override_the_script(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch takes its variables before the options of a script; those of knobs that are not set
    may come from there.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "EXPORT": "NONE",
        "TIMELIMIT": "1",
        "REQUEUE": "1",
        "SIGNAL": "KILL@60",
        "WAIT": "1",
        "PARTITION": "one",
        "ARRAY_INX": "0-3",
    }.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    monkeypatch.setenv("COLOUR", "blue")
    launcher, job = waiting(tmp_path, launch__slurm__time="4m", launch__slurm__signal_s=60)
    assert launcher.can(job) == [
        "launch.nodes=2 and partition one gives 1; lower it, or choose another"
        " launch.slurm.partition"
    ]
    with monkeypatch.context() as patch:
        patch.setenv("SBATCH_PARTITION", "mian")
        assert launcher.can(job) == [
            "SBATCH_PARTITION mian is unknown; there are main, one; nearest: main"
        ]
    job = dataclasses.replace(job, nodes=1)
    handle = launcher.submit(job)
    wait_until(lambda: len(waiting_on(job.argv)) == 1)
    about = slurm.ask("scontrol", "-o", "show", "job", handle.id).split()
    assert {"TimeLimit=00:04:00", "Requeue=0", "Partition=one", f"JobId={handle.id}"} <= set(about)
    assert not any(part.startswith("ArrayJobId") for part in about)
    assert waiting_on(job.argv)[0].environ()["COLOUR"] == "blue"
    launcher.cancel(handle)
    gone(tmp_path, slurm)


def test_a_job_that_does_not_go_is_told_of(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.launch.places.slurm.CANCEL_TIMEOUT_S", 1.0)
    program(tmp_path / "bin", "scontrol", "echo 'JobId=7 JobState=COMPLETING'")
    program(tmp_path / "bin", "scancel", f"echo $1 >> {tmp_path}/cancelled")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    handle = Handle(
        "train", "slurm", "7", ("train",), 1.0, "", {"meet": str(tmp_path), "nodes": "1"}
    )
    with pytest.raises(
        Failed, match=r"Slurm job 7 is not gone 1 s after scancel.*scontrol show job 7"
    ):
        SlurmLauncher(on_cluster(tmp_path)).cancel(handle)
    assert (tmp_path / "cancelled").read_text() == "7\n"


@pytest.mark.drawn("jobs of Slurm", keep=2)
def test_a_job_that_a_person_cancels_is_not_started_again(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher, job = waiting(tmp_path)
    attempt = RemoteAttempt(launcher, job, launcher.recipe.folder.root)
    wait_until(lambda: attempt.poll() is None and len(waiting_on(job.argv)) == 2)
    assert attempt.handle is not None
    slurm.ask("scancel", attempt.handle.id)
    with StopRequests() as stops:
        end = follow(attempt, stops)
    assert (end.code, attempt.preempted()) == (128 + signal.SIGTERM, False)
    gone(tmp_path, slurm)


def test_a_job_in_the_queue_is_cancelled_when_we_are_asked_to_stop(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher, job = waiting(tmp_path, launch__slurm__options={"begin": "now+1hour"})
    attempt = RemoteAttempt(launcher, job, launcher.recipe.folder.root)
    assert attempt.poll() is None
    assert attempt.running() == (), "nobody hangs who does not run"
    attempt.send(signal.SIGTERM)
    wait_until(lambda: attempt.poll() is not None)
    end = attempt.poll()
    assert end is not None
    assert (end.shell_code, attempt.preempted()) == (128 + signal.SIGTERM, False)
    gone(tmp_path, slurm)


@pytest.mark.drawn("training on several machines")
def test_two_nodes_come_to_what_two_processes_come_to_though_a_node_goes_down(
    root: Path, slurm: Cluster, expected: dict[str, str]
) -> None:
    recipe = on_cluster(root)
    training = ingot("launch", "train", written(root, recipe), cwd=root)
    wait_for(training, lambda: 5 in steps(recipe))
    first = handle_of(recipe)
    assert first is not None
    assert sorted(only_ranks(root)) == [0, 1]
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        wait_for(training, lambda: (now := handle_of(recipe)) is not None and now.id != first.id)
        wait_until(lambda: not ranks_of(root))
        assert ended(ingot("launch", "status", root / "runs" / "small", cwd=root.parent))[
            1
        ].splitlines()[1].split()[:2] == ["train", "queued"]
        assert training.poll() is None
    finally:
        slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    code, _, err = ended(training)
    assert code == 0, err
    assert weights(root) == expected
    # Slurm asks the ranks first, and they may have had the time to save.
    assert re.search(
        r"slurm (took the job's machines away|told the job to stop); starting again from"
        r" checkpoint",
        err,
    ), err
    assert [event["kind"] for event in events(recipe, "restart")] == ["restart"]
    status = ended(ingot("launch", "status", root / "runs" / "small", cwd=root.parent))[1]
    assert [line.split()[1] for line in status.splitlines()] == ["succeeded", "succeeded"]
    assert (
        "train: 30 steps"
        in ended(ingot("launch", "logs", root / "runs" / "small", cwd=root.parent))[1]
    )
    gone(root, slurm)


@pytest.mark.drawn("training on several machines")
def test_before_its_time_is_over_it_saves_and_goes_on_in_a_new_job(
    root: Path, slurm: Cluster
) -> None:
    """Also: the job outlives whoever supervises it, the same command takes it over, and `ingot
    launch cancel` saves and leaves nothing.
    """
    recipe = on_cluster(root, **ENDLESS)
    file, run = written(root, recipe), root / "runs" / "small"
    training = ingot("launch", "train", file, cwd=root)
    wait_for(training, lambda: bool(steps(recipe)))
    first = handle_of(recipe)
    assert first is not None
    training.kill()
    ended(training)
    training = ingot("launch", "train", file, cwd=root)
    told = until_it_says(training, f"train: slurm {first.id}")
    assert slurm.jobs() == [first.id]
    slurm.ask(
        "scancel", "--signal=USR1", "--batch", first.id
    )  # as Slurm does by itself; see the slow test
    wait_for(training, lambda: len(events(recipe, "start")) == 2)
    (stop,) = events(recipe, "stop")
    assert [event["step"] for event in events(recipe, "start")] == [0, stop["step"]]
    second = handle_of(recipe)
    assert second is not None
    assert slurm.jobs() == [second.id] != [first.id]
    assert ended(ingot("launch", "cancel", run, cwd=root.parent))[0] == 0
    code, _, err = ended(training)
    assert code == 75, err
    assert f"Slurm job {first.id}, submitted" in told
    assert "slurm told the job to stop; starting again" in err, err
    assert max(steps(recipe)) >= stop["step"]
    gone(root, slurm)


@pytest.mark.slow
def test_slurm_itself_signals_before_the_time_limit(root: Path, slurm: Cluster) -> None:
    """A minute, the shortest limit there is."""
    recipe = on_cluster(root, **ENDLESS, launch__slurm__time=60, launch__slurm__signal_s=25)
    training = ingot("launch", "train", written(root, recipe), cwd=root)
    wait_for(training, lambda: len(events(recipe, "start")) == 2, 150)
    (stop,) = events(recipe, "stop")
    assert [event["step"] for event in events(recipe, "start")] == [0, stop["step"]]
    training.send_signal(signal.SIGTERM)
    assert ended(training)[0] == 75
    gone(root, slurm)
