"""The one place where these tests save a checkpoint, in the way that training does."""

from __future__ import annotations

import contextlib
from pathlib import Path

from torch.optim import Optimizer

from ingot.checkpoints.saver import Saver
from ingot.checkpoints.store import newest_valid, retain
from ingot.parallel.masters import Masters
from ingot.parallel.mesh import Mesh


def save_up_to(
    checkpoints: Path,
    step: int,
    masters: Masters,
    optimizer: Optimizer,
    mesh: Mesh,
    keep: int,
    *,
    asynchronous: bool,
) -> None:
    """Commit checkpoint `step` and let older ones go, unless a training that goes on would find it;
    the next save would let them go then.
    """
    found = newest_valid(checkpoints)
    if found is not None and found.step >= step:
        retain(checkpoints, keep)
        return
    with contextlib.closing(Saver(checkpoints, mesh, asynchronous=asynchronous)) as saver:
        saver.save(step, masters, optimizer, {"samples": step}, keep=keep, best=None)
        saver.wait()
