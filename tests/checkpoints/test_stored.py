"""A checkpoint is read as torch itself would read it, without importing torch's reader; an index
that leaves something out, or names something to be called, is refused.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed
from ingot.checkpoints.store import step_folder
from ingot.checkpoints.stored import METADATA, read_tensors, stored_tensors
from tests.checkpoints.states import State, save

READ = """
import sys
from pathlib import Path
import torch
from ingot.checkpoints.stored import read_tensors, stored_tensors

folder = Path(sys.argv[1])
stored = stored_tensors(folder)
ours = {name: torch.full(one.size, 7, dtype=one.dtype) for name, one in stored.items()}
read_tensors(folder, stored, ours)
heavy = {"torch.distributed.checkpoint", "torch.distributed.tensor", "sympy"} & set(sys.modules)
assert not heavy, heavy

from torch.distributed.checkpoint import FileSystemReader, load
theirs = {name: torch.zeros_like(one) for name, one in ours.items()}
load(theirs, storage_reader=FileSystemReader(folder), no_dist=True)
different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
assert len(ours) > 40 and not different, different
"""


def test_it_reads_what_torch_reads_without_importing_torchs_reader(tmp_path: Path) -> None:
    save(tmp_path, 1)
    command = [sys.executable, "-c", READ, str(step_folder(tmp_path, 1))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_values_that_no_chunk_holds_are_missed_before_anything_is_read(tmp_path: Path) -> None:
    written = save(tmp_path, 1)
    folder = step_folder(tmp_path, 1)
    # The first one in order of names that has rows.
    name = next(name for name, tensor in written.items() if tensor.ndim == 2)
    edit(folder, lambda metadata: metadata.state_dict_metadata[name].chunks.clear())
    into: State = {one: torch.full_like(tensor, 7) for one, tensor in written.items()}
    with pytest.raises(Failed, match=rf"holds 0 of the [\d,]+ values of {name}"):
        read_tensors(folder, stored_tensors(folder), into)
    assert all(bool((tensor == 7).all()) for tensor in into.values())


def test_another_shape_than_the_index_says_is_refused(tmp_path: Path) -> None:
    written = save(tmp_path, 1)
    folder, name = step_folder(tmp_path, 1), "model.model.norm.weight"

    def lengthen(metadata: Any) -> None:
        about = metadata.state_dict_metadata[name]
        about.size = about.chunks[0].sizes = torch.Size([17])

    edit(folder, lengthen)
    assert list(written[name].shape) == [16]
    with pytest.raises(Failed, match=r"norm\.weight is \[16\].* index says \[17\]"):
        read_tensors(folder, stored_tensors(folder), {name: torch.zeros(17)})


class Calls:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_nothing_that_an_index_names_is_called(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(Calls(tmp_path / "made")))
    with pytest.raises(Failed, match="is no index of a checkpoint"):
        stored_tensors(tmp_path)
    assert not (tmp_path / "made").exists()


def edit(folder: Path, change: Any) -> None:
    """Change the index of a checkpoint by torch's own classes."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
