"""What runs on each node, as processes of this machine: notes, exit codes, signals, and that all
end when one does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingot.base.environment import NODE_VARIABLE, RESOLVED_VARIABLE
from ingot.base.errors import WrongInput
from ingot.base.heartbeat import HeartbeatWriter, heartbeat_file, read_beats
from ingot.launch.job import Job
from ingot.launch.node.main import code_hash, job_and_position, run_node
from ingot.launch.node.ranks import NodePosition, free_port
from ingot.launch.node.watch import flush_heartbeats
from ingot.launch.rendezvous import ARRIVED, EXIT, Rendezvous
from tests.launch.blocking import blocking_argv, wait_until, waiting_on
from tests.launch.nodes import end_all
from tests.patience import PATIENCE_S

TWO = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "10.0.0.7",
    "PET_MASTER_PORT": "29501",
}


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    end_all(tmp_path)


def nodes(
    meet: Path,
    argv: tuple[str, ...],
    *options: str,
    count: int = 2,
    processes: int = 1,
    **variables: str,
) -> list[subprocess.Popen[str]]:
    """The node processes of a job on `count` nodes."""
    meet.mkdir(parents=True, exist_ok=True)
    port = str(free_port())
    started = []
    for number in range(count):
        environment = {
            **os.environ,
            "PET_NNODES": str(count),
            "PET_NODE_RANK": str(number),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": port,
            **variables,
        }
        started.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ingot.launch.node",
                    "--rendezvous",
                    str(meet),
                    *options,
                    "--",
                    *argv,
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def said(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


def test_the_place_of_a_node_is_told_by_torchruns_variables() -> None:
    job, node = job_and_position(("train", "r.yaml"), TWO, rendezvous="there")
    assert (job, node) == (
        Job("train", ("train", "r.yaml"), 4, 2, rendezvous="there"),
        NodePosition(1, "10.0.0.7", 29501),
    )
    assert job_and_position(("train",), {}) == (
        Job("train", ("train",), 1, 1),
        NodePosition(0, "", 0),
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"PET_NODE_RANK": "2"}, "node 2 of 2"),
        ({"PET_NODE_RANK": "x"}, "must be integers"),
        ({"PET_NPROC_PER_NODE": "0"}, "0 processes"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR"),
    ],
)
def test_variables_that_make_no_sense_are_refused(changed: dict[str, str], told: str) -> None:
    with pytest.raises(WrongInput, match=told):
        job_and_position(("train",), {**TWO, **changed})
    with pytest.raises(WrongInput, match="no verb"):
        job_and_position((), TWO)


@pytest.mark.drawn("nodes", keep=2)
def test_exit_codes_come_back_as_they_are_and_are_noted(tmp_path: Path) -> None:
    """And a rank's variables are torchrun's."""
    (one,) = nodes(tmp_path / "alone", ("show", "config", "missing.yaml"), count=1, processes=2)
    code, err = said(one)
    assert code == 2
    assert "rank 1: error: recipe missing.yaml does not exist" in err
    # Both ranks fail, and the ranks of a second node as well; which one ends first is chance, and
    # what it ended with is the answer.
    two = [
        said(process)
        for process in nodes(tmp_path / "meet", ("show", "config", "missing.yaml"), processes=2)
    ]
    meeting = Rendezvous(str(tmp_path / "meet"))
    notes = meeting.notes(EXIT)
    assert {number: note["rank"] // 2 for number, note in notes.items()} == {0: 0, 1: 1}
    by_themselves = [number for number, note in notes.items() if "because" not in note]
    assert {notes[number]["code"] for number in by_themselves} == {2}
    assert [code for code, _ in two] == [2 if number in by_themselves else 1 for number in range(2)]
    assert {note["code"] for note in meeting.notes(ARRIVED).values()} == {code_hash()}
    (tmp_path / "r.yaml").write_text("name: here\ndata: {train: [{source: nothing}]}\n")
    assert [
        process.wait(60)
        for process in nodes(tmp_path / "good", ("show", "config", str(tmp_path / "r.yaml")))
    ] == [0, 0]


@pytest.mark.drawn("nodes", keep=2)
def test_a_rank_that_dies_on_one_node_ends_the_ranks_of_the_other(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    two = nodes(tmp_path / "meet", argv)
    wait_until(lambda: len(waiting_on(argv)) == 2)
    (victim,) = [process for process in waiting_on(argv) if process.environ()["RANK"] == "1"]
    assert victim.environ()["GROUP_RANK"] == "1"
    victim.kill()
    (zero, _), (one, _) = said(two[0]), said(two[1])
    assert (zero, one) == (1, 128 + signal.SIGKILL)
    notes = Rendezvous(str(tmp_path / "meet")).notes(EXIT)
    assert (notes[1]["rank"], notes[1]["code"], "because" in notes[1]) == (
        1,
        -signal.SIGKILL,
        False,
    )
    assert notes[0]["because"] == "1"
    assert not waiting_on(argv)


@pytest.mark.drawn("nodes", keep=2)
def test_signals_come_as_notes_to_all_ranks_or_to_one(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    two = nodes(tmp_path / "meet", argv)
    meeting = Rendezvous(str(tmp_path / "meet"))
    wait_until(lambda: len(waiting_on(argv)) == 2)
    meeting.send(signal.SIGUSR2)  # which a rank that has no handler for it would die of
    meeting.send(signal.SIGUSR2, [0])
    time.sleep(2)
    assert len(waiting_on(argv)) == 2
    meeting.send(signal.SIGTERM, [1])
    code, err = said(two[1])
    assert (code, "stopped by SIGTERM" in err) == (143, True)
    assert said(two[0])[0] == 1, "the other is ended, for it would wait in vain"


@pytest.mark.drawn("nodes", keep=2)
def test_a_node_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    (node,) = nodes(tmp_path / "meet", argv, count=1)
    wait_until(lambda: len(waiting_on(argv)) == 1)
    node.kill()
    said(node)
    wait_until(lambda: not waiting_on(argv))


def test_different_code_is_refused_and_so_is_a_place_that_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    Rendezvous(str(meet)).leave(1, ARRIVED, host="other", version="0.0.1", code="f00")
    first = nodes(meet, ("show", "config", "missing.yaml"))
    first[1].kill()  # which is the other one
    first[1].communicate()
    Rendezvous(str(meet)).leave(1, ARRIVED, host="other", version="0.0.1", code="f00")
    Rendezvous(str(meet)).leave(1, EXIT, rank=1, code=2)
    code, err = said(first[0])
    assert code == 2
    assert "the nodes run different code" in err
    assert "node 1 (other) has ingot 0.0.1 (f00)" in err
    monkeypatch.setattr("ingot.launch.node.main.FOLDER_TIMEOUT_S", 0.1)
    with pytest.raises(WrongInput, match=r"node 0 .* does not see .*; set `output`"):
        run_node(
            Job("show", ("show",), 1, 2, rendezvous=str(tmp_path / "nowhere")),
            NodePosition(0, "127.0.0.1", 1),
        )


def test_ranks_know_that_they_are_of_a_node_and_their_recipe_is_resolved(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What `.env` on a shared disk says would otherwise win over what was typed."""
    tell = "import json, os; print(json.dumps(dict(os.environ)))"
    rank = [sys.executable, "-I", "-S", "-c", tell]
    monkeypatch.setattr("ingot.launch.node.ranks.rank_command", lambda job: rank)
    assert run_node(Job("train", (), environment={"A": "b"}), NodePosition(3)) == 0
    variables = json.loads(capfd.readouterr().out)
    assert (variables[NODE_VARIABLE], variables[RESOLVED_VARIABLE]) == ("3", "1")
    assert variables["A"] == "b"


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    first, second = nodes(
        tmp_path / "meet", ("show", "config", "missing.yaml"), "--rendezvous-timeout-s", "3"
    )
    second.kill()
    second.communicate()
    Path(tmp_path / "meet" / "here-1.json").unlink(missing_ok=True)
    code, err = said(first)
    assert code == 1
    assert f"node 1 did not come to {tmp_path / 'meet'} within 3 s" in err


@pytest.mark.drawn("secrets of a node")
def test_a_tied_node_gets_secrets_and_ends_with_its_connection(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    (node,) = nodes(tmp_path / "meet", argv, "--launcher-on-stdin", count=1)
    assert node.stdin is not None
    node.stdin.write(json.dumps({"TOKEN_OF_MINE": "hush"}) + "\n\n")
    node.stdin.flush()
    wait_until(lambda: len(waiting_on(argv)) == 1)
    variables = waiting_on(argv)[0].environ()
    assert variables["TOKEN_OF_MINE"] == "hush"
    assert variables[NODE_VARIABLE] == "0", "nobody typed it, wherever its launcher is"
    node.stdin.close()
    assert node.wait(60) == 1
    assert not waiting_on(argv)
    assert Rendezvous(str(tmp_path / "meet")).notes(EXIT)[0]["because"] == "launcher"


@pytest.mark.drawn("secrets of a node")
def test_secrets_in_a_file_are_read_and_removed(tmp_path: Path) -> None:
    argv = blocking_argv(tmp_path)
    for number in range(2):
        (tmp_path / f"secrets-{number}.json").write_text(
            json.dumps({"TOKEN_OF_MINE": f"hush {number}"})
        )
    two = nodes(tmp_path / "meet", argv, "--environment", str(tmp_path / "secrets-{node}.json"))
    wait_until(lambda: len(waiting_on(argv)) == 2)
    assert {
        process.environ()["RANK"]: process.environ()["TOKEN_OF_MINE"]
        for process in waiting_on(argv)
    } == {"0": "hush 0", "1": "hush 1"}
    assert not list(tmp_path.glob("secrets-*"))
    for node in two:
        node.terminate()
    # A node that sees the other one's end before its own signal says 1.
    assert {said(node)[0] for node in two} <= {143, 1}


def test_nodes_of_one_name_beat_into_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        monkeypatch.setenv("GROUP_RANK", str(rank))
        HeartbeatWriter(tmp_path, rank=rank, local_rank=0, attempt=1).beat("step", step=rank)
    assert sorted(beat.rank for path in tmp_path.iterdir() for beat in read_beats(path)) == [0, 1]
    monkeypatch.delenv("GROUP_RANK")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert [beat.rank for beat in read_beats(heartbeat_file(tmp_path))] == [1]


def test_signs_of_life_are_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ingot.launch.node.watch.FLUSH_INTERVAL_S", 0.02)
    flushed = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    path = heartbeat_file(tmp_path / "heartbeats")
    path.parent.mkdir()
    with flush_heartbeats(tmp_path):
        time.sleep(0.1)
        assert flushed == [], "no rank has beaten yet"
        path.touch()
        wait_until(lambda: bool(flushed))
    assert flushed[0] == str(path)
