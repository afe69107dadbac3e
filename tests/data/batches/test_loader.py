"""Batches: each rank its share, whole shapes, dead rows that teach nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot.base.errors import WrongInput
from ingot.config.shape import BatchPlan
from ingot.data.batches.loader import Batch, BatchBuffers, Loader, fixed_batches
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import IGNORE, Ids, Rows, open_rows
from ingot.data.batches.samples import RowArrays
from tests.data.batches.test_rows import write
from tests.exhaustive import examples


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    """20 rows of 3 tokens; the tokens of row r are r."""
    return open_rows(
        write(tmp_path, [[[[row] * 3 for row in range(1, 21)]]]), "train", 3, pad_last=False
    )


def seen(batches: list[Batch]) -> list[int]:
    """Rows in the order of batches, 0 for a dead one."""
    return [int(row[0]) for batch in batches for row in batch.tokens]


def test_ranks_and_micro_batches_deal_the_same_global_batch(rows: Rows) -> None:
    order = SampleOrder(rows.sizes, 3)
    for step in (0, 1, 7):
        expected = (order.rows(step * 12, 12) + 1).tolist()
        for world in (1, 2, 3, 4):
            for micro in (1, 2, 3, 5, 12):
                dealt = []
                for rank in range(world):
                    loader = Loader(
                        rows, order, BatchPlan(12, min(micro, 12 // world), world), rank
                    )
                    batches = loader.step(step)
                    loader.close()
                    assert all(
                        batch.tokens.shape == (min(micro, 12 // world), 3) for batch in batches
                    )
                    assert len(batches) == BatchPlan(12, min(micro, 12 // world), world).micro_steps
                    dealt += [row for row in seen(batches) if row]
                assert dealt == expected


def test_one_row_of_two_documents_wants_the_mask() -> None:
    def wants(*segments: list[int]) -> bool:
        numbers = torch.tensor(segments)
        return not Batch(numbers, numbers, numbers, numbers).single_documents

    assert not wants([1, 1, 1], [2, 2, 2], [0, 0, 0])
    assert wants([1, 1, 1], [2, 2, 3])
    assert wants([1, 1, 0])


@settings(max_examples=examples(6, 25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    first=st.sampled_from([0, 3, 10**9]),
    skip=st.integers(0, 40),
)
def test_resumed_anywhere_and_on_any_ranks_nothing_comes_twice(
    rows: Rows, seed: int, stop: list[int], first: int, skip: int
) -> None:
    """Stopped and gone on with, several times and over the ends of passes, on other numbers of
    ranks each time: the same global batches.
    """
    steps = 32
    skipped = [(first * 24 + skip, first * 24 + skip + 50)] if skip else []
    order = SampleOrder(rows.sizes, seed, None, skipped)
    whole = [(order.rows(step * 24, 24) + 1).tolist() for step in range(first, first + steps)]
    cuts = [0, *sorted(stop), steps]
    for begin, end, world in zip(cuts, cuts[1:], (1, 2, 3, 8), strict=False):
        dealt: list[list[int]] = [[] for _ in range(end - begin)]
        for rank in range(world):
            loader = Loader(
                rows,
                SampleOrder(rows.sizes, seed, None, skipped),
                BatchPlan(24, 24 // world, world),
                rank,
            )
            for step in range(begin, end):
                dealt[step - begin] += seen(loader.step(first + step))
            loader.close()
        assert dealt == whole[begin:end]


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
        assert (tensor.dtype, tensor.device.type, tuple(tensor.shape)) == (
            torch.int64,
            "meta",
            (1, 3),
        )


def test_steps_in_any_order(rows: Rows) -> None:
    order = SampleOrder(rows.sizes, 3)
    loader = Loader(rows, order, BatchPlan(4, 2, 1), 0)
    for step in (5, 6, 7, 0, 6, 6, 10**9):
        assert seen(loader.step(step)) == (order.rows(step * 4, 4) + 1).tolist()
    loader.close()


def test_the_next_step_is_made_ahead(rows: Rows) -> None:
    loader = Loader(rows, SampleOrder(rows.sizes, 3), BatchPlan(4, 2, 1), 0)
    made: list[str] = []
    real = rows.batch

    def batch(ids: Sequence[int], out: Ids | None = None) -> RowArrays:
        made.append(threading.current_thread().name)
        return real(ids, out)

    rows.batch = batch  # type: ignore[method-assign]
    loader.step(0)
    loader.close()
    assert [name.startswith("loader") for name in made] == [False, True]


def test_memory_is_used_again_but_never_while_a_tensor_is_in_it() -> None:
    memory = BatchBuffers()
    first = memory.tensor(4, 2, 3)
    part, address = first[1], first.data_ptr()
    del first
    assert memory.tensor(4, 2, 3).data_ptr() != address  # `part` still lies there
    del part
    assert address in {
        held.data_ptr()
        for held in [memory.tensor(4, 2, 3) for _ in range(1)] + [memory.tensor(4, 2, 3)]
    }
    assert memory.tensor(4, 2, 5).shape == (4, 2, 5)


def test_batches_that_are_kept_stay_as_they_are(rows: Rows) -> None:
    loader = Loader(rows, SampleOrder(rows.sizes, 3), BatchPlan(4, 2, 1), 0)
    kept = [batch for step in range(20) for batch in loader.step(step)]
    loader.close()
    assert seen(kept) == (SampleOrder(rows.sizes, 3).rows(0, 80) + 1).tolist()


@pytest.mark.parametrize(("world", "number"), [(1, 0), (3, 1)])
def test_a_flipped_bit_ends_training_and_is_named(world: int, number: int, tmp_path: Path) -> None:
    """Whichever rank looks at the file; sizes and indexes are right, so that nothing else would
    tell.
    """
    folder = write(
        tmp_path, [[[[row] * 3 for row in range(1, 21)], [[row] * 3 for row in range(21, 41)]]]
    )
    part = folder / f"train.tokens-{number:05d}.bin"
    content = bytearray(part.read_bytes())
    content[7] ^= 1
    part.write_bytes(content)

    def faults() -> list[str]:
        found = []
        for rank in range(world):
            rows = open_rows(folder, "train", 3, pad_last=False)
            loader = Loader(
                rows, SampleOrder(rows.sizes, 3), BatchPlan(12, 12 // world, world), rank
            )
            try:
                for step in range(10):
                    loader.step(step)
                rows.touched.put(None)  # the thread ends when it has looked at all before
                loader._checksums._thread.join()
                loader.step(10)
            except WrongInput as error:
                found.append(str(error))
            loader.close()
        return found

    assert faults() == [f"{part} does not match its checksum; run `ingot prepare --again`"]
    content[7] ^= 1
    part.write_bytes(content)
    assert faults() == []


def test_batches_name_their_rows(rows: Rows) -> None:
    batches = list(fixed_batches(rows, [4, 5, 6], 2))
    assert [batch.rows.tolist() for batch in batches] == [[4, 5], [6, -1]]
    loader = Loader(rows, SampleOrder(rows.sizes, 3), BatchPlan(12, 5, 1), 0)
    assert [
        number for batch in loader.step(2) for number in batch.rows.tolist() if number >= 0
    ] == SampleOrder(rows.sizes, 3).rows(24, 12).tolist()
    loader.close()
