"""The local launcher with real processes: exit codes, signals, handles, nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.base.processes import machine_id, start_ticks
from ingot.launch.attempt import SAME_REQUEST_S
from ingot.launch.job import Handle, Job
from ingot.launch.places.local import LocalLauncher, command, environment, foreground
from tests.launch.blocking import blocking_argv, start_script, wait_until, waiting_on
from tests.patience import PATIENCE_S

FORK = multiprocessing.get_context("fork")
FOREGROUND = """
import sys
from ingot.launch.job import Job
from ingot.launch.places.local import foreground
ended = foreground(Job("test", tuple(sys.argv[1:])))
print(ended.code, ended.signum)
"""


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher(tmp_path / "run")


def _recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text("name: launched\ndata: {train: [{source: nothing}]}\n", encoding="utf-8")
    return str(path)


def test_one_process_is_plain_python_and_several_are_started_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job("train", ("train", "r.yaml", "train.steps=3"))
    assert command(job) == [sys.executable, "-P", "-m", "ingot", "train", "r.yaml", "train.steps=3"]
    assert command(dataclasses.replace(job, processes=4)) == [
        sys.executable,
        "-P",
        "-m",
        "ingot.launch",
        "4",
        "train",
        "r.yaml",
        "train.steps=3",
    ]


def test_cores_are_shared_out_unless_the_person_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("ingot.launch.node.ranks.usable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(Job("train", (), processes=4)) == {"OMP_NUM_THREADS": "2"}
    assert environment(Job("train", (), processes=16)) == {"OMP_NUM_THREADS": "1"}
    assert environment(Job("train", ())) == {}
    for given, shared in (("3", {}), ("3,2", {}), ("", {"OMP_NUM_THREADS": "2"})):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert environment(Job("train", (), processes=4)) == shared


def test_render_is_a_script_without_secrets(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    job = Job(
        "train-1",
        ("train", "my recipe.yaml"),
        environment={"SEEN": "a b", "TOKEN": "hidden"},
        secrets=("TOKEN",),
        time_limit_s=90,
    )
    text = launcher.render(job).replace(sys.executable, "PYTHON").replace(str(tmp_path), "HERE")
    assert text == (Path(__file__).parent / "local.sh").read_text(encoding="utf-8")
    subprocess.run(["sh", "-n"], input=launcher.render(job), text=True, check=True)


def test_a_job_that_succeeds(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.submit(Job("good", ("show", "config", _recipe(tmp_path))))
    wait_until(lambda: launcher.status(handle) != "running")
    assert launcher.status(handle) == "succeeded"
    assert "name: launched" in Path(handle.log).read_text(encoding="utf-8")
    assert launcher.find("good") == handle
    assert Handle.from_json(handle.to_json()) == handle


def test_a_job_that_fails_says_why_in_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    handle = launcher.submit(Job("bad", ("show", "config", str(tmp_path / "missing.yaml"))))
    wait_until(lambda: launcher.status(handle) != "running")
    assert launcher.status(handle) == "failed"
    assert "missing.yaml does not exist" in Path(handle.log).read_text(encoding="utf-8")


def test_a_running_job_is_not_started_twice_and_can_be_cancelled(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    argv = blocking_argv(tmp_path)
    job = Job("long", argv)
    handle = launcher.submit(job)
    wait_until(lambda: len(waiting_on(argv)) == 1)
    assert launcher.status(handle) == "running"
    with pytest.raises(Failed, match="running already"):
        launcher.submit(job)
    launcher.cancel(handle)
    assert launcher.status(handle) == "cancelled"
    assert not waiting_on(argv)
    assert (tmp_path / "run" / "jobs" / "long.exit").read_text(
        encoding="utf-8"
    ) == f"{128 + signal.SIGTERM}\n"


def _submit_meeting(folder: Path, argv: tuple[str, ...], meeting: Any, told: Any) -> None:
    """Submit a job; before its handle is stored, wait a while for another process there."""
    store = LocalLauncher._store

    def later(*arguments: Any) -> Handle:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=2)
        return store(*arguments)

    LocalLauncher._store = later  # type: ignore[method-assign]
    with contextlib.suppress(Failed):
        told.put(LocalLauncher(folder).submit(Job("long", argv)))


def test_of_two_jobs_that_start_at_once_one_runs_and_has_the_handle(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    argv, meeting, told = blocking_argv(tmp_path), FORK.Barrier(2), FORK.SimpleQueue()
    both = [
        FORK.Process(target=_submit_meeting, args=(launcher.folder, argv, meeting, told))
        for _ in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=PATIENCE_S)
        assert process.exitcode == 0
    handles = [told.get()]
    while not told.empty():
        handles.append(told.get())
    try:
        assert handles == [launcher.find("long")]
        assert launcher.status(handles[0]) == "running"
    finally:
        for handle in handles:
            launcher.cancel(handle)


def test_a_job_over_its_time_is_stopped(launcher: LocalLauncher, tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    handle = launcher.submit(Job("late", argv, time_limit_s=1.5))
    wait_until(lambda: launcher.status(handle) != "running")
    assert launcher.status(handle) == "failed"
    assert not waiting_on(argv)


def test_a_handle_whose_process_is_another_now_is_unknown(launcher: LocalLauncher) -> None:
    for about in (
        {"machine_id": str(machine_id()), "started": "1"},
        {"machine_id": "another", "started": str(start_ticks(1))},
        {},
    ):
        handle = Handle("old", "local", "1", ("train",), started=1.0, log="nowhere", about=about)
        assert launcher.status(handle) == "unknown"
        launcher.cancel(handle)  # must not signal process 1


def test_a_job_runs_whatever_the_clock_says(
    launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = launcher.begin(Job("train", ("train", "r.yaml")))
    monkeypatch.setattr(
        psutil.Process, "create_time", lambda self: 1.0
    )  # counted from a time of boot that moves when the clock is set
    assert launcher.status(handle) == "running"


def test_what_this_machine_cannot_do_is_refused_with_the_reason(launcher: LocalLauncher) -> None:
    assert launcher.can(Job("a", ())) == []
    job = Job("many", ("train",), nodes=2, image="gcr.io/x")
    assert len(launcher.can(job)) == 2
    for refuse in (launcher.submit, foreground):
        with pytest.raises(WrongInput, match="2 nodes"):
            refuse(job)


def test_a_process_can_do_a_job_itself_under_a_handle(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    job = Job("train", ("train", "r.yaml"))
    handle = launcher.begin(job)
    assert launcher.status(handle) == "running"
    assert launcher.handles() == [handle]
    with pytest.raises(Failed, match="running already"):
        launcher.begin(job)
    launcher.end(handle, 75)
    alone = dataclasses.replace(handle, started=handle.started - 100)  # of a process that is gone
    assert launcher.status(alone) == "preempted"
    launcher.end(handle, 137)
    assert launcher.status(alone) == "failed"


@pytest.mark.drawn("local jobs", keep=2)
def test_foreground_hands_back_the_exit_code_and_keeps_stdout_clean(tmp_path: Path) -> None:
    good = start_script(FOREGROUND, "show", "config", _recipe(tmp_path))
    out, err = good.communicate(timeout=PATIENCE_S)
    assert out == "0 0\n"
    assert "name: launched" in err
    bad = start_script(FOREGROUND, "show", "config", "missing.yaml")
    out, err = bad.communicate(timeout=PATIENCE_S)
    assert out == "2 0\n"
    assert err == "error: recipe missing.yaml does not exist; check the path\n"


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("sent", "arrives"),
    [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGINT"), ("SIGHUP", "SIGTERM"), ("SIGUSR1", "")],
)
def test_foreground_hands_signals_on(tmp_path: Path, sent: str, arrives: str) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(FOREGROUND, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 1)
    parent.send_signal(signal.Signals[sent])
    out, err = parent.communicate(timeout=PATIENCE_S)
    assert out == f"{128 + signal.Signals[arrives or sent]} {signal.Signals[sent]:d}\n"
    assert err == (f"stopped by {arrives}\n" if arrives else ""), (
        "SIGUSR1 means something to a training only"
    )


@pytest.mark.drawn("local jobs", keep=2)
def test_a_second_signal_ends_a_job_that_does_not_listen(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(FOREGROUND, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 1)
    child = waiting_on(argv)[0]
    child.suspend()  # deaf to all but SIGKILL
    for number in (signal.SIGINT, signal.SIGTERM):  # one request, of a terminal and a launcher
        parent.send_signal(number)
    time.sleep(2 * SAME_REQUEST_S)
    assert parent.poll() is None
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=PATIENCE_S)
    assert out == f"{128 + signal.SIGKILL} {signal.SIGINT:d}\n"
    assert not child.is_running()


@pytest.mark.drawn("local jobs", keep=2)
def test_the_job_dies_with_a_killed_parent(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(FOREGROUND, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 1)
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not waiting_on(argv))
