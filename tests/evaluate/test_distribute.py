"""Work dealt over ranks comes together as if one had done it."""

from __future__ import annotations

import numpy as np

from ingot.evaluate.distribute import by_length, gather_texts, rank_share, sum_over_ranks
from ingot.parallel.mesh import running_mesh
from tests.ranks import run_ranks

TEXTS = ["copper", "", "für 金 🔥", "a\ud800b", "x" * 1000, "\x00"]


def dealt(texts: list[str]) -> tuple[list[str], list[float]]:
    with running_mesh() as mesh:
        groups = by_length([len(text) for text in texts], 2)
        mine = {number: texts[number] for group in rank_share(groups, mesh) for number in group}
        table = np.zeros((len(texts), 1))
        for number in mine:
            table[number] = number + 0.5
        return gather_texts(mine, len(texts), mesh), sum_over_ranks(table, mesh)[:, 0].tolist()


def test_texts_and_numbers_of_all_ranks_in_their_order() -> None:
    expected = (TEXTS, [number + 0.5 for number in range(len(TEXTS))])
    assert dealt(TEXTS) == expected
    assert run_ranks(2, dealt, TEXTS) == [expected, expected]
    assert run_ranks(2, dealt, TEXTS[:1]) == [(TEXTS[:1], [0.5])] * 2


def test_groups_hold_the_longest_first_and_all_of_them() -> None:
    groups = by_length([3, 9, 1, 9, 5], 2)
    assert groups == [[1, 3], [4, 0], [2]]
    assert by_length([], 2) == []
