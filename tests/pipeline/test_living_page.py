from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ingot.base.runfolder import RunFolder
from ingot.base.runlog import append_line, record_event
from ingot.pipeline import incremental
from ingot.pipeline.incremental import page_kept
from ingot.report import living
from ingot.report import page as report_page
from tests.patience import PATIENCE_S
from tests.report.made_up import made_up_run
from tests.report.seen import Page, check_harmless


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run in the middle of its training."""
    run = made_up_run(tmp_path / "runs", steps=100)
    for path in (*run.steps.glob("*.json"), *run.reports.glob("*.json"), run.events):
        path.unlink()
    return run


def page_of(run: RunFolder) -> Page:
    page = Page(run.reports / "index.html")
    check_harmless(page)
    return page


def reloads(page: Page) -> bool:
    return ("meta", "http-equiv", "refresh") in page.attributes


def test_a_page_is_there_from_the_first_moment_and_says_what_is_done(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "new")
    with page_kept(run, "ingest"):
        page = page_of(run)
        assert "running: ingest" in page.text
        assert reloads(page)
    page = page_of(run)
    assert "running" not in page.text
    assert not reloads(page)


def test_the_page_of_a_training_goes_on_with_it(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "REFRESH_S", 0.02)
    monkeypatch.setattr(living, "MOST_SHARE", 1.0)
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    begun = time.time()
    with page_kept(run, "train"):
        append_line(run.metrics, {"step": 200, "t_wall": begun + 1, "train/loss": 1.0})
        append_line(run.metrics, {"step": 300, "t_wall": begun + 11, "train/loss": 1.0})
        path, limit = run.reports / "index.html", time.monotonic() + PATIENCE_S
        while not (path.exists() and "step 300</b>" in path.read_text(encoding="utf-8")):
            assert time.monotonic() < limit
            time.sleep(0.02)
        text = page_of(run).text
        assert "step 300 of 1,000" in text
        assert "about 1m 10s left" in text
    assert "left" not in page_of(run).ids
    assert "progress" not in page_of(run).ids


def test_refreshing_takes_a_small_share(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page costs some milliseconds; at a thousandth of a core the next waits for seconds."""
    monkeypatch.setattr(living, "REFRESH_S", 0.01)
    monkeypatch.setattr(living, "MOST_SHARE", 0.001)
    written = []
    write = report_page.write_page
    monkeypatch.setattr(
        report_page, "write_page", lambda *args: written.append(args[1]) or write(*args)
    )
    with page_kept(run, "train"):
        time.sleep(1.0)
    assert written == ["train", ""]


def test_a_failure_says_what_failed_where_and_what_to_type(run: RunFolder) -> None:
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    record_event(run.events, "save", step=50, seconds=1.0)
    record_event(run.events, "failure", cause="train: disk full; make space and run it again")
    with pytest.raises(OSError, match="gone"), page_kept(run, "train"):
        raise OSError("gone")
    page = page_of(run)
    assert "failure" in page.ids
    assert "failed: train" in page.text
    assert "train failed at step 100" in page.text
    assert "disk full; make space and run it again" in page.text
    assert "training up to checkpoint 50" in page.text
    assert f"ingot run {run.recipe}" in page.text


def test_a_training_that_was_given_up_is_a_failure(run: RunFolder) -> None:
    record_event(run.events, "start", step=0, cause="first step", last=1000)
    record_event(run.events, "give_up", cause="no progress in 3 attempts; the last failure: killed")
    with page_kept(run, "evaluate"):
        pass
    page = page_of(run)
    assert "failed: train" in page.text
    assert "no progress in 3 attempts" in page.text


def test_a_page_that_takes_for_ever_does_not_keep_a_training_that_is_over(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(living, "REFRESH_S", 0.0)
    monkeypatch.setattr(incremental, "LAST_PAGE_S", 0.0)
    begun, over, written = threading.Event(), threading.Event(), []

    def write(_: RunFolder, doing: str, *__: object) -> None:
        written.append(doing)
        if doing:
            begun.set()
            over.wait()

    monkeypatch.setattr(report_page, "write_page", write)
    with page_kept(run, "train"):
        begun.wait()
    assert written == ["train"], "and its end is not written while that is"
    over.set()


def test_a_page_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.reports.write_text("a file where the folder should be")
    done = False
    with page_kept(run, "train"):
        done = True
    assert done
    said = capsys.readouterr().err
    assert said.count("warning: the page of") == 1


def test_the_page_of_a_step_whose_process_was_killed_at_its_end_is_written_by_the_next_one(
    run: RunFolder,
) -> None:
    """The step is done and is not done again, so nobody else would take `running` off the page."""
    living.show_page(run, "train")
    page, record = run.reports / "index.html", run.steps / "train.json"
    record.touch()
    os.utime(page, ns=(1, 1))
    living.renew_page(run, record)
    assert "running" not in page_of(run).text
    written = page.stat().st_mtime_ns
    living.renew_page(run, record)
    assert page.stat().st_mtime_ns == written, "not with every look at a run"
