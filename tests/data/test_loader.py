"""Batches: each rank its share, whole shapes, dead rows that teach nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ingot.config.shape import BatchPlan
from ingot.data.loader import Batch, Loader, fixed_batches
from ingot.data.order import Order
from ingot.data.rows import IGNORE, Rows, open_rows
from tests.data.test_rows import write


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """20 rows of 3 tokens; the tokens of row r are r."""
    return open_rows(write(tmp_path, [[[[row] * 3 for row in range(1, 21)]]]), "train", 3, pad_last=False)


def seen(batches: list[Batch]) -> list[int]:
    """Rows in the order of batches, 0 for a dead one."""
    return [int(row[0]) for batch in batches for row in batch.tokens]


def test_ranks_and_micro_batches_deal_the_same_global_batch(rows: Rows) -> None:
    order = Order(rows.sizes, 3)
    for step in (0, 1, 7):
        expected = (order.rows(step * 12, 12) + 1).tolist()
        for world in (1, 2, 3, 4):
            for micro in (1, 2, 3, 5, 12):
                dealt = []
                for rank in range(world):
                    loader = Loader(rows, order, BatchPlan(12, min(micro, 12 // world), world), rank)
                    batches = loader.step(step)
                    loader.close()
                    assert all(batch.tokens.shape == (min(micro, 12 // world), 3) for batch in batches)
                    assert len(batches) == BatchPlan(12, min(micro, 12 // world), world).micro_steps
                    dealt += [row for row in seen(batches) if row]
                assert dealt == expected


def test_dead_rows_teach_nothing(rows: Rows) -> None:
    batches = list(fixed_batches(rows, [4, 5, 6], 2))
    assert seen(batches) == [5, 6, 7, 0]
    last = batches[-1]
    assert last.labels[1].tolist() == [IGNORE] * 3
    assert last.segments[1].tolist() == last.positions[1].tolist() == [0] * 3
    assert last.segments[0].tolist() == [1] * 3


def test_tensors_are_int64_and_move(rows: Rows) -> None:
    batch = next(fixed_batches(rows, [0], 1)).to(torch.device("meta"))
    for tensor in (batch.tokens, batch.labels, batch.positions, batch.segments):
        assert (tensor.dtype, tensor.device.type, tuple(tensor.shape)) == (torch.int64, "meta", (1, 3))


def test_steps_in_any_order(rows: Rows) -> None:
    order = Order(rows.sizes, 3)
    loader = Loader(rows, order, BatchPlan(4, 2, 1), 0)
    for step in (5, 6, 7, 0, 6, 6, 10**9):
        assert seen(loader.step(step)) == (order.rows(step * 4, 4) + 1).tolist()
    loader.close()


def test_the_next_step_is_made_ahead(rows: Rows) -> None:
    loader = Loader(rows, Order(rows.sizes, 3), BatchPlan(4, 2, 1), 0)
    made: list[str] = []
    real = rows.row
    rows.row = lambda i: (made.append(threading.current_thread().name), real(i))[1]  # type: ignore[method-assign]
    loader.step(0)
    loader.close()
    assert [name.startswith("loader") for name in made] == [False] * 4 + [True] * 4
