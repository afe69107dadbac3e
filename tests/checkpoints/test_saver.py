"""Saving beside training: what is saved is what was, one save at a time, and what fails on one rank
fails on all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.base.markers import COMMIT
from ingot.checkpoints import saver as saving
from ingot.checkpoints.reader import load_checkpoint
from ingot.checkpoints.saver import Saved, Saver
from ingot.checkpoints.state import Staged, Staging, staged_in_place, training_tensors
from ingot.checkpoints.store import committed, newest_valid, step_folder
from ingot.checkpoints.writer import HashedStream
from ingot.config.sections.layout import Parallel
from ingot.models.parameters import local_tensor, shard_slices
from ingot.parallel.mesh import running_mesh
from tests.checkpoints.states import (
    ALONE,
    State,
    assert_equal,
    differ,
    gate,
    load,
    state_of,
    train,
    trained,
)
from tests.checkpoints.test_layouts import train_state, value
from tests.ranks import run_ranks


def saved_while_training(folder: Path, asynchronous: bool) -> tuple[State, State, list[int]]:
    """The state that was saved and what it had become when it was written at last; and what was in
    flight then.
    """
    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        saver = Saver(folder, mesh, asynchronous=asynchronous)
        before = state_of(masters, optimizer)
        with gate() as opened:
            if not asynchronous:
                opened.set()
            saver.save(3, masters, optimizer, {"samples": 3}, keep=2, best=None)
            for seed in range(2):
                train(masters, optimizer, seed)
            after = state_of(masters, optimizer)
            opened.set()
            saved = saver.wait()
        saver.close()
        return before, after, [item.step for item in saved]


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_comes_back_is_what_was_when_save_was_called(
    world: int, asynchronous: bool, tmp_path: Path
) -> None:
    ranks = (
        run_ranks(world, saved_while_training, tmp_path, asynchronous)
        if world > 1
        else [saved_while_training(tmp_path, asynchronous)]
    )
    loaded = load(tmp_path)
    for before, after, steps in ranks:
        assert_equal(loaded, before)
        assert steps == [3]
        assert all(not torch.equal(before[name], after[name]) for name in before), (
            "all of it changed, the step counters too"
        )


def test_without_a_copy_that_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: what is written is what trains."""
    monkeypatch.setattr(Staging, "copy", lambda self, tensors: staged_in_place(dict(tensors)))
    before, after, _ = saved_while_training(tmp_path, True)
    assert differ(load(tmp_path), before)
    assert_equal(load(tmp_path), after)


def copied_in_layout(folder: Path, layout: dict[str, int]) -> dict[str, bool]:
    """A save of a spread state that is overwritten meanwhile, loaded by the same ranks: is each
    rank's part what it was?
    """
    with running_mesh(Parallel(**layout)) as mesh:
        _, masters, optimizer = train_state("257", layout, mesh)
        for master in masters:
            optimizer.state[master.tensor] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.zeros_like(master.tensor),
                "exp_avg_sq": torch.zeros_like(master.tensor),
            }
        before = {
            name: value(name, tensor)[shard_slices(tensor)]
            for name, tensor in training_tensors(masters, optimizer).items()
        }
        for name, tensor in training_tensors(masters, optimizer).items():
            local_tensor(tensor).copy_(before[name])
        saver = Saver(folder, mesh, asynchronous=True)
        with gate() as opened:
            saver.save(1, masters, optimizer, {}, keep=1, best=None)
            for tensor in training_tensors(masters, optimizer).values():
                local_tensor(tensor).fill_(-1.0)
            opened.set()
            saver.wait()
        saver.close()
        found = newest_valid(folder)
        assert found is not None
        load_checkpoint(found, masters, optimizer, mesh)
        return {
            name: torch.equal(local_tensor(tensor), before[name])
            for name, tensor in training_tensors(masters, optimizer).items()
        }


@pytest.mark.drawn
@pytest.mark.parametrize("layout", [{"shard": 2}, {"tensor": 2}])
def test_spread_tensors_are_copied_as_they_are_spread(
    layout: dict[str, int], tmp_path: Path
) -> None:
    for rank in run_ranks(2, copied_in_layout, tmp_path, layout):
        assert rank
        assert all(rank.values())


def test_save_comes_back_at_once_and_tells_what_it_took(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=True)
    with gate() as opened:
        saver.save(1, masters, optimizer, {}, keep=1, best=None)
        assert saver.done() == []
        assert committed(tmp_path) == []
        time.sleep(0.2)
        opened.set()
        [saved] = saver.wait()
    assert saved.total_s - saved.blocked_s > 0.2, "the time until it was opened is none that blocks"
    assert (saved.step, saved.folder) == (1, step_folder(tmp_path, 1))
    assert saved.bytes == sum(
        path.stat().st_size for path in saved.folder.iterdir() if path.name != COMMIT
    )
    assert saver.done() == saver.wait() == []
    saver.close()


@pytest.mark.drawn
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_at_the_end_is_all_waiting_and_copies_nothing(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Staging, "allocate")
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=asynchronous)
    saver.save(1, masters, optimizer, {}, keep=1, best=None, last=asynchronous)
    [saved] = saver.done()
    assert saved.blocked_s == saved.total_s
    assert [found.step for found in committed(tmp_path)] == [1]
    assert_equal(load(tmp_path), state_of(masters, optimizer))
    saver.close()


def test_a_save_waits_for_the_one_before_and_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WAIT_INTERVAL_S", 0.02)
    masters, optimizer = trained(0)
    said, gates = list[float](), list[threading.Event]()

    def on_wait() -> None:
        said.append(time.monotonic())
        if len(said) == 5:
            gates[0].set()

    saver = Saver(tmp_path, ALONE, asynchronous=True, on_wait=on_wait)
    with gate() as opened:
        gates.append(opened)
        saver.save(1, masters, optimizer, {}, keep=5, best=None)
        assert not said
        first = state_of(masters, optimizer)
        train(masters, optimizer)
        saver.save(2, masters, optimizer, {}, keep=5, best=None)
        assert len(said) >= 5
        assert [item.step for item in saver.done()] == [1]
        train(masters, optimizer)
        [second] = saver.wait()
    assert second.blocked_s > said[4] - said[0] > 0
    saver.close()
    for path in step_folder(tmp_path, 2).iterdir():
        path.unlink()
    assert_equal(load(tmp_path), first)


def test_a_save_that_does_not_end_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever waits beats, so that nobody else would notice a disk that does not answer."""
    assert saving.LONG_WAIT_S <= 60, "all machines stand still meanwhile"
    monkeypatch.setattr(saving, "LONG_WAIT_S", 0.0)
    monkeypatch.setattr(saving, "WAIT_INTERVAL_S", 0.001)
    gates, waits = list[threading.Event](), list[None]()

    def on_wait() -> None:
        waits.append(None)
        if len(waits) == 5:
            gates[-1].set()

    saver = Saver(tmp_path, ALONE, asynchronous=True, on_wait=on_wait)
    told = f"for a checkpoint in {tmp_path}; see whether the disks of all nodes answer\n"
    for step, times, count in ((1, 2.0, 1), (2, 1e9, 0), (3, 0.0, 1)):
        monkeypatch.setattr(saving, "TIMES_LONGER", times)
        with gate() as opened:
            gates.append(opened)
            saver.save(step, *trained(0), {}, keep=1, best=None)
            waits.clear()
            saver.wait()
        assert capsys.readouterr().err.count(told) == count, "not if it always takes as long"
    saver.close()


def test_the_memory_of_the_copy_is_used_again_and_written_from_where_it_is(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    staging = Staging()
    places: list[dict[str, int]] = []
    for _ in range(3):
        staged = staging.copy(training_tensors(masters, optimizer))
        places.append({name: tensor.data_ptr() for name, tensor in staged.tensors.items()})
        assert_equal(staged.tensors, training_tensors(masters, optimizer))
        train(masters, optimizer)
    assert places[0] == places[1] == places[2]
    assert not set(places[0].values()) & {
        tensor.data_ptr() for tensor in training_tensors(masters, optimizer).values()
    }
    for tensor in staged.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, (
            "torch copies what is part of something larger before it writes it"
        )


def test_what_has_another_shape_gets_room_of_its_own() -> None:
    staging = Staging()
    one = staging.copy(
        {
            "a": torch.arange(5.0),
            "b": torch.ones(2, 3, dtype=torch.bfloat16),
            "none": torch.empty(0, 4),
            "step": torch.tensor(3.0),
        }
    ).tensors
    assert one["a"].tolist() == [0, 1, 2, 3, 4]
    assert one["b"].dtype == torch.bfloat16
    assert one["none"].shape == (0, 4)
    assert one["step"].shape == ()
    two = staging.copy({"a": torch.arange(6.0), "c": torch.arange(9).view(3, 3).T}).tensors
    assert two["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert two["c"].tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_room_can_be_made_before(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=True)
    saver.prepare(masters, optimizer)
    made: list[Staged] = []
    copy = Staging.copy
    with mock.patch(
        "ingot.checkpoints.state._allocate_block", side_effect=AssertionError("room is made again")
    ) as making:
        saver.wait()
        with mock.patch.object(
            Staging, "copy", lambda self, tensors: made.append(copy(self, tensors)) or made[-1]
        ):
            saver.save(1, masters, optimizer, {}, keep=1, best=None)
        saver.wait()
    assert not making.called
    assert made[0].wait() == 0.0
    assert_equal(load(tmp_path), state_of(masters, optimizer))
    saver.close()


def test_the_marker_has_what_the_payload_was(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    saver, payload = (
        Saver(tmp_path, ALONE, asynchronous=True),
        {
            "samples": 1,
            "watched": {"best": [1]},
        },
    )
    with gate() as opened:
        saver.save(1, masters, optimizer, payload, keep=1, best=None)
        payload["samples"] = 2
        payload["watched"]["best"].append(2)  # type: ignore[index]
        opened.set()
        saver.wait()
    assert committed(tmp_path)[0].commit["watched"] == {"best": [1]}
    assert committed(tmp_path)[0].commit["samples"] == 1
    saver.close()


def test_older_ones_go_and_the_best_stays(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=True)
    for step in range(1, 6):
        saver.save(step, masters, optimizer, {}, keep=2, best=2 if step > 1 else None)
    assert [item.step for item in saver.wait()] == [1, 2, 3, 4, 5]
    assert [found.step for found in committed(tmp_path)] == [5, 4, 2]
    saver.close()


def test_nothing_is_in_flight_after_close(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=True)
    with gate() as opened:
        saver.save(1, masters, optimizer, {}, keep=1, best=None)
        threading.Timer(0.2, opened.set).start()
        saver.close()
    assert [found.step for found in committed(tmp_path)] == [1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save-")]
    saver.close()


class Refused(Exception):
    """Cannot be sent to another rank."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__("broken")


def refusing(kind: str) -> Any:
    def write(self: HashedStream, data: object) -> int:
        raise OSError(28, "No space left on device") if kind == "full" else Refused(1, 2)

    return mock.patch.object(HashedStream, "write", write)


def failing(folder: Path, rank: int, kind: str, asynchronous: bool) -> list[str]:
    """What this rank is told when the writer of `rank` fails, at `wait` and at the next `save`; in
    the end a save that is well.
    """
    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        told: list[str] = []
        saver = Saver(folder, mesh, asynchronous=asynchronous)
        saver.save(1, masters, optimizer, {}, keep=3, best=None)
        saver.wait()
        for step in (2, 3):
            try:
                with refusing(kind) if mesh.rank == rank else mock.MagicMock():
                    saver.save(step, masters, optimizer, {}, keep=3, best=None)
                    while not saver.failed:
                        time.sleep(0.01)
                if step == 2:
                    saver.wait()
                else:
                    saver.save(9, masters, optimizer, {}, keep=3, best=None)
                told.append("nothing")
            except Failed as error:
                told.append(str(error))
            assert not saver.failed
            told.append(" ".join(sorted(path.name for path in folder.iterdir())))
            mesh.barrier()
        saver.save(4, masters, optimizer, {}, keep=3, best=None)
        told.append(str([item.step for item in saver.wait()]))
        saver.close()
        return told


@pytest.mark.drawn("saves of several ranks", keep=2)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("rank", "kind", "words"),
    [
        (1, "full", "disk full while writing {}; make space and run the same command again"),
        (0, "full", "disk full while writing {}; make space and run the same command again"),
        (
            1,
            "strange",
            (
                "checkpoint {} could not be saved (rank 1: Refused: broken); run the same command"
                " again"
            ),
        ),
    ],
)
def test_what_fails_on_one_rank_is_raised_on_all(
    rank: int, kind: str, words: str, asynchronous: bool, tmp_path: Path
) -> None:
    for told in run_ranks(2, failing, tmp_path, rank, kind, asynchronous):
        assert told == [
            words.format(step_folder(tmp_path, 2)),
            "step-00000001",
            words.format(step_folder(tmp_path, 3)),
            "step-00000001",
            "[4]",
        ]
    assert [found.step for found in committed(tmp_path)] == [4, 1]


def test_what_failed_last_is_said_when_nobody_waits_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masters, optimizer = trained(0)
    saver = Saver(tmp_path, ALONE, asynchronous=True)
    with refusing("full"):
        saver.save(1, masters, optimizer, {}, keep=1, best=None)
        saver.close()
    assert "warning: disk full while writing" in capsys.readouterr().err


class Recording:
    """A mirror that tells what it was asked for, and fails on demand."""

    def __init__(self, rank: int, failing: str = "") -> None:
        self.rank, self.failing, self.asked = rank, failing, list[tuple[str, Any]]()

    def _ask(self, what: str, about: Any) -> None:
        self.asked.append((what, about))
        if what == self.failing:
            raise Failed(f"the bucket refuses {what} of rank {self.rank}")

    def put(self, folder: Path, names: Sequence[str]) -> None:
        assert (folder / COMMIT).exists() or (folder.parent.name == "1" and self.rank == 1), (
            "here first"
        )
        self._ask("put", (folder.name, sorted(names)))

    def commit(self, folder: Path) -> None:
        self._ask("commit", folder.name)

    def recommit(self, folder: Path) -> None:
        self._ask("recommit", folder.name)

    def retain(self, kept: Collection[str]) -> None:
        self._ask("retain", sorted(kept))


def mirrored(
    folder: Path, failing_rank: int, failing: str
) -> tuple[list[tuple[str, Any]], str, list[Saved]]:
    with running_mesh() as mesh:
        masters, optimizer = trained(0)
        mirror = Recording(mesh.rank, failing if mesh.rank == failing_rank else "")
        saver = Saver(folder, mesh, asynchronous=True, mirror=mirror)
        told = ""
        for step in (1, 2, 3):
            saver.save(step, masters, optimizer, {}, keep=1, best=1)
            try:
                saver.wait() if step < 3 else None
            except Failed as error:
                told = str(error)
                break
        saved = [] if told else saver.wait()
        saver.close()
        return mirror.asked, told, saved or saver.done()


@pytest.mark.drawn("saves of several ranks", keep=2)
def test_what_is_committed_here_goes_to_the_mirror(tmp_path: Path) -> None:
    (main, told, saved), (other, *_) = run_ranks(2, mirrored, tmp_path, -1, "")
    names = [f"step-0000000{step}" for step in (1, 2, 3)]
    expected: list[tuple[str, Any]] = []
    for number, name in enumerate(names):
        expected += [
            ("put", (name, [".metadata", "__0_0.distcp"])),
            ("commit", name),
            ("retain", sorted({names[0], names[number]})),
        ]
    assert (main, told) == (expected, "")
    assert other == [("put", (name, ["__1_0.distcp"])) for name in names]
    assert [item.step for item in saved] == [3]


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(("rank", "what"), [(1, "put"), (0, "commit"), (0, "retain")])
def test_a_mirror_that_fails_is_an_error_of_all_and_the_checkpoint_here_stands(
    rank: int, what: str, tmp_path: Path
) -> None:
    everyone = run_ranks(2, mirrored, tmp_path, rank, what)
    for _, told, saved in everyone:
        assert told == f"the bucket refuses {what} of rank {rank}"
        assert [item.step for item in saved] == [1]
    assert "commit" not in [asked for asked, _ in everyone[0][0]] or what != "put", (
        "nothing is committed there that is not whole"
    )
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1


def on_disks_of_their_own(root: Path) -> tuple[list[str], bool]:
    """Two nodes without a shared disk, with a mirror; what is left on this one after three
    saves.
    """
    with running_mesh() as mesh:
        alone = type(mesh)(
            type(mesh.ranks)(mesh.rank, 2, local_rank=0, local_world=1),
            mesh.device,
            mesh.degrees,
            mesh.group,
        )
        masters, optimizer = trained(0)
        saver = Saver(root / str(mesh.rank), alone, asynchronous=True, mirror=Recording(mesh.rank))
        for step in (1, 2, 3):
            saver.save(step, masters, optimizer, {}, keep=2, best=None)
        saver.wait()
        saver.close()
        left = sorted(
            path.relative_to(root / str(mesh.rank)).as_posix()
            for path in (root / str(mesh.rank)).rglob("*")
            if path.is_file()
        )
        return left, bool(mesh.is_main and committed(root / "0")[0].commit["scattered"])


@pytest.mark.drawn("saves of several ranks", keep=2)
def test_nodes_with_disks_of_their_own_keep_their_own_files(tmp_path: Path) -> None:
    (main, scattered), (other, _) = run_ranks(2, on_disks_of_their_own, tmp_path)
    assert scattered
    assert main == [
        f"step-0000000{step}/{name}"
        for step in (2, 3)
        for name in (".metadata", COMMIT, "__0_0.distcp")
    ]
    assert other == [f"step-0000000{step}/__1_0.distcp" for step in (2, 3)]


def test_a_tensor_that_is_not_contiguous_comes_back(tmp_path: Path) -> None:
    """Staging keeps values and shapes, not strides."""
    source: dict[str, Tensor] = {"a": torch.arange(12.0).view(3, 4).T}
    assert torch.equal(Staging().copy(source).tensors["a"], source["a"])
