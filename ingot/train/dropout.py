"""Dropout that a resumed run repeats: its masks follow from seed, step and sample, never from what
ran before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.base.markers import fingerprint
from ingot.data.loader import Batch
from ingot.models.adapters.lora import lora_state
from ingot.models.kinds import Model
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh


def seed_dropout(
    model: Model, seed: int, step: int, micro_batch: int, batch: Batch, mesh: Mesh
) -> None:
    """Say which micro-batch comes next.

    The native model's masks (those of adapters) depend on the sample alone. The models of
    transformers draw theirs from torch's generator, which is seeded anew here, so that they depend
    on how the batch was dealt, but not on where the run was resumed.
    """
    if isinstance(model, Decoder):
        if (state := lora_state(model)) is not None:
            state.begin_batch(step, _row_of_each(batch).to(mesh.device))
        return
    torch.manual_seed(int(fingerprint([seed, step, micro_batch, mesh.rank]), 16) % 2**63)


def _row_of_each(batch: Batch) -> Tensor:
    """A number for each row of tensors, `[R]`, the same wherever its sample is computed; a
    preference has two rows.
    """
    sides = len(batch.tokens) // len(batch.rows)
    return (batch.rows[:, None] * sides + torch.arange(sides)).flatten()
