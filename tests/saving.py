"""A checkpoint on the spot, as tests of what comes after it want one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ingot.checkpoints.state import training_tensors
from ingot.checkpoints.writer import write_checkpoint
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh


def save_checkpoint(
    checkpoints: Path,
    step: int,
    masters: Masters,
    optimizer: Optimizer,
    payload: Mapping[str, Any],
    mesh: Mesh,
) -> Path:
    """Write and commit the state after `step` steps; all ranks call it. Its folder."""
    return write_checkpoint(
        checkpoints, step, training_tensors(masters, optimizer), payload, mesh
    ).folder
