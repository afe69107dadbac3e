"""Rows cut for ranks, and put together again."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from ingot.base.errors import WrongInput
from ingot.data.batches.loader import Batch
from ingot.models.native.head import IGNORE
from ingot.objectives.forward import PipelinedBatches, reduce_values, shard_batch
from ingot.parallel.rows import chunk_pair, chunk_size, join_rows, split_rows


def test_a_rank_has_an_early_and_a_late_piece() -> None:
    row = torch.arange(12)[None]
    assert [split_rows(row, rank, 3).tolist() for rank in range(3)] == [
        [[0, 1, 10, 11]],
        [[2, 3, 8, 9]],
        [[4, 5, 6, 7]],
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shares_make_the_row_again(world: int) -> None:
    rows = torch.arange(2 * 24 * 5).view(2, 24, 5)
    assert torch.equal(join_rows([split_rows(rows, rank, world) for rank in range(world)]), rows)
    late = rows.transpose(1, 2)
    assert torch.equal(
        join_rows([chunk_pair(late, rank, world, 2) for rank in range(world)], dim=2), late
    )


@pytest.mark.parametrize(
    ("world", "multiple", "length"),
    [(1, 1, 10), (1, 4, 12), (2, 1, 12), (2, 2, 12), (2, 4, 16), (2, 3, 12), (3, 2, 12)],
)
def test_rows_are_filled_up_on_the_right(world: int, multiple: int, length: int) -> None:
    rows = torch.arange(20).view(2, 10)
    shares = [split_rows(rows, rank, world, IGNORE, multiple) for rank in range(world)]
    again = join_rows(shares)
    assert again.shape == (2, length)
    assert torch.equal(again[:, :10], rows)
    assert (again[:, 10:] == IGNORE).all()
    assert shares[0].shape[1] % multiple == 0


def test_what_is_no_two_pieces_is_refused() -> None:
    assert chunk_size(6) == 3
    with pytest.raises(WrongInput, match="7 tokens a row"):
        chunk_size(7)


class _OneOfTwo:
    """Rank 1 of two that share each row."""

    world = 2

    def share(self, tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return split_rows(tensor, 1, 2, fill)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return 2 * part


def test_what_fills_up_a_shared_row_is_no_target() -> None:
    row = torch.ones(1, 5, dtype=torch.int64)
    shared = shard_batch(Batch(row, row, row, row), _OneOfTwo())
    # Pieces of two tokens; this rank has the second and the third, which ends beyond the row.
    assert shared.labels.tolist() == [[1, 1, 1, IGNORE]]
    assert shared.segments.tolist() == [[1, 1, 1, 0]]


class _Whole:
    """An objective whose loss is a value of whole rows."""

    name = "whole"

    def reduce(self, values: Any, batch: Any, all_sum: Any) -> Any:
        total = all_sum(values.sum())
        return total, {"total": total.detach()}


def test_a_loss_of_whole_rows_is_counted_once() -> None:
    row = torch.ones(1, 4, dtype=torch.int64)
    batch = Batch(row, row, row, row)
    loss, metrics = reduce_values(cast("Any", _Whole()), row.float(), batch, _OneOfTwo())
    assert (float(loss), float(metrics["total"])) == (4.0, 4.0)


def test_the_micro_batches_of_a_pipeline_are_summed() -> None:
    row = torch.ones(1, 4, dtype=torch.int64)
    batches = [Batch(row, row, row, row)] * 3
    work = PipelinedBatches(cast("Any", _Whole()), batches, "fp32", torch.device("cpu"), None)
    for number in range(3):
        work.loss(row.float() * 10**number, number)
    loss, metrics = work.sums()
    assert (float(loss), float(metrics["total"])) == (444.0, 444.0)
