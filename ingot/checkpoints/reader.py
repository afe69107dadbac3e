"""Reads the tensors of a checkpoint written under any parallel layout: into a training state in
place, or one whole tensor at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from ingot.base.errors import WrongInput, some_of
from ingot.checkpoints.collective import run_on_all
from ingot.checkpoints.state import MODEL, allocate_state, copy_back, mismatches, training_tensors
from ingot.checkpoints.store import CommittedCheckpoint
from ingot.checkpoints.stored import read_tensors, stored_tensors
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh


def load_checkpoint(
    found: CommittedCheckpoint,
    masters: Masters,
    optimizer: Optimizer | None,
    mesh: Mesh,
    *,
    otherwise: str = "use --fresh, or the recipe that wrote it",
) -> None:
    """Load weights and optimizer state in place from a checkpoint of any layout; without an
    optimizer, only the weights. Collective: each rank reads its own shards. `otherwise`: what to do
    where it is that of another model.

    Raises:
        WrongInput: tensors are missing or have another shape; all are named, none is loaded.
    """
    stored = stored_tensors(found.folder)
    if optimizer is not None:
        allocate_state(masters, optimizer, stored)
    tensors = training_tensors(masters, optimizer)
    there = {
        name: about
        for name, about in stored.items()
        if optimizer is not None or name.startswith(MODEL)
    }
    if wrong := mismatches(tensors, there, mesh):
        raise WrongInput(
            f"checkpoint {found.folder} does not fit this model: {some_of(wrong, 8, '; ')};"
            f" {otherwise}"
        )
    run_on_all(mesh, lambda: read_tensors(found.folder, stored, tensors), lambda _: None)
    copy_back(masters, optimizer, tensors)
    masters.publish()


class StoredTensors:
    """The tensors of a checkpoint by their stored names, each read whole (unsharded) on one process
    without collectives, whatever layout wrote them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stored = folder, stored_tensors(folder)

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def __getitem__(self, name: str) -> Tensor:
        about = self._stored[name]
        tensor = torch.empty(about.size, dtype=about.dtype)
        read_tensors(self._folder, self._stored, {name: tensor})
        return tensor


class WholeWeights(StoredTensors):
    """Only the model weights, by their parameter names, in the type they were trained in."""

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(MODEL + name)
