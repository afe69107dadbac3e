"""Contenders take turns in processes of their own, and are stopped when they do not do the same
work.
"""

from __future__ import annotations

import pytest

from benchmarks.turns import Contender, Result, Turn, Work, ratio, take_turns


@pytest.fixture(autouse=True)
def unchanged_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`take_turns` sets the variable for its children."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def slowly(units: float) -> Work:
    return lambda: Turn(units, 1.0)


def finding(number: float) -> Work:
    return lambda: Turn(1.0, number)


def failing() -> Work:
    raise ValueError("no such thing")


def test_turns_give_a_rate_for_each_round() -> None:
    one, two = take_turns(
        [Contender("one", slowly, (1.0,)), Contender("two", slowly, (1e3,))], 3, 1
    )
    assert len(one.rates) == len(two.rates) == len(one.cpu_seconds) == 3
    assert ratio(two, one)[0] > 1


def test_contenders_that_differ_or_fail_end_the_program() -> None:
    with pytest.raises(SystemExit, match=r"one 1\.0, two 1\.1"):
        take_turns([Contender("one", finding, (1.0,)), Contender("two", finding, (1.1,))], 1, 1)
    with pytest.raises(SystemExit, match="no such thing"):
        take_turns([Contender("one", failing)], 1, 1)


def test_ratios_are_taken_round_by_round() -> None:
    one, two = (Result("", rates, [], [], 0) for rates in ([2.0, 20.0, 6.0], [1.0, 5.0, 2.0]))
    assert ratio(one, two) == (3.0, 2.0, 4.0)
