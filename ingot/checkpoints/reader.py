"""Reads the tensors of a checkpoint, whatever layout wrote them: into a training state in place, or
one whole tensor at a time.

`torch.distributed.checkpoint` takes more than a second to import, so the functions that need it
import it.
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
from ingot.checkpoints.state import MODEL, make_room, misfits, settle, training_tensors
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh


def load_checkpoint(
    found: CommittedCheckpoint, masters: Masters, optimizer: Optimizer | None, mesh: Mesh
) -> None:
    """Fill weights and optimizer in place, whatever layout wrote the checkpoint; without an
    optimizer, the weights alone.

    Each rank reads its own part. All ranks call it.

    Raises:
        Failed: tensors are missing or of another shape; all are named, none is loaded.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(str(found.folder))
    stored = reader.read_metadata().state_dict_metadata
    if optimizer is not None:
        make_room(masters, optimizer, stored)
    tensors = training_tensors(masters, optimizer)
    there = {
        name: about
        for name, about in stored.items()
        if optimizer is not None or name.startswith(MODEL)
    }
    if wrong := misfits(tensors, there, mesh):
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise Failed(
            f"checkpoint {found.folder} does not fit this model: {'; '.join(wrong[:8])}{more}; use"
            " --fresh, or the recipe that wrote it"
        )
    with _alone_is_meant():
        load(dict(tensors), storage_reader=reader, no_dist=mesh.world == 1)
    settle(masters, optimizer, tensors)
    masters.publish()


class StoredTensors:
    """The tensors in a checkpoint by their names there, each whole, one at a time and for one
    process alone, whatever layout wrote them.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._reader = FileSystemReader(str(folder))
        metadata = self._reader.read_metadata()
        # Read once, as what tells where each tensor lies grows with tensors times ranks.
        self._reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        self._stored = metadata.state_dict_metadata

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def __getitem__(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.state_dict_loader import load

        about: Any = self._stored[name]
        tensor = torch.empty(about.size, dtype=about.properties.dtype)
        with _alone_is_meant():
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


class WholeWeights(StoredTensors):
    """The weights among them, by their names in the model, in the type they were trained in."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(MODEL + name)


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    """torch warns when one process saves for itself; here that is no oversight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
