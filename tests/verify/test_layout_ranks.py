"""Ranks that live from call to call: they meet once, answer in order, and one that fails, hangs or
dies is told by name and place.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ingot.verify.layout import ranks
from ingot.verify.layout.ranks import LayoutProcesses, RankFailed
from tests.patience import PATIENCE_S

REAL_SERVE = ranks._serve


@pytest.fixture(scope="module")
def two() -> Iterator[LayoutProcesses]:
    made = LayoutProcesses(2)
    yield made
    made.close()


def who(offset: int) -> tuple[int, int, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), int(total), os.getpid()


def serve_where_nobody_else_is(rank: int, world: int, port: int, *more: Any) -> None:
    """A rank of which it is known that a server which takes any port was not given its own."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    REAL_SERVE(rank, world, port, *more)


def one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second one does not want to")
    dist.barrier()


def one_waits_for_nobody() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def not_to_be_sent() -> object:
    return lambda: None


def test_the_same_processes_do_one_call_after_the_other(two: LayoutProcesses) -> None:
    first, second = two.run(who, 1), two.run(who, offset=10)
    assert [(rank, total) for rank, total, _ in first] == [(0, 3), (1, 3)]
    assert [(rank, total) for rank, total, _ in second] == [(0, 21), (1, 21)]
    assert [process for *_, process in first] == [process for *_, process in second]


def test_the_port_of_the_ranks_is_given_to_nobody_before_they_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "_serve", serve_where_nobody_else_is)
    one = LayoutProcesses(1)
    try:
        assert one.run(os.getpid) != [os.getpid()]
    finally:
        one.close()


@pytest.mark.drawn("ranks of verify layout")
def test_what_one_rank_raises_ends_the_call_and_new_ranks_do_the_next(two: LayoutProcesses) -> None:
    before = {process for *_, process in two.run(who, 1)}
    began = time.monotonic()
    with pytest.raises(
        RankFailed,
        match=r"^case five: rank 1 of 2 failed: ValueError: the second one does not want to\n",
    ) as caught:
        two.run_named("case five", 30.0, one_raises)
    assert time.monotonic() - began < 25, "the rank that waits for it need not time out"
    assert "in one_raises" in caught.value.trace
    after = two.run(who, 1)
    assert [(rank, total) for rank, total, _ in after] == [(0, 3), (1, 3)]
    assert before.isdisjoint(process for *_, process in after)


def test_a_rank_that_hangs_says_where(two: LayoutProcesses) -> None:
    two.run(who, 1)
    with pytest.raises(
        RankFailed,
        match=r"^shard 2: rank 0 of 2 was not done in 5 s; it stood in .*one_waits_for_nobody",
    ) as caught:
        two.run_named("shard 2", 5.0, one_waits_for_nobody)
    assert str(caught.value).count("\n") == 0


def test_a_rank_that_dies_is_told(two: LayoutProcesses) -> None:
    with pytest.raises(RankFailed, match=r"one_dies: rank \d of 2 (failed|was not done)"):
        two.run(one_dies)


def test_an_answer_that_cannot_be_sent_is_an_error(two: LayoutProcesses) -> None:
    with pytest.raises(RankFailed, match=r"not_to_be_sent: rank \d of 2 failed: .*not_to_be_sent"):
        two.run(not_to_be_sent)


@pytest.mark.drawn("ranks of verify layout")
def test_a_script_without_a_main_guard_is_run_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom ingot.verify.layout.ranks import LayoutProcesses\nprint('here')\nranks ="
        " LayoutProcesses(2)\nprint(len(set(ranks.run(os.getpid))))\nranks.close()\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=Path.cwd(),
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert done.stdout.split() == ["here", "2"], done.stderr
