"""Several processes through torchrun: the ranks' exit codes come back, signals reach them, none stays behind."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.launch.blocking import blocking_argv, start_script, wait_until, waiting_on

TWO = """
import sys
from ingot.launch.job import Job
from ingot.launch.local import foreground
ended = foreground(Job("test", tuple(sys.argv[1:]), processes=2))
print(ended.code, ended.signum)
"""


def test_the_exit_code_of_the_ranks_comes_back_without_a_traceback() -> None:
    out, err = start_script(TWO, "show", "config", "missing.yaml").communicate(timeout=120)
    assert out == "2 0\n"
    assert "error: recipe missing.yaml does not exist; check the path" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2


def test_a_signal_reaches_every_rank(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(TWO, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    parent.send_signal(signal.SIGTERM)
    out, err = parent.communicate(timeout=60)
    assert out == f"{128 + signal.SIGTERM} {signal.SIGTERM:d}\n"
    assert "Traceback" not in err
    assert not waiting_on(argv)


def test_ranks_die_with_a_killed_torchrun(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(TWO, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    parent.kill()
    parent.communicate(timeout=60)
    wait_until(lambda: not waiting_on(argv), 10.0)
