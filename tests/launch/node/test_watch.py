"""Standard input as the tie to a launcher: its first line, its signs of life, its end.
tests/launch/places/test_ssh.py has it over real connections.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest

from ingot.base.errors import Failed
from ingot.launch.node.watch import LauncherLease

HIGH = 2_000
"""A descriptor that `select` would not take: a process that has many files open gives such ones."""


@pytest.fixture(params=[False, True], ids=["low", "high"])
def pipe(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    if request.param:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 1), hard))
        os.dup2(reading, HIGH)
        os.close(reading)
        reading = HIGH
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_the_first_line_is_the_environment_and_nothing_behind_it_is_read(
    pipe: tuple[int, int],
) -> None:
    os.write(pipe[1], b'{"KEY": "secret", "N": 1}\n\n')
    assert LauncherLease(pipe[0]).read_environment() == {"KEY": "secret", "N": "1"}
    assert os.read(pipe[0], 10) == b"\n"


def test_a_launcher_that_says_nothing_or_half_a_line_is_not_waited_for(
    pipe: tuple[int, int],
) -> None:
    os.write(pipe[1], b'{"KEY"')
    with pytest.raises(Failed, match="the launcher was gone before"):
        LauncherLease(pipe[0], lease_s=0.05).read_environment()


def test_signs_of_life_and_their_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("ingot.launch.node.watch.time.monotonic", lambda: now[0])
    lease = LauncherLease(pipe[0], lease_s=45)
    now[0] = 144.0
    os.write(pipe[1], b"\n" * 5_000)
    assert lease.expired() is None
    now[0] = 188.0
    assert lease.expired() is None
    now[0] = 190.0
    assert lease.expired() == "the launcher sent no heartbeat for 45 s"


def test_a_closed_connection_is_told_at_once() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert LauncherLease(reading).expired() == "the connection to the launcher was closed"
    os.close(reading)


def test_a_connection_that_is_reset_is_closed() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b"what the other side never reads")
    theirs.close()
    assert LauncherLease(ours.fileno()).expired() == "the connection to the launcher was closed"
    ours.close()
