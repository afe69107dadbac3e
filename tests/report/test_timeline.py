"""Where the time of a training went, on its page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line
from ingot.report.page import write_page
from tests.report.made_up import made_up_run
from tests.report.seen import HOLD, Page, check_harmless
from tests.report.told import Told


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_up_run(tmp_path / "runs")


def test_where_the_time_went_stands_as_a_bar_the_attempts_and_a_table(run: RunFolder) -> None:
    page = Page(write_page(run))
    check_harmless(page)
    for words in (
        (
            "Goodput 60.6 %: 1m 46s of 2m 54s were training; 42s down, 10s starting, 8s lost and"
            " repeated"
        ),
        (
            "training 60.6 % waiting for data 0.3 % evaluating 3.3 % saving 1.3 % starting 5.7 %"
            " lost and repeated 4.6 % down 24.1 %"
        ),
        "2 attempts: 1 died, 1 finished",
        "118, 18 again 54s 8s 42s 4s killed (out of memory?)",
        "attempt 1 from step 0 to 118, 44s died: killed (out of memory?)",
        "attempt 2 starting, 4s",
        "died at step 118, 18 again, 54s killed (out of memory?)",
        "goodput 60.6 % of 2m 54s, starts and losses included",
    ):
        assert words in page.text, words
    strips = [
        value
        for tag, name, value in page.attributes
        if tag == "rect" and name == "class" and value.startswith("piece")
    ]
    parts = ["productive", "waiting", "evaluating", "saving", "starting", "lost", "down"]
    assert strips == [
        f"piece {colour}"
        for colour in [*parts, "starting", "productive", "starting", "productive", "lost", "down"]
    ]
    assert [
        value for tag, name, value in page.attributes if tag == "circle" and name == "class"
    ] == ["mark died"]
    for part in [*parts, "died"]:
        assert f".{part} {{ --c:" in page.source or f".{part}, ." in page.source, (
            "every colour is in the style sheet"
        )


def test_every_time_says_of_which_zone_it_is(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "XYZ-9")
            time.tzset()
            page = Page(write_page(run))
    finally:
        time.tzset()
    told = re.findall(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d(?: XYZ)?", page.source)
    assert len(told) > 3
    assert [when for when in told if not when.endswith("XYZ")] == []


def test_a_training_without_losses_has_no_timeline(run: RunFolder) -> None:
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text(
        "".join(line for line in lines if '"attempt": 2' not in line and '"failure"' not in line)
    )
    append_line(
        run.events,
        {"t_wall": 1_750_000_080.0, "t_mono": 80.0, "attempt": 1, "kind": "finish", "step": 100},
    )
    page = Page(write_page(run))
    assert "goodput" in page.ids
    assert "attempt 1" not in page.text
    assert "starts and losses included" not in page.text
    append_line(
        run.events,
        {
            "t_wall": 1_750_001_000.0,
            "t_mono": 1000.0,
            "attempt": 2,
            "kind": "start",
            "step": 0,
            "cause": "first step",
            "seconds": 7,
        },
    )
    page = Page(write_page(run))
    assert "Not counted: 1 other training in this folder." in page.text


def test_a_long_chaos_makes_no_long_page(run: RunFolder) -> None:
    told = Told()
    told.start(5, attempt=1, seconds=5)
    for number in range(1, 2000):
        told.event(100 * number, "killed", attempt=number, rank=0, cause="chaos", step=number)
        told.event(100 * number + 1, "restart", attempt=number + 1, seconds=1, cause="died")
        told.start(100 * number + 9, attempt=number + 1, seconds=5)
    run.events.write_text("".join(json.dumps(event) + "\n" for event in told.events))
    page = Page(write_page(run))
    assert len(page.source) < 400_000
    assert "And 1,980 more that cost" in page.text


def test_a_training_that_runs_is_counted_up_to_its_heartbeat(run: RunFolder) -> None:
    run.events.write_text("")
    now = {"t_wall": time.time() - 100, "t_mono": time.monotonic() - 100}
    append_line(
        run.events,
        {
            **now,
            "attempt": 3,
            "rank": 0,
            "kind": "start",
            "step": 0,
            "cause": "first step",
            "seconds": 50.0,
        },
    )
    heart = HeartbeatWriter(run.heartbeats, rank=0, local_rank=0, attempt=3)
    heart.spent |= {"productive": 60.0, "waiting": 15.0}
    heart.beat("evaluating", step=9)
    (run.heartbeats / "gone").write_bytes(b"torn")
    held = subprocess.Popen([sys.executable, "-c", HOLD, str(run.root)], stdout=subprocess.PIPE)
    assert held.stdout is not None
    held.stdout.readline()
    text = Page(write_page(run)).text
    held.kill()
    held.communicate()
    assert (
        "Goodput 40.0 %: 1m 00s of 2m 30s were training; 50s starting, 25s evaluating, 15s waiting"
        " for data, and it runs." in text
    )
    assert "1m 40s lost and repeated, 50s starting" in Page(write_page(run)).text
    assert "ended in phase evaluating" in Page(write_page(run)).text
    heart.close()
