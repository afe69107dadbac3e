"""What starts of a job have cost: counted over launchers that die, laptops that sleep and commands
that are repeated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.launch.supervisor.budget import SpendingMeter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000_000.0]
    monkeypatch.setattr("ingot.launch.supervisor.budget.time.time", lambda: now[0])
    return now


def test_starts_add_up_at_their_own_prices(tmp_path: Path, clock: list[float]) -> None:
    meter = SpendingMeter(tmp_path, "train", 2.0)
    assert meter.used() == (0.0, 0.0)
    meter.begin(10_000.0)
    clock[0] += 1800.0
    assert meter.used() == (1800.0, 1.0), "of the start that runs, too"
    meter.end()
    clock[0] += 5000.0
    assert meter.used() == (1800.0, 1.0)
    dearer = SpendingMeter(tmp_path, "train", 10.0)
    dearer.begin(8200.0)
    clock[0] += 3600.0
    dearer.end()
    dearer.end()
    assert SpendingMeter(tmp_path, "train", 0.0).used() == (5400.0, 11.0)
    assert SpendingMeter(tmp_path, "evaluate", 0.0).used() == (0.0, 0.0)
    meter.reset()
    meter.reset()
    assert meter.used() == (0.0, 0.0)


def test_a_start_that_nobody_saw_end_cost_no_more_than_its_place_allowed(
    tmp_path: Path, clock: list[float]
) -> None:
    SpendingMeter(tmp_path, "train", 1.0).begin(7200.0)
    clock[0] += 90_000.0
    again = SpendingMeter(tmp_path, "train", 1.0)
    assert again.used() == (7200.0, 2.0)
    again.begin(7200.0)
    assert again.used()[0] == 7200.0, "what runs is gone on with"
    again.end(clock[0] - 86_400.0)
    assert again.used() == (3600.0, 1.0), "the nodes have said when they ended"


@pytest.mark.parametrize(
    ("waited_s", "used"), [(None, 0.0), (3600.0, 1400.0), (-9.0, 5000.0), (6000.0, 0.0)]
)
def test_waiting_for_machines_is_not_counted_where_it_is_free(
    waited_s: float | None, used: float, tmp_path: Path, clock: list[float]
) -> None:
    meter = SpendingMeter(tmp_path, "train", 3600.0)
    clock[0] = 1000.0
    meter.begin(10_000.0)
    clock[0] = 6000.0
    meter.leave_out(waited_s)
    meter.end()
    clock[0] = 9000.0
    meter.leave_out(None)
    assert meter.used() == (used, used)


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for text in ("", "[]", '{"seconds": 1, "later": 2}'):
        (tmp_path / "jobs" / "train.spent.json").write_text(text)
        assert SpendingMeter(tmp_path, "train", 1.0).used() == (0.0, 0.0)
