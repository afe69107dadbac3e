"""What the ranks that share rows do with them in training: each its part, and sums over a row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ingot.parallel.collectives import sum_both
from ingot.parallel.mesh import Mesh
from ingot.parallel.rows import share


@dataclass(frozen=True)
class RowSharing:
    """Implements `ingot.objectives.objective.RowSharing`."""

    mesh: Mesh

    @property
    def world(self) -> int:
        return self.mesh.context.world

    def share(self, tensor: Tensor, fill: int) -> Tensor:
        # Sequence parallelism cuts a part once more.
        return share(
            tensor, self.mesh.context.rank, self.world, fill, multiple=self.mesh.tensor.world
        )

    def total(self, part: Tensor) -> Tensor:
        return sum_both(part, self.mesh.context.group)


def row_sharing(mesh: Mesh) -> RowSharing | None:
    """How this job shares rows; None where every rank has whole ones."""
    return None if mesh.context.world == mesh.tensor.world == 1 else RowSharing(mesh)
