"""Killed at system calls that change a file, by strace: only whole things stand after it, and the
same again ends equal.

Three calls of each action are drawn with a seed, one of each third of it; all of them are tried in
the slow tests.
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


ACTIONS = [SAVE, SAVE_BEHIND, EXPORT, REGISTER, LINES, RECORD, TRAIN, DATA]
MARKS = {
    **dict.fromkeys(
        (SAVE, SAVE_BEHIND, EXPORT, REGISTER, LINES, RECORD),
        pytest.mark.drawn("a kill of what follows training", keep=2),
    ),
    TRAIN: pytest.mark.drawn("a crash or a kill in training"),
    DATA: pytest.mark.drawn("a kill while data is made"),
}
DRAWN, SEED = 3, 15


@pytest.mark.parametrize(
    "action",
    [pytest.param(action, marks=MARKS.get(action, ())) for action in ACTIONS],
    ids=lambda action: action.name,
)
def test_killed_at_a_call_and_run_again(action: Action, forks: Zygote, tmp_path: Path) -> None:
    kill_at_every_call(forks, rehearse(forks, action, tmp_path), BOTH, DRAWN, SEED).check()


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_killed_at_every_call_and_run_again(action: Action, forks: Zygote, tmp_path: Path) -> None:
    kill_at_every_call(
        forks, rehearse(forks, action, tmp_path), ["before"] if action is TRAIN else BOTH
    ).check()


@pytest.mark.slow
def test_one_of_several_processes_killed(forks: Zygote, tmp_path: Path) -> None:
    """Workers, or the process that they work for."""
    kill_anywhere(forks, rehearse(forks, DATA_SPREAD, tmp_path), 40).check()
