"""The names of the objective's further metrics. Ranks add up sums by position, so all of them must
have the same names, and a step has no collective to agree upon new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.parallel.mesh import Mesh


class LateMetric(WrongInput):
    """A step after the first brought a metric; raised on all ranks together when `step` steps are
    done.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class MetricNames:
    """The metrics of the first step of this attempt, and those `known` from earlier attempts: a
    resumed run may begin with a step that has nothing of a rare one.
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self.names, self._agreed = sorted(known), False
        self.late: str | None = None
        """A metric of this rank that no earlier step had, and what is wrong with that."""

    def complete(self, step: int, sums: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
        """The sums of a step (from 0) under the names that all ranks have; a metric that this
        rank's micro-batches have nothing of is 0. One that comes late is left out, and told.

        Raises:
            WrongInput: ranks have different metrics in the first step of this attempt.
        """
        if not self._agreed:
            self.names, self._agreed = sorted({*self.names, *sums}), True
            if not mesh.losses.is_same(self.names):
                raise WrongInput(
                    f"ranks have different metrics in step {step + 1:,}"
                    f" ({', '.join(self.names) or 'none'} on rank {mesh.rank}); the objective's"
                    " reduce must give each with every micro-batch, 0 where there is nothing"
                )
        if self.late is None and (new := sorted(sums.keys() - set(self.names))):
            self.late = (
                f"step {step + 1:,} is the first with the metric {new[0]}; the objective's reduce"
                " must give each with every micro-batch, 0 where there is nothing"
            )
            # The last step has no step after it, before which all ranks would refuse it.
            say(f"train: warning: {self.late}")
        zero = torch.zeros((), device=mesh.device)
        return {name: sums.get(name, zero) for name in self.names}

    def refuse_late(self, found: bool, step: int) -> None:
        """Raises LateMetric on all ranks if any has `found` one in the `step` steps done."""
        if found:
            elsewhere = (
                f"step {step:,} is the first with some metric on another rank, which says what; the"
                " objective's reduce must give each with every micro-batch, 0 where there is"
                " nothing"
            )
            raise LateMetric(self.late or elsewhere, step)
