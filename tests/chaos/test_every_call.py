"""Killed at system calls that change a file, by strace: only whole things stand after it, and the
same again ends equal.

Every call of a save is tried, and of what is small; of longer actions calls evenly over the whole,
and all of them in the slow tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.actions import EXPORT, LINES, REGISTER, SAVE, SAVE_BEHIND, Action
from tests.chaos.steps import DATA, DATA_SPREAD, RECORD, TRAIN
from tests.chaos.strace import Moment
from tests.chaos.trial import kill_anywhere, kill_at_every_call, rehearse
from tests.chaos.zygote import Zygote

BOTH: list[Moment] = ["before", "after"]


@pytest.mark.parametrize(
    ("action", "moments", "most"),
    [
        (SAVE, BOTH, None),
        (SAVE_BEHIND, ["before"], 40),
        (EXPORT, ["before"], None),
        (REGISTER, ["before"], 50),
        (LINES, BOTH, None),
        (RECORD, ["before"], None),
        (TRAIN, ["before"], 30),
        (DATA, ["before"], 16),
    ],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_killed_at_a_call_and_run_again(
    action: Action, moments: list[Moment], most: int | None, forks: Zygote, tmp_path: Path
) -> None:
    kill_at_every_call(forks, rehearse(forks, action, tmp_path), moments, most).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "action", [SAVE_BEHIND, EXPORT, REGISTER, RECORD, TRAIN, DATA], ids=lambda action: action.name
)
def test_killed_at_every_call_and_run_again(action: Action, forks: Zygote, tmp_path: Path) -> None:
    kill_at_every_call(
        forks, rehearse(forks, action, tmp_path), ["before"] if action is TRAIN else BOTH
    ).check()


@pytest.mark.slow
def test_one_of_several_processes_killed(forks: Zygote, tmp_path: Path) -> None:
    """Workers, or the process that they work for."""
    kill_anywhere(forks, rehearse(forks, DATA_SPREAD, tmp_path), 40).check()
