"""Several processes on one machine: the ranks' exit codes come back, signals reach them, none stays
behind, and torch can meet over them.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ingot.base.environment import host_name
from ingot.launch.attempt import AttemptExit, StopRequests, follow
from ingot.launch.job import Job
from ingot.launch.node.ranks import PORTS, LocalRanks, free_port
from ingot.launch.places.local import command
from tests.cli.commands import clean_environment
from tests.launch.blocking import blocking_argv, start_script, wait_until, waiting_on
from tests.patience import PATIENCE_S

TWO = """
import sys
from ingot.launch.job import Job
from ingot.launch.places.local import foreground
ended = foreground(Job("test", tuple(sys.argv[1:]), processes=2))
print(ended.code, ended.signum)
"""
SHOW = """
import os
print(*(os.environ.get(name, '-') for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')), os.getpgrp(), flush=True)
"""

BEAT = """
import os, sys
from pathlib import Path
from ingot.base.heartbeat import HeartbeatWriter
rank = int(os.environ["RANK"])
HeartbeatWriter(Path(sys.argv[1]), rank=rank, local_rank=rank, attempt=1).beat("loading")
"""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[LocalRanks]:
    """Ranks that run a script of Python instead of a verb."""
    monkeypatch.setattr(
        "ingot.launch.node.ranks.rank_command", lambda job: [sys.executable, "-c", *job.argv]
    )
    return LocalRanks


def wait_for(attempt: LocalRanks) -> AttemptExit:
    with StopRequests() as stops:
        return follow(attempt, stops)


def test_each_rank_is_told_who_it_is_as_torchrun_would(
    ranks: type[LocalRanks], tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w") as out:
        assert wait_for(ranks(Job("test", (SHOW,), processes=3), results=out)) == AttemptExit(0, 0)
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)
    ]
    groups = {line.rsplit(" ", 1)[1] for line in lines}
    assert len(groups) == 1
    assert groups != {str(os.getpgrp())}


@pytest.mark.parametrize("asked", [True, False])
def test_ranks_are_told_whether_their_results_are_messages(
    asked: bool, ranks: type[LocalRanks], tmp_path: Path
) -> None:
    told = "import os, sys; sys.exit(os.environ.get('RESULTS_ARE_MESSAGES') is None)"
    with (tmp_path / "out").open("w") as out:
        end = wait_for(ranks(Job("test", (told,)), results=out if asked else None))
    assert end == AttemptExit(0, int(asked))


@pytest.fixture
def unnamed() -> Iterator[None]:
    """This process has not asked yet what the machine is called."""
    host_name.cache_clear()
    yield
    host_name.cache_clear()


@pytest.mark.usefixtures("unnamed")
def test_ranks_are_heard_when_the_machine_is_called_otherwise_meanwhile(
    ranks: type[LocalRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop is in another network: ranks that nobody hears would be ended as hanging."""
    monkeypatch.setattr(socket, "gethostname", lambda: "mac.office.example")
    attempt = ranks(Job("test", (BEAT, str(tmp_path)), processes=2), heartbeats=tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "mac.home.example")
    assert wait_for(attempt) == AttemptExit(0, 0)
    assert sorted(attempt.beats()) == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["mac.office.example"]


def test_one_process_is_no_rank(ranks: type[LocalRanks], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        wait_for(ranks(Job("test", (SHOW,)), results=out))
    assert (tmp_path / "out").read_text().startswith("- - - - - ")


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            (
                "import os, sys, time; r = os.environ['RANK']; time.sleep(0 if r == '1' else 60);"
                " sys.exit(5)"
            ),
            AttemptExit(1, 5),
        ),
        (
            (
                "import os, time; r = os.environ['RANK']; os.kill(os.getpid(), 9) if r == '2' else"
                " time.sleep(60)"
            ),
            AttemptExit(2, -9),
        ),
        (
            "import os, sys; sys.exit({'0': 0, '1': 75, '2': 0}[os.environ['RANK']])",
            AttemptExit(1, 75),
        ),
        ("import os, sys; sys.exit({'0': 1, '1': 2, '2': 0}[os.environ['RANK']])", None),
    ],
)
def test_the_first_rank_that_fails_decides_and_the_others_are_ended(
    ranks: type[LocalRanks], code: str, expected: AttemptExit | None
) -> None:
    attempt = ranks(Job("test", (code,), processes=3))
    began = time.monotonic()
    end = wait_for(attempt)
    assert end == expected if expected else end.code in (1, 2)
    assert time.monotonic() - began < 45
    assert not attempt.running()


def test_of_those_that_are_found_ended_together_the_killed_one_was_first(
    ranks: type[LocalRanks],
) -> None:
    """The others noticed that it was gone, and failed of that."""
    attempt = ranks(
        Job(
            "test",
            (
                (
                    "import os, sys; sys.exit(1) if os.environ['RANK'] == '0' else"
                    " os.kill(os.getpid(), 9)"
                ),
            ),
            processes=2,
        )
    )
    for process in attempt._processes:
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert attempt.poll() == AttemptExit(1, -9)


def test_a_rank_that_ended_well_does_not_end_the_others(
    ranks: type[LocalRanks], tmp_path: Path
) -> None:
    """Rank 0 may still write what all have made."""
    code = (
        "import os, time; os.environ['RANK'] == '0' and (time.sleep(4),"
        f" open({str(tmp_path / 'done')!r}, 'w').close())"
    )
    assert wait_for(ranks(Job("test", (code,), processes=2))) == AttemptExit(0, 0)
    assert (tmp_path / "done").exists()


def test_what_a_rank_started_goes_with_it(ranks: type[LocalRanks], tmp_path: Path) -> None:
    code = (
        f"import os, subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(tmp_path)!r}"
        " + '/pid', 'w').write(str(p.pid)); sys.exit(4)"
    )
    assert wait_for(ranks(Job("test", (code,)))) == AttemptExit(0, 4)
    left = int((tmp_path / "pid").read_text())
    wait_until(
        lambda: (
            not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE
        ),
        5,
    )


def test_ports_are_not_those_that_a_system_gives_away() -> None:
    first = (
        int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if sys.platform == "linux"
        else 49_152
    )
    assert PORTS.stop <= first
    assert free_port() in PORTS


@pytest.mark.drawn("ranks of a node", keep=2)
def test_the_exit_code_of_the_ranks_comes_back_without_a_traceback() -> None:
    out, err = start_script(TWO, "show", "config", "missing.yaml").communicate(timeout=PATIENCE_S)
    assert out == "2 0\n"
    assert "error: recipe missing.yaml does not exist; check the path" in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2


@pytest.mark.drawn("ranks of a node", keep=2)
@pytest.mark.parametrize("through", ["foreground", "command"])
def test_a_signal_reaches_every_rank(through: str, tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    alone = (
        subprocess.Popen(
            command(Job("test", argv, 2)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if through == "command"
        else None
    )
    parent = alone or start_script(TWO, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    parent.send_signal(signal.SIGTERM)
    out, err = parent.communicate(timeout=PATIENCE_S)
    assert (alone.returncode if alone else int(out.split()[0])) == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert not waiting_on(argv)


@pytest.mark.drawn("ranks of a node", keep=2)
def test_a_killed_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(TWO, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    victim = next(process for process in waiting_on(argv) if process.environ()["RANK"] == "1")
    victim.kill()
    out, err = parent.communicate(timeout=PATIENCE_S)
    assert out == f"{128 + signal.SIGKILL} 0\n"
    assert err == "rank 1 was ended by SIGKILL and the others were ended\n"
    assert not waiting_on(argv)


@pytest.mark.drawn("ranks of a node", keep=2)
def test_ranks_are_watched_to_their_end_though_nobody_reads_of_it(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = subprocess.Popen(command(Job("test", argv, 2)), stderr=subprocess.PIPE)
    assert parent.stderr is not None
    parent.stderr.close()
    wait_until(lambda: len(waiting_on(argv)) == 2)
    waiting_on(argv)[0].kill()
    assert parent.wait(60) == 128 + signal.SIGKILL
    assert not waiting_on(argv)


@pytest.mark.drawn("ranks of a node", keep=2)
def test_ranks_die_with_a_killed_launcher(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    parent = start_script(TWO, *argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)
    wait_until(lambda: not waiting_on(argv))


@pytest.mark.drawn("ranks of torchrun")
def test_ranks_that_torchrun_started_share_a_step(root: Path) -> None:
    """A person's or a cluster's own torchrun: its variables make ranks of its processes, and it
    starts none again.
    """
    from ingot.config.load import dump_recipe
    from tests.small import small_recipe

    recipe = small_recipe(root, train__steps=2, launch__processes=2)
    (root / "r.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
        "--nproc-per-node=2",
        "--max-restarts=0",
    ]
    done = subprocess.run(
        [*torchrun, "-m", "ingot", "train", str(root / "r.yaml")],
        env=clean_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "on 2 x CPU" in done.stderr
    assert done.stdout.count("train: 2 steps") == 1
