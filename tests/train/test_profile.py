"""The trace of a few steps, opened: it holds the matrix products of just those steps, whatever
training begins or ends with.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.environment import Ranks
from ingot.base.errors import WrongInput
from ingot.config.sections.loop import Profile
from ingot.parallel.mesh import Mesh
from ingot.train.profile import ProfileHook
from ingot.train.step import BatchCounts, Hook, StepInfo, StepOutcome

LAST = 6
WIDTH = 16
ZERO = torch.zeros(())
COUNTS = BatchCounts(1, 1, 1)


class Marked:
    """Another hook, with a product of its own: [100 + step, WIDTH]."""

    def after_step(self, info: StepInfo) -> bool:
        torch.ones(100 + info.step, WIDTH) @ torch.ones(WIDTH, WIDTH)
        return False

    def close(self) -> None:
        pass


def turn(
    begin: int, end: int, folder: Path, *, done: int = 0, rank: int = 0, until: int = LAST
) -> list[Path]:
    """Train, or go on after `done` steps, and stop after `until`; step n multiplies an [n, WIDTH]
    matrix, forward and backward.
    """

    hook = ProfileHook(
        Profile(begin=begin, end=end),
        folder,
        Mesh(Ranks(rank=rank, world=rank + 1), torch.device("cpu")),
        done=done,
        last=LAST,
    )
    hooks: list[Hook] = [Marked(), hook]
    for step in range(done, until):
        weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
        (torch.ones(step + 1, WIDTH) @ weight).sum().backward()
        for one in hooks:
            one.after_step(StepInfo(step + 1, 1, COUNTS, StepOutcome(ZERO, ZERO, ZERO), 0.0))
    hook.close()
    return sorted(folder.iterdir()) if folder.exists() else []


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
    return found


def products(path: Path) -> list[int]:
    """How many rows each forward product had, in the order of time: the numbers of steps, and of
    hooks above 100.
    """
    found = sorted(
        (event["ts"], event["args"]["Input Dims"])
        for event in events(path)
        if event.get("name") == "aten::mm"
    )
    return [dims[0][0] for _, dims in found if dims[0][1] == WIDTH and dims[0][0] != WIDTH]


def marks(path: Path) -> set[str]:
    return {event["name"] for event in events(path) if str(event.get("name")).startswith("step ")}


@pytest.mark.parametrize(("begin", "end"), [(3, 4), (1, 2), (1, 1), (5, 6)])
def test_it_holds_the_products_of_those_steps_alone(begin: int, end: int, tmp_path: Path) -> None:
    [trace] = turn(begin, end, tmp_path / "profile")
    assert trace.name == f"steps{begin}-{end}-rank0.json.gz"
    traced = range(begin, end + 1)
    assert products(trace) == [rows for step in traced for rows in (step, 100 + step)]
    assert marks(trace) == {f"step {step}" for step in traced}


def test_backward_is_in_it_and_shapes_are(tmp_path: Path) -> None:
    [trace] = turn(2, 2, tmp_path / "profile")
    backward = [
        event["args"]["Input Dims"]
        for event in events(trace)
        if event.get("name") == "aten::mm" and event["args"]["Input Dims"][0] == [WIDTH, 2]
    ]
    assert backward == [[[WIDTH, 2], [2, WIDTH]]]


def test_a_training_that_goes_on_in_the_midst_traces_what_is_left(tmp_path: Path) -> None:
    [trace] = turn(2, 5, tmp_path / "profile", done=3)
    assert trace.name == "steps4-5-rank0.json.gz"
    assert [rows for rows in products(trace) if rows < 100] == [4, 5]


def test_a_training_that_goes_on_behind_it_traces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert turn(2, 3, tmp_path / "profile", done=3) == []
    assert capsys.readouterr().err == ""


def test_a_training_that_breaks_off_keeps_the_steps_that_were_done(tmp_path: Path) -> None:
    [trace] = turn(2, 5, tmp_path / "profile", until=3)
    assert trace.name == "steps2-3-rank0.json.gz"
    assert [rows for rows in products(trace) if rows < 100] == [2, 3]


def test_it_says_where_the_trace_is_or_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [trace] = turn(1, 2, tmp_path / "profile")
    assert f"the trace of steps 1 to 2 is in {trace}" in capsys.readouterr().err
    turn(4, 5, tmp_path / "other", until=2)
    assert (
        "training ended after step 2 and train.profile begins with step 4"
        in capsys.readouterr().err
    )


def test_each_rank_has_a_file_and_only_the_first_speaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [path.name for path in turn(1, 1, tmp_path / "profile", rank=1)] == [
        "steps1-1-rank1.json.gz"
    ]
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_warns_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("")
    hook = ProfileHook(
        Profile(begin=1, end=1),
        tmp_path / "taken" / "profile",
        Mesh(Ranks(), torch.device("cpu")),
        done=0,
        last=LAST,
    )
    assert hook.after_step(StepInfo(1, 1, COUNTS, StepOutcome(ZERO, ZERO, ZERO), 0.0)) is False
    assert "warning: the trace of steps 1 to 1 is lost" in capsys.readouterr().err


def test_steps_behind_the_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput,
        match=(
            r"train.profile begins with step 7, training ends with step 6; lower"
            r" train.profile.begin"
        ),
    ):
        turn(7, 8, tmp_path)
