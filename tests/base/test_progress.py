from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.base import progress as module
from ingot.base.environment import RESULTS_VARIABLE
from ingot.base.progress import Progress, duration, outlive_reader, say


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-3, "0s"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (187, "3m 07s"),
        (3600, "1h 00m"),
        (7530, "2h 05m"),
    ],
)
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_without_a_terminal_a_plain_line_comes_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module, "PLAIN_EVERY_S", 5.0)
    with Progress("train", total=1000, unit="steps", done=400) as progress:
        for step in range(401, 441):
            clock[0] += 0.25
            progress.update(step, loss="3.20")
    # Of 580 steps of a quarter of a second, then of 560. Reckoned from zero rather than from this
    # process's own first step it would be a few seconds.
    assert capsys.readouterr().err.splitlines() == [
        "train 420/1,000 steps  loss 3.20  2m 25s left",
        "train 440/1,000 steps  loss 3.20  2m 20s left",
    ]


def test_an_unknown_end_shows_no_time_left_and_quiet_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLAIN_EVERY_S", 0.0)
    with Progress("ingest", total=None, unit="documents") as progress:
        progress.update(12345)
    assert capsys.readouterr().err == "ingest 12,345 documents\n"
    with Progress("ingest", total=None, unit="documents", quiet=True) as progress:
        progress.update(1)
    assert capsys.readouterr().err == ""


def shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, draw: Callable[[Progress], None], **given: Any
) -> str:
    """What 80 columns of a terminal are sent, without its control sequences."""
    leader, follower = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("train", unit="steps", **given) as progress:
            draw(progress)
    shown = b""
    with contextlib.suppress(OSError):  # the end, once all that was written has come
        while read := os.read(leader, 65536):
            shown += read
    os.close(leader)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_on_a_terminal_a_bar_moves_and_the_time_left_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(progress: Progress) -> None:
        time.sleep(0.5)
        progress.update(500, loss="3.201", **{"tokens/s": "1,234,567"})
        progress._began -= 500  # so that each of these took a second
        time.sleep(1.5)

    shown = shown_on_a_terminal(monkeypatch, draw, total=1000)
    assert re.search(r"train 500/1,000 steps ━.* loss 3\.201  tokens/s 1,234,567 8m", shown)
    left = [int(found) for found in re.findall(r"8m (\d\d)s left", shown)]
    assert max(left) - min(left) >= 1


def test_on_a_terminal_without_an_end_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(progress: Progress) -> None:
        progress.update(12_345)
        time.sleep(0.2)

    shown = shown_on_a_terminal(monkeypatch, draw, total=None)
    assert "train 12,345 steps" in shown
    assert "left" not in shown


@pytest.mark.parametrize("ends", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_messages_outlive_their_reader(
    ends: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = ends()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        outlive_reader()
        say("épreuve")
        assert os.read(reader, 100).decode().splitlines() == ["épreuve"]
        os.close(reader)
        say("heard by nobody")
        with Progress("train", total=10, unit="steps"):
            sys.stderr.buffer.write(b"as the log of a rank")
        assert os.path.samestat(os.fstat(writer), os.stat(os.devnull))


def test_messages_outlive_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        outlive_reader()
        say("lost")
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat("/dev/full"))


def test_messages_come_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        outlive_reader()
        say("before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len("before\n"), limits[1]))
        try:
            say("lost")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        say("after")
    assert (tmp_path / "log").read_text("utf-8").splitlines() == ["before", "after"]


@pytest.mark.parametrize("started", [False, True], ids=["typed", "by a run"])
def test_a_result_that_finds_no_room_is_an_error_where_it_is_asked_for(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the messages go to the same file: with `> result.json 2>&1` it may be read."""
    if started:
        monkeypatch.setenv(RESULTS_VARIABLE, "1")
    with (
        Path("/dev/full").open("w", encoding="utf-8") as stderr,
        Path("/dev/full").open("w", encoding="utf-8") as stdout,
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdout", stdout)
        outlive_reader()
        say("lost")
        with contextlib.nullcontext() if started else pytest.raises(OSError, match="No space"):
            print("result", flush=True)


@pytest.mark.parametrize("apart", [False, True], ids=["one pipe", "two pipes"])
def test_results_outlive_the_reader_of_the_messages_only_if_it_is_theirs(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `2>&1 | tee`; `ingot show knobs | head` still ends with its reader."""
    reader, writer = os.pipe()
    other, results = os.pipe() if apart else (os.dup(reader), os.dup(writer))
    with (
        os.fdopen(writer, "w", encoding="utf-8") as stderr,
        os.fdopen(results, "w", encoding="utf-8") as stdout,
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdout", stdout)
        outlive_reader()
        os.close(reader)
        os.close(other)
        with pytest.raises(BrokenPipeError) if apart else contextlib.nullcontext():
            print("result", flush=True)
        say("heard by nobody")
        os.dup2(os.open(os.devnull, os.O_WRONLY), results)


def test_a_connection_that_was_cut_has_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with os.fdopen(ours.detach(), "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        outlive_reader()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()  # at once, which resets it
        for _ in range(2):
            say("heard by nobody")


def test_a_stream_in_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test of somebody's has it that captures what is said."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    for name in ("stderr", "stdout"):
        monkeypatch.setattr(sys, name, stream)
    outlive_reader()
    assert (sys.stderr, sys.stdout) == (stream, stream)


def test_a_message_shows_what_a_terminal_would_obey(capsys: pytest.CaptureFixture[str]) -> None:
    say("skipped a\x1b]0;title\x07b\r\x9b2J\u202ec.jsonl:\n\tline 2, 金 🔥")
    told = capsys.readouterr().err
    assert told == "skipped a\\x1b]0;title\\x07b\\r\\x9b2J\\u202ec.jsonl:\n\tline 2, 金 🔥\n"
