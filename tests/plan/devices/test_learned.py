"""Corrections of a device, as several processes store them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from ingot.plan.devices.learned import Correction, corrections, keep
from ingot.plan.ranges import Range
from tests.patience import PATIENCE_S

FORK = multiprocessing.get_context("fork")
WRITERS, EACH = 3, 8


def _keep_many(writer: int, start: Any) -> None:
    start.wait()
    for number in range(EACH):
        factor = Range(0.9, 1.0, 1.1, "learned")
        keep("h100", Correction(f"{writer}-{number}", "2026-11-28", "guessed", factor))


def test_corrections_that_are_stored_at_once_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    start = FORK.Barrier(WRITERS)
    writers = [FORK.Process(target=_keep_many, args=(writer, start)) for writer in range(WRITERS)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=PATIENCE_S)
        assert process.exitcode == 0
    found = sorted(one.run for one in corrections("h100"))
    assert found == [f"{writer}-{number}" for writer in range(WRITERS) for number in range(EACH)]
