"""Measuring that is broken off: on every rank at the same place, whichever was asked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ingot.evaluate.subject import EvalModel, EvaluationInterrupted
from ingot.parallel.mesh import running_mesh
from tests.ranks import run_ranks


def worked_through(asked_on: int, pieces: int, more: int) -> tuple[bool, list[int]]:
    """What a rank did of its pieces (rank 1 has `more` of them) where rank `asked_on` is asked
    after its second; whether all was broken off.
    """
    done: list[int] = []
    with running_mesh() as mesh:
        nothing: Any = None
        asked = lambda: mesh.rank == asked_on and len(done) == 2  # noqa: E731
        subject = EvalModel(
            nothing,
            nothing,
            cast(Any, "decoder"),
            nothing,
            frozenset(),
            "fp32",
            mesh,
            "a model",
            should_stop=asked,
        )
        try:
            for piece in subject.until_stopped(range(pieces + more * mesh.rank)):
                done.append(piece)
        except EvaluationInterrupted:
            return True, done
    return False, done


@pytest.mark.parametrize(
    ("asked_on", "expected"),
    [
        (0, [(True, [0, 1]), (True, [0, 1, 2, 3, 4])]),
        (1, [(True, [0, 1, 2, 3]), (True, [0, 1])]),
        (5, [(False, [0, 1, 2, 3]), (False, [0, 1, 2, 3, 4])]),
    ],
)
def test_all_ranks_break_off_together_however_much_each_has_to_do(
    asked_on: int, expected: list[tuple[bool, list[int]]]
) -> None:
    assert run_ranks(2, worked_through, asked_on, 4, 1) == expected


def test_without_anybody_to_ask_nothing_is_agreed_upon() -> None:
    nothing: Any = None
    subject = EvalModel(
        nothing, nothing, cast(Any, "decoder"), nothing, frozenset(), "fp32", nothing, "a model"
    )
    assert list(subject.until_stopped("abc")) == ["a", "b", "c"]
