from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ingot.base import runfolder
from ingot.base.environment import NODE_VARIABLE
from ingot.base.errors import Failed, WrongInput
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.processes import process_scope
from ingot.base.remote.deferred import DeferredFiles
from ingot.base.remote.memory import exclusive_sync
from ingot.base.runfolder import (
    RUN_LOCK,
    RunFolder,
    check_no_other_run,
    folder_lock,
    lock_holder,
    shared_lock,
)
from ingot.base.runlog import append_line
from ingot.report.life import at_work
from tests.nobody import as_nobody, open_folder

HOLDER = """
import sys, time
from pathlib import Path
from ingot.base.runfolder import folder_lock
with folder_lock(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""
STARTED = """
import sys
from pathlib import Path
from ingot.base.runfolder import check_no_other_run
check_no_other_run(Path(sys.argv[1]))
"""


@contextlib.contextmanager
def held_elsewhere(folder: Path, name: str = "lock") -> Iterator[subprocess.Popen[bytes]]:
    """A process that this one started, and that holds a lock until it is killed at the end."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), name], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        yield holder
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()


def test_a_second_process_is_refused_and_told_who_holds_the_lock_until_that_one_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with held_elsewhere(folder) as holder:
        with (
            pytest.raises(Failed, match=f"in use by process {holder.pid}; wait for it"),
            folder_lock(folder),
        ):
            pass
        assert lock_holder(folder) == holder.pid
    assert lock_holder(folder) is None
    with folder_lock(folder):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="not root, so that it cannot become another user")
def test_what_another_user_runs_is_at_work_as_well() -> None:
    def refused(folder: Path, process: int) -> None:
        assert lock_holder(folder, RUN_LOCK) == process
        with pytest.raises(Failed, match=f"in use by process {process}; wait for it"):
            check_no_other_run(folder)

    with open_folder() as folder:
        with held_elsewhere(folder, RUN_LOCK) as holder:
            for ask in (refused, partial(as_nobody, refused)):
                ask(folder, holder.pid)
        as_nobody(check_no_other_run, folder)


def test_beside_a_run_goes_only_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_elsewhere(tmp_path, RUN_LOCK) as holder:
        with pytest.raises(Failed, match=f"in use by process {holder.pid}; wait for it"):
            check_no_other_run(tmp_path)
        monkeypatch.setenv(NODE_VARIABLE, "0")
        check_no_other_run(tmp_path)
        monkeypatch.delenv(NODE_VARIABLE)
    check_no_other_run(tmp_path)  # what the file says of a process that ended does not count
    with folder_lock(tmp_path, RUN_LOCK):
        check_no_other_run(tmp_path)
        subprocess.run([sys.executable, "-c", STARTED, str(tmp_path)], check=True)


def test_a_run_of_another_container_is_at_work_as_well(tmp_path: Path) -> None:
    """Its process cannot be seen here, or its id is that of another one."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    for process in (ended.pid, os.getppid()):
        with held_elsewhere(tmp_path, RUN_LOCK):
            (tmp_path / f".{RUN_LOCK}").write_text(str(process))
            assert lock_holder(tmp_path, RUN_LOCK) == process
        assert lock_holder(tmp_path, RUN_LOCK) is None
    (tmp_path / f".{RUN_LOCK}").write_text(str(ended.pid))
    with (tmp_path / f".{RUN_LOCK}").open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(Failed, match=f"in use by process {ended.pid}; wait for it"):
            check_no_other_run(tmp_path)


def test_nobody_descends_from_a_process_of_another_container(tmp_path: Path) -> None:
    """Whose id is mostly 1, as that of the first process here."""
    with (tmp_path / f".{RUN_LOCK}").open("wb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        for process in (os.getpid(), 1):
            (tmp_path / f".{RUN_LOCK}").write_text(f"{process} 0123abcd")
            assert at_work(RunFolder(tmp_path))
            with pytest.raises(Failed, match=f"in use by process {process}; wait for it"):
                check_no_other_run(tmp_path)
            (tmp_path / f".{RUN_LOCK}").write_text(f"{process} {process_scope()}")
            check_no_other_run(tmp_path)
            assert at_work(RunFolder(tmp_path)) == (process == 1)


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), folder_lock(tmp_path):
            raise KeyError


def test_a_lock_that_was_given_back_names_nobody_even_without_a_table_of_locks(
    tmp_path: Path,
) -> None:
    """The id of a process that ended may be given to another one."""
    with folder_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {process_scope()}"
        with pytest.raises(Failed, match="in use"), folder_lock(tmp_path):
            pass
        assert lock_holder(tmp_path) == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""


@pytest.fixture
def no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.setattr(runfolder, "TABLE", tmp_path / "no-such-table")


@pytest.mark.usefixtures("no_table")
def test_without_a_table_of_locks_the_holder_is_who_holds_it(tmp_path: Path) -> None:
    """And not who has the id of a run that was killed: its user would be told to stop that one."""
    with held_elsewhere(tmp_path) as holder:
        assert lock_holder(tmp_path) == holder.pid
    (tmp_path / ".lock").write_text(str(os.getppid()))
    assert lock_holder(tmp_path) is None
    with folder_lock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()


def test_who_asks_for_the_holder_does_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    asking = (tmp_path / ".lock").open("rb")
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda seconds: asking.close())
    with folder_lock(tmp_path):
        assert asking.closed


def test_locks_of_other_names_do_not_meet(tmp_path: Path) -> None:
    with folder_lock(tmp_path), folder_lock(tmp_path, "other"):
        assert lock_holder(tmp_path / "none") is None


def test_a_file_where_the_folder_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(WrongInput, match=r"run.* in the way"), folder_lock(tmp_path / "run"):
        pass


def test_who_comes_alone_may_clear_up_and_nobody_else(tmp_path: Path) -> None:
    cleared: list[str] = []
    with (
        shared_lock(tmp_path, "writers", lambda: cleared.append("first")),
        shared_lock(tmp_path, "writers", lambda: cleared.append("second")),
    ):
        pass
    with shared_lock(tmp_path, "writers", lambda: cleared.append("third")):
        pass
    assert cleared == ["first", "third"]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (".lock", lambda root: folder_lock(root).__enter__()),
        (".writers", lambda root: shared_lock(root, "writers", lambda: None).__enter__()),
        ("events.jsonl", lambda root: append_line(root / "events.jsonl", {})),
        ("*", lambda root: HeartbeatWriter(root, rank=0, local_rank=0, attempt=0)),
        (".replica/lock", lambda root: exclusive_sync(root).__enter__()),
        ("rows.lock", lambda root: DeferredFiles(root, "", "").drop("rows")),
    ],
)
def test_a_group_may_share_a_run_where_the_umask_says_so(
    tmp_path: Path, name: str, write: Callable[[Path], object]
) -> None:
    before = os.umask(0o002)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    (made,) = tmp_path.glob(name)
    assert made.stat().st_mode & 0o777 == 0o664
