"""The machine crashes after any system call, and loses of all that was not flushed whatever it
likes: nothing torn is taken for whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.actions import EXPORT, LINES, REGISTER, SAVE, SAVE_BEHIND, Action
from tests.chaos.steps import DATA, RECORD, TRAIN
from tests.chaos.trial import crash_after_every_call, rehearse
from tests.chaos.zygote import Zygote
from tests.exhaustive import EXHAUSTIVE


# `make test-all` lets it crash after every call, `make test` after 24 all over the action.
@pytest.mark.parametrize(
    "action",
    [
        pytest.param(action, marks=pytest.mark.drawn("a crash of what is written"))
        for action in (SAVE, LINES, RECORD, EXPORT, REGISTER)
    ],
    ids=lambda action: action.name,
)
def test_crashed_after_every_call(action: Action, forks: Zygote, tmp_path: Path) -> None:
    most = None if EXHAUSTIVE else 24
    crash_after_every_call(forks, rehearse(forks, action, tmp_path), most).check()


@pytest.mark.drawn("a crash or a kill in training")
def test_crashed_while_training(forks: Zygote, tmp_path: Path) -> None:
    """The metrics of every step before a checkpoint are as sure as the checkpoint."""
    crash_after_every_call(forks, rehearse(forks, TRAIN, tmp_path), 6).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "most"),
    [(SAVE_BEHIND, None), (DATA, None), (TRAIN, 60)],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_crashed_in_a_longer_action(
    action: Action, most: int | None, forks: Zygote, tmp_path: Path
) -> None:
    crash_after_every_call(forks, rehearse(forks, action, tmp_path), most).check()
