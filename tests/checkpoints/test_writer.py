"""Files of a checkpoint are hashed while they are written, each by the rank that writes it, and are
on the disk before the marker is.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ingot.base import markers
from ingot.base.markers import COMMIT, FileEntry, entry_of, read_marker
from ingot.base.storage import partial_of, sha256_file
from ingot.checkpoints import writer
from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.store import newest_valid, step_folder
from ingot.checkpoints.writer import (
    CheckedPlanner,
    HashedStream,
    write_checkpoint,
    write_tensors,
)
from ingot.config.sections.layout import Parallel
from ingot.models.parameters import local_tensor
from ingot.parallel.mesh import Mesh, running_mesh
from tests.checkpoints.states import ALONE, trained
from tests.checkpoints.test_layouts import train_state, value
from tests.exhaustive import examples
from tests.ranks import run_ranks
from tests.saving import save_checkpoint


def no_reading(path: object) -> str:
    raise AssertionError(f"{path} is read again")


def test_checksums_are_those_of_the_files_though_no_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters, optimizer = trained(0)
    monkeypatch.setattr(markers, "sha256_file", no_reading)
    entries = write_tensors(tmp_path, training_tensors(masters, optimizer), ALONE)
    monkeypatch.undo()
    assert (
        sorted(entry.path for entry in entries)
        == [".metadata", "__0_0.distcp"]
        == sorted(path.name for path in tmp_path.iterdir())
    )
    assert entries == [entry_of(tmp_path, entry.path) for entry in entries]


def sharded(folder: Path) -> tuple[list[str], dict[str, int]]:
    """Save step 1 under `shard: 4`; what this rank wrote, and how much of each tensor it holds."""
    with (
        running_mesh(Parallel(shard=4)) as mesh,
        mock.patch.object(markers, "sha256_file", no_reading),
    ):
        _, masters, optimizer = train_state("257", {"shard": 4}, mesh)
        tensors = training_tensors(masters, optimizer)
        for name, tensor in tensors.items():
            local_tensor(tensor).fill_(float(value(name, torch.empty(1)))).add_(mesh.rank)
        written = write_checkpoint(folder, 1, tensors, {"samples": 1}, mesh)
        assert written.bytes == sum(
            path.stat().st_size for path in written.folder.iterdir() if path.name != COMMIT
        )
        return written.own_files, {
            name: local_tensor(tensor).numel() for name, tensor in tensors.items()
        }


def test_each_rank_hashes_its_own_file(tmp_path: Path) -> None:
    ranks = run_ranks(4, sharded, tmp_path)
    assert [sorted(mine) for mine, _ in ranks] == [
        [".metadata", "__0_0.distcp"],
        ["__1_0.distcp"],
        ["__2_0.distcp"],
        ["__3_0.distcp"],
    ]
    found = newest_valid(tmp_path)
    assert found is not None
    assert [entry["path"] for entry in found.commit["files"]] == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(4)),
    ]
    for entry in found.commit["files"]:
        assert entry["sha256"] == sha256_file(found.folder / entry["path"])
    for rank, (_, held) in enumerate(ranks):
        assert (found.folder / f"__{rank}_0.distcp").stat().st_size > 4 * sum(held.values()) > 0


def test_everything_is_on_the_disk_in_the_order_in_which_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file when its bytes are, a name when its folder is; the marker only after all that it
    speaks of.
    """
    done: list[tuple[str, str]] = []
    sizes: dict[str, int] = {}
    flush, rename = os.fsync, os.replace

    def flushed(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        flush(descriptor)
        done.append(("flushed", str(path.relative_to(tmp_path))))
        sizes[path.name] = path.stat().st_size

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(
        os,
        "replace",
        lambda old, new: (
            rename(old, new),
            done.append(("named", str(Path(new).relative_to(tmp_path)))),
        ),
    )
    renaming = Path.rename
    monkeypatch.setattr(
        Path,
        "rename",
        lambda old, new: (
            renaming(old, new),
            done.append(("named", str(Path(new).relative_to(tmp_path)))),
        )[0],
    )
    masters, optimizer = trained(0)
    folder = step_folder(tmp_path / "checkpoints", 3)
    save_checkpoint(tmp_path / "checkpoints", 3, masters, optimizer, {}, ALONE)
    for name, flushed_as in (("__0_0.distcp", "__0_0.distcp"), (".metadata", ".metadata.tmp")):
        assert sizes[flushed_as] == (folder / name).stat().st_size, "nothing is left in a buffer"
    here = str(folder.relative_to(tmp_path))
    marker = [f"{here}/{partial_of(Path(COMMIT))}", f"{here}/{COMMIT}"]
    assert done == [
        ("flushed", "checkpoints"),
        ("flushed", "."),
        ("flushed", f"{here}/__0_0.distcp"),
        ("flushed", here),
        ("flushed", f"{here}/.metadata.tmp"),
        ("named", f"{here}/.metadata"),
        ("flushed", here),
        ("flushed", marker[0]),
        ("named", marker[1]),
        ("flushed", here),
        ("flushed", "checkpoints"),
    ]


def test_a_stream_counts_and_hashes_and_does_not_go_back(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        stream = HashedStream(file)
        assert stream.write(b"abc") == 3
        assert stream.write(memoryview(torch.arange(4, dtype=torch.int32).numpy())) == 16
        assert stream.tell() == 19
        with pytest.raises(io.UnsupportedOperation):
            stream.seek(0)
    assert stream.entry("a") == entry_of(tmp_path, "a")


class Refusing(io.BytesIO):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self.after:
            raise OSError(28, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("after", [0, 60, 2000, 9000, 30_000])
def test_what_the_disk_refuses_is_told_as_it_was_said_wherever_it_is(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own writer hides it behind errors of its own."""
    masters, optimizer = trained(0)
    make = HashedStream.__init__
    monkeypatch.setattr(HashedStream, "__init__", lambda self, file: make(self, Refusing(after)))
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path, training_tensors(masters, optimizer), ALONE)


def test_the_marker_says_how_it_was_written(tmp_path: Path) -> None:
    masters, optimizer = trained(0)
    written = write_checkpoint(
        tmp_path, 2, training_tensors(masters, optimizer), {"samples": 6}, ALONE
    )
    commit = read_marker(written.folder, COMMIT)
    assert commit is not None
    assert (commit["step"], commit["world"], commit["layout"], commit["samples"]) == (2, 1, "", 6)
    assert [FileEntry(**entry) for entry in commit["files"]] == [
        entry_of(tmp_path / "step-00000002", name) for name in (".metadata", "__0_0.distcp")
    ]


def lost_while_told(folder: Path) -> str:
    """Save step 1 on two ranks that lose each other once rank 0 has committed; what is raised."""
    told = Mesh.from_main

    def broken(self: Mesh, call: Any) -> Any:
        value = told(self, call)
        if read_marker(step_folder(folder, 1), COMMIT) is not None:
            raise RuntimeError("Connection reset by peer")
        return value

    with running_mesh(Parallel(shard=2)) as mesh, mock.patch.object(Mesh, "from_main", broken):
        _, masters, optimizer = train_state("257", {"shard": 2}, mesh)
        with pytest.raises(RuntimeError) as raised:
            write_checkpoint(folder, 1, training_tensors(masters, optimizer), {"samples": 1}, mesh)
        return str(raised.value)


def test_what_is_committed_stays_though_a_rank_died_before_it_heard_of_it(tmp_path: Path) -> None:
    assert run_ranks(2, lost_while_told, tmp_path) == ["Connection reset by peer"] * 2
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1


Box = tuple[tuple[int, int], ...]
"""Offset and size of a shard in each dimension."""


def plans(size: tuple[int, ...], shards: Sequence[Box]) -> list[SavePlan]:
    """What ranks with a shard each tell rank 0 of one tensor."""
    return [
        SavePlan(
            [
                WriteItem(
                    MetadataIndex("weight", torch.Size(begin for begin, _ in shard)),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(
                            torch.Size(begin for begin, _ in shard),
                            torch.Size(length for _, length in shard),
                        ),
                        TensorProperties(),
                        torch.Size(size),
                    ),
                )
            ],
            planner_data={"weight": ("weight",)},
        )
        for shard in shards
    ]


def planned(planner: SavePlanner, told: list[SavePlan]) -> tuple[list[SavePlan], Metadata] | None:
    """The plan for all ranks; None where it is refused."""
    try:
        return planner.create_global_plan(told)
    except ValueError:
        return None


LENGTHS = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@settings(max_examples=examples(60, 300), deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.data())
def test_a_plan_is_what_torch_makes_of_it(lengths: list[list[int]], data: st.DataObject) -> None:
    """Also where a shard is missing, moved, of another length or twice."""
    size = tuple(map(sum, lengths))
    pieces = [
        zip(itertools.accumulate([0, *of_one[:-1]]), of_one, strict=True) for of_one in lengths
    ]
    shards = data.draw(st.permutations(list(itertools.product(*pieces))))
    one = st.tuples(*(st.tuples(st.integers(-1, 5), st.integers(1, 4)) for _ in size))
    place = data.draw(st.integers(0, len(shards) - 1))
    change = data.draw(st.sampled_from(["nothing", "lost", "twice", "other", "more"]))
    shards[place : place + (change in ("lost", "other"))] = (
        [shards[place]] if change == "twice" else [data.draw(one)] * (change in ("other", "more"))
    )
    # Of a rank for which nothing is left.
    shards.append(((size[0], 0), *((0, length) for length in size[1:])))
    # Torch lets a rank that is alone keep less than all.
    told = [*plans(size, shards), SavePlan([], planner_data={})]
    ours, theirs = planned(CheckedPlanner(), told), planned(DefaultSavePlanner(), told)
    assert ours == theirs
    assert (ours is not None) or change not in ("nothing", "twice")


@pytest.mark.parametrize("shards", [[((0, 2),), ((1, 2),)], [((0, 1),), ((1, 1),), ((0, 2),)]])
def test_shards_that_overlap_are_refused_though_they_are_as_large(shards: list[Box]) -> None:
    size = sum(length for ((_, length),) in shards)
    assert planned(CheckedPlanner(), plans((size,), shards)) is None


def test_torchs_own_check_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes on rank 0 where thousands of ranks share wide matrices."""
    torchs = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(default_planner, "_validate_global_plan", torchs)
    masters, optimizer = trained(0)
    assert write_tensors(tmp_path, training_tensors(masters, optimizer), ALONE)


def test_each_shard_is_compared_with_those_beside_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a matrix is wider than tall."""
    compared = 0
    overlap = writer._overlap

    def counting(one: writer.Box, other: writer.Box) -> bool:
        nonlocal compared
        compared += 1
        return overlap(one, other)

    monkeypatch.setattr(writer, "_overlap", counting)
    rows: list[Box] = [((row, 1), (0, 4096)) for row in range(500)]
    grid: list[Box] = [((row, 1), (half, 2048)) for row in range(250) for half in (0, 2048)]
    assert planned(CheckedPlanner(), plans((500, 4096), rows)) is not None
    assert planned(CheckedPlanner(), plans((250, 4096), grid)) is not None
    assert compared <= 500
