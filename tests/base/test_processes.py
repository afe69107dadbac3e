"""Telling machines and processes apart, also where there is no /proc, as on macOS; and hearing how
those that one starts end.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base import processes
from ingot.launch.limit import LimitedCommand
from ingot.launch.places.local import JobExit


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without /proc, whose `sysctl` knows what macOS's does."""
    program = tmp_path / "sysctl"
    program.write_text('#!/bin/sh\n[ "$*" = "-n kern.bootsessionuuid" ] && echo 4C2D-01\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "BOOT", tmp_path / "nowhere")
    processes._boot_session.cache_clear()
    yield tmp_path
    processes._boot_session.cache_clear()


def test_a_mac_is_known_by_its_boot(mac: Path) -> None:
    assert processes.machine_id() == "4C2D-01"


def test_a_machine_that_says_nothing_of_itself_is_not_known(mac: Path) -> None:
    (mac / "sysctl").write_text("#!/bin/sh\nexit 1\n")
    assert processes.machine_id() is None


def test_ps_knows_a_process_from_the_next_with_its_id() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = processes.start_by_ps(child.pid)
    assert began is not None
    assert began.split()[-1].isdigit(), "a year"
    assert processes.start_by_ps(child.pid) == began
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_by_ps(child.pid) is None, "it is dead, and its parent has not asked"
    child.wait()
    assert processes.start_by_ps(child.pid) is None


def test_what_we_start_finds_modules_where_we_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in somebody's folder takes the place of no library, unless it does here."""
    (tmp_path / "this.py").write_text("print('a file of mine')")
    monkeypatch.chdir(tmp_path)
    run = [*processes.own_python(), "-m", "this"]
    assert "Zen" in subprocess.check_output(run, text=True)
    assert "Zen" in processes.run_python(sys.executable, "import this", "this").stdout
    for here in ("", str(tmp_path)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [here, *sys.path])
            run = [*processes.own_python(), "-m", "this"]
            found = processes.run_python(sys.executable, "import this", "this").stdout
        assert found == subprocess.check_output(run, text=True) == "a file of mine\n"


@pytest.fixture
def children_ignored() -> Iterator[None]:
    """As whoever started this process may have left it."""
    numbers = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGALRM)}
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _failing_child() -> int:
    return subprocess.run(["false"], check=False).returncode


@pytest.mark.usefixtures("children_ignored")
@pytest.mark.parametrize(
    ("main", "starts"),
    [
        ("ingot.cli.start", "ingot.cli.app.main"),
        ("ingot.launch.__main__", "ingot.launch.__main__.foreground"),
        ("ingot.launch.node.main", "ingot.launch.node.main.run_node"),
    ],
)
def test_a_program_that_starts_others_hears_how_they_end(
    main: str, starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a training all of whose ranks failed exits with 0."""
    assert _failing_child() == 0, "what it would hear"
    heard = list[int]()

    def start(*_: object, **__: object) -> JobExit:
        heard.append(_failing_child())
        return JobExit(heard[0], 0)

    program = importlib.import_module(main)
    monkeypatch.setattr(starts, start)
    typed = ["--", "train"] if "node" in main else ["1", "train"]
    monkeypatch.setattr("sys.argv", ["program", *typed])
    for stream in ("stdout", "stderr"):  # given others where nobody may read them
        monkeypatch.setattr(f"sys.{stream}", getattr(sys, stream))
    program.main()
    assert heard == [1]


@pytest.mark.usefixtures("children_ignored")
def test_a_limited_command_ends_as_it_does() -> None:
    assert LimitedCommand(["false"], 60).wait() == 1
    signal.setitimer(signal.ITIMER_REAL, 0)
