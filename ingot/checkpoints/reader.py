"""Reads the tensors of a checkpoint written under any parallel layout: into a training state in
place, or one whole tensor at a time.

`torch.distributed.checkpoint` takes more than a second to import, so it is imported inside the
functions that need it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.base.errors import Failed
from ingot.checkpoints.state import MODEL, allocate_state, copy_back, mismatches, training_tensors
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh


def load_checkpoint(
    found: CommittedCheckpoint, masters: Masters, optimizer: Optimizer | None, mesh: Mesh
) -> None:
    """Load weights and optimizer state in place from a checkpoint of any layout; without an
    optimizer, only the weights. Collective: each rank reads its own shards.

    Raises:
        Failed: tensors are missing or have another shape; all are named, none is loaded.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(found.folder))
    stored = reader.read_metadata().state_dict_metadata
    if optimizer is not None:
        allocate_state(masters, optimizer, stored)
    tensors = training_tensors(masters, optimizer)
    there = {
        name: about
        for name, about in stored.items()
        if optimizer is not None or name.startswith(MODEL)
    }
    if wrong := mismatches(tensors, there, mesh):
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Failed(
            f"checkpoint {found.folder} does not fit this model: {'; '.join(wrong[:8])}{more}; use"
            " --fresh, or the recipe that wrote it"
        )
    with _ignore_single_process_warning():
        load(dict(tensors), storage_reader=reader, no_dist=mesh.world == 1)
    copy_back(masters, optimizer, tensors)
    masters.publish()


class StoredTensors:
    """The tensors of a checkpoint by their stored names, each read whole (unsharded) on one process
    without collectives, whatever layout wrote them.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._reader = FileSystemReader(str(folder))
        metadata = self._reader.read_metadata()
        # Cached: the metadata of shards grows with tensors times ranks, and `load` would reread it.
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self._stored = metadata.state_dict_metadata

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def __getitem__(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        about: Any = self._stored[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with _ignore_single_process_warning():
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class WholeWeights(StoredTensors):
    """Only the model weights, by their parameter names, in the type they were trained in."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(MODEL + name)


@contextlib.contextmanager
def _ignore_single_process_warning() -> Iterator[None]:
    """Silence torch's warning that `torch.distributed` is not initialised: reading on a single
    process is intended here.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
