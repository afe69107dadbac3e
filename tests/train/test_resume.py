"""Which samples a resumed training may leave out: those that it has not come to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.base.errors import WrongInput
from ingot.base.runfolder import RunFolder
from ingot.checkpoints.store import Found
from ingot.train import resume

Spans = list[list[int]]


def start(monkeypatch: pytest.MonkeyPatch, before: Spans, now: Spans) -> Found | None:
    """Resume at step 10 of 4 samples each, trained with the ranges `before`, with the ranges `now`."""
    found = Found(Path("step"), 10, {"identity": identity(before), "finished": False})
    monkeypatch.setattr(resume, "newest_valid", lambda folder: found)
    return resume.find_start(RunFolder(Path("run")), identity(now), fresh=False)


def identity(skipped: Spans) -> dict[str, Any]:
    return {"train.global_batch": 4} | ({"data.skip": skipped} if skipped else {})


@pytest.mark.parametrize(("before", "now"), [
    ([], []), ([], [[40, 48]]), ([], [[100, 120], [60, 61]]), ([[8, 16]], [[8, 16], [48, 50]]), ([[8, 16], [90, 99]], [[8, 16]]),
])
def test_what_lies_ahead_is_free(monkeypatch: pytest.MonkeyPatch, before: Spans, now: Spans) -> None:
    assert start(monkeypatch, before, now) is not None


@pytest.mark.parametrize(("before", "now"), [
    ([], [[39, 48]]), ([], [[0, 4]]), ([[8, 16]], []), ([[8, 16]], [[8, 17]]), ([[8, 16]], [[8, 16], [47, 50]]),
])
def test_what_was_trained_on_is_refused(monkeypatch: pytest.MonkeyPatch, before: Spans, now: Spans) -> None:
    """After ten steps of 4, with 8 samples skipped, the next sample is number 48 of the sequence."""
    with pytest.raises(WrongInput, match=r"data\.skip"):
        start(monkeypatch, before, now)
