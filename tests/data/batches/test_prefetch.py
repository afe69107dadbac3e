"""Training from columns that lie in a bucket: the same batches, and never more than a few parts on
the disk.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.remote.deferred import (
    HIDDEN,
    DeferredFiles,
    UnusableReplica,
    defer_files,
    deferred_files_of,
)
from ingot.base.remote.replica import pull, push
from ingot.config.shape import BatchPlan
from ingot.data.batches import prefetch as ahead
from ingot.data.batches.loader import Batch, Loader
from ingot.data.batches.order import SampleOrder
from ingot.data.batches.rows import Rows, Samples, open_rows
from ingot.data.columns.manifest import read_prepared
from ingot.evaluate.corpus import open_columns
from tests import gcs
from tests.data.batches.test_rows import write
from tests.launch.blocking import wait_until

URL = "gs://bucket/ingot/runs/one"
COLUMNS = "data/columns"
PLAN = BatchPlan(4, 2, 1)
PARTS = 12
STEPS = 2 * PARTS * 10 // 4
"""Two passes over twelve parts of ten rows."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Server]:
    with gcs.serving(monkeypatch) as running:
        yield running


@pytest.fixture
def whole(tmp_path: Path, server: gcs.Server) -> Path:
    """Columns of two sources in a run folder that was pushed; each row of three tokens has its own
    number thrice.
    """
    root, half = tmp_path / "run", PARTS // 2
    (root / COLUMNS).mkdir(parents=True)
    documents = [[[10 * part + row + 1] * 3 for row in range(10)] for part in range(PARTS)]
    write(root / COLUMNS, [documents[:half], documents[half:]])
    push(root, URL)
    return root / COLUMNS


@pytest.fixture
def left(tmp_path: Path, whole: Path) -> Path:
    """The columns of a node that has none of the parts."""
    node = tmp_path / "node"
    pull(URL, node, leave=lambda path: path.endswith((".bin", ".idx")))
    defer_files(node, COLUMNS, URL)
    return node / COLUMNS


def rows_of(columns: Path, weights: list[float] | None = None) -> Rows | Samples:
    return open_rows(columns, "train", 3, pad_last=False, weights=weights, by_part=True)


def order_of(rows: Rows | Samples, window: int | None = 2) -> SampleOrder:
    return SampleOrder(rows.sizes, 3, rows.weights, parts=rows.part_rows, window=window)


def here(columns: Path) -> set[str]:
    """Parts on the disk."""
    return {path.name for path in (columns / HIDDEN).glob("train.tokens-*.bin")} | {
        path.name for path in columns.glob("train.tokens-*.bin")
    }


def names(parts: list[int]) -> set[str]:
    return {f"train.tokens-{part:05d}.bin" for part in parts}


def same(left: list[Batch], right: list[Batch]) -> bool:
    return all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.drawn
@pytest.mark.parametrize(("weights", "window"), [(None, 2), ([1.0, 3.0], 1)])
def test_the_same_batches_from_a_few_parts_at_a_time(
    whole: Path, left: Path, weights: list[float] | None, window: int
) -> None:
    ours, theirs = rows_of(left, weights), rows_of(whole, weights)
    order = order_of(ours, window)
    most = 0
    with (
        contextlib.closing(Loader(ours, order, PLAN, 0)) as loader,
        contextlib.closing(Loader(theirs, order_of(theirs, window), PLAN, 0)) as beside,
    ):
        for step in range(STEPS):
            assert same(loader.step(step), beside.step(step))
            soon = range(4 * step, 4 * step + 8)  # the next step is made meanwhile
            wait_until(lambda soon=soon: here(left) >= names(order.parts(soon, after=1)))  # type: ignore[misc]
            assert here(left) <= names(order.parts(soon, before=1, after=1))
            most = max(most, len(here(left)))
    assert most < PARTS
    assert len(here(whole)) == PARTS


def test_two_ranks_of_a_machine_share_what_they_fetch(left: Path, server: gcs.Server) -> None:
    """One of them somewhat behind the other."""
    both = [rows_of(left) for _ in range(2)]
    loaders = [
        Loader(rows, order_of(rows), BatchPlan(4, 2, 2), rank) for rank, rows in enumerate(both)
    ]
    before = server.counts["media"]
    try:
        for step in range(STEPS // 2):
            seen = [loader.step(max(0, step - rank)) for rank, loader in enumerate(loaders)]
            assert all(len(batches) == 1 for batches in seen)
    finally:
        for loader in loaders:
            loader.close()
    # An index for each rank; both files of each part about once.
    assert server.counts["media"] - before <= 2 + 2 * (PARTS + 4)


def test_without_a_window_what_is_needed_comes_at_once_and_stays(whole: Path, left: Path) -> None:
    """As where held-out documents are evaluated."""
    ours = rows_of(left)
    assert torch.equal(
        torch.from_numpy(ours.batch(range(15)).tokens),
        torch.from_numpy(rows_of(whole).batch(range(15)).tokens),
    )
    assert here(left) == names([0, 1])


def test_evaluation_reads_the_columns_of_a_split_all_the_same(whole: Path, left: Path) -> None:
    """Bigrams and documents' bytes are counted on columns and not on rows."""
    here_, there = (
        open_columns(columns, read_prepared(columns), "train") for columns in (whole, left)
    )
    assert [column.slice(0, 30).tolist() for column in there] == [
        column.slice(0, 30).tolist() for column in here_
    ]
    assert here(left) == names(list(range(PARTS)))


def test_files_that_are_the_folders_own_are_used_and_never_dropped(
    left: Path, whole: Path, server: gcs.Server
) -> None:
    own = names(list(range(PARTS)))
    for path in [*whole.glob("*.bin"), *whole.glob("*.idx")]:
        (left / path.name).write_bytes(path.read_bytes())
    before, ours = server.counts["media"], rows_of(left)
    with contextlib.closing(Loader(ours, order_of(ours), PLAN, 0)) as loader:
        for step in range(STEPS):
            loader.step(step)
    assert here(left) == own
    assert server.counts["media"] == before


def test_a_later_attempt_drops_what_an_earlier_one_left(left: Path) -> None:
    """Gone back to an earlier step, say; in the same process or in another one."""
    for first in (0, STEPS // 2):
        ours = rows_of(left)
        order = order_of(ours, 1)
        with contextlib.closing(Loader(ours, order, PLAN, 0)) as loader:
            loader.step(first)
            soon = range(4 * first, 4 * first + 8)
            wanted = names(order.parts(soon, after=1))
            wait_until(lambda wanted=wanted: here(left) >= wanted)  # type: ignore[misc]
            assert ours.brought() == {
                int(name.removeprefix("train.tokens-").removesuffix(".bin")) for name in here(left)
            }
    assert here(left) <= names(order.parts(soon, before=1, after=1))


def test_a_bucket_that_is_away_for_a_while_is_told_and_asked_again(
    left: Path,
    server: gcs.Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ahead, "AGAIN_S", 0.05)
    ours = rows_of(left)
    order = order_of(ours)
    with contextlib.closing(Loader(ours, order, PLAN, 0)) as loader:
        loader.step(0)
        wait_until(lambda: here(left) >= names(order.parts(range(8), after=1)))
        server.fault("media", times=2, code=403)
        turn = next(
            step
            for step in range(1, STEPS)
            if order.parts(range(4 * step, 4 * step + 8), after=1) != order.parts(range(8), after=1)
        )
        loader.step(turn)
        wait_until(lambda: here(left) >= names(order.parts(range(4 * turn, 4 * turn + 8), after=1)))
    assert "; trying again" in capsys.readouterr().err


def test_a_part_that_is_nowhere_ends_training_in_one_line(left: Path, server: gcs.Server) -> None:
    for name in [name for name in server.objects if name.endswith(".idx")]:
        del server.objects[name]
    ours = rows_of(left)
    nowhere = pytest.raises(
        UnusableReplica, match=r"\.idx cannot be used: .*; prepare and launch again"
    )
    with contextlib.closing(Loader(ours, order_of(ours), PLAN, 0)) as loader, nowhere:
        loader.step(0)


def test_who_waits_for_a_part_says_so_and_can_be_stopped(left: Path, server: gcs.Server) -> None:
    """A rank that waits is no rank that hangs, and a request to stop is followed before the
    step.
    """
    server.fault("media", times=100, delay_s=0.5)
    ours, asked = rows_of(left), list[float]()
    with contextlib.closing(Loader(ours, order_of(ours), PLAN, 0)) as loader:
        assert loader.step(0, lambda: bool(asked.append(time.monotonic())) or len(asked) == 5) == []
        assert len(loader.step(0, lambda: bool(asked.append(time.monotonic())))) == 2
    assert len(asked) > 10
    assert np.median(np.diff(asked[5:])) < 1


def test_the_end_does_not_wait_for_a_part_on_its_way(
    left: Path, server: gcs.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LAST_S", 0.01)
    ours, began, brought = rows_of(left), threading.Event(), threading.Event()

    def bring(*_: object, **__: object) -> bool:
        began.set()
        return brought.wait(10)

    monkeypatch.setattr(type(ours), "bring", bring)
    before = threading.enumerate()
    loader = Loader(ours, order_of(ours), PLAN, 0)
    assert loader.step(0, began.is_set) == []
    loader.close()
    now = [thread for thread in threading.enumerate() if thread not in before]
    on_its_way = [thread for thread in now if thread.name == "ahead"]
    assert on_its_way, "it was waited for"
    brought.set()
    for thread in on_its_way:
        thread.join(20)


@pytest.mark.parametrize("others_come", [False, True])
def test_what_cannot_be_had_for_long_ends_training_with_what_is_in_the_way(
    others_come: bool, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the parts before it are here: each look at them is not an end of the failure. A
    minute passes with each attempt.
    """
    come, bring, clock = set[str](), DeferredFiles.bring, [0.0]
    monkeypatch.setattr(ahead, "AGAIN_S", 0.001)
    monkeypatch.setattr(
        ahead, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: time.sleep(1e-3))
    )
    ours = rows_of(left)

    def broken(files: DeferredFiles, name: str, *args: Any, **more: Any) -> bool:
        part = name.partition("-")[2][:5]
        if others_come and (not come or part in come):
            come.add(part)
            return bring(files, name, *args, **more)
        clock[0] += 60
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(DeferredFiles, "bring", broken)
    with (
        contextlib.closing(Loader(ours, order_of(ours), PLAN, 0)) as loader,
        pytest.raises(Failed, match=r"cannot be fetched \(.*broken\); check the disk"),
    ):
        loader.step(0, lambda: clock[0] > 3 * ahead.AWAY_S)


@pytest.mark.parametrize(
    "spoil", [lambda path: path.unlink(), lambda path: path.write_bytes(b"cut")]
)
def test_without_the_note_what_is_missing_is_missing(
    whole: Path, spoil: Callable[[Path], None]
) -> None:
    assert deferred_files_of(whole) is None
    spoil(whole / "train.tokens-00003.bin")
    with pytest.raises(WrongInput, match=r"train\.tokens-00003\.bin .*run `ingot prepare --again`"):
        rows_of(whole)


def test_with_it_what_is_here_must_be_whole(left: Path) -> None:
    (left / "train.tokens-00003.bin").write_bytes(b"cut")
    with pytest.raises(WrongInput, match=r"train\.tokens-00003\.bin has 3 bytes"):
        rows_of(left)


def test_a_batch_of_many_windows_leaves_none_behind(left: Path) -> None:
    ours = rows_of(left)
    order = order_of(ours, 1)
    with contextlib.closing(Loader(ours, order, BatchPlan(30, 30, 1), 0)) as loader:
        for step in range(8):
            loader.step(step)
            soon = range(30 * step, 30 * step + 60)
            wait_until(lambda soon=soon: here(left) >= names(order.parts(soon, after=1)))  # type: ignore[misc]
            assert here(left) <= names(order.parts(soon, before=1, after=1))


def test_what_goes_before_it_is_opened_comes_again(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, bring, goes = rows_of(left), DeferredFiles.bring, [2]

    def brought(self: DeferredFiles, name: str, sha256: str, *, wait: bool = True) -> bool:
        done = bring(self, name, sha256, wait=wait)
        if name.endswith(".idx") and goes[0]:
            goes[0] -= 1
            self.drop(name)
        return done

    monkeypatch.setattr(DeferredFiles, "bring", brought)
    assert ours.row(3).tokens.tolist() == [4, 4, 4]
    assert goes == [0]
    ours.drop(0)
    goes[0] = 100
    with pytest.raises(Failed, match=r"taken away 5 times .*raise data\.window"):
        ours.row(3)
