"""A training that is only tried: some steps of the real trainee, for what they take. Nothing of it
is kept.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ingot.config.shape import BatchPlan
from ingot.data.loader import Loader
from ingot.parallel.mesh import Mesh
from ingot.train.build import Trainee, build_trainee
from ingot.train.dropout import seed_dropout
from ingot.train.plan import Plan
from ingot.train.reference import Tables
from ingot.train.step import StepOutcome, global_targets, train_step


@dataclass(frozen=True)
class Trial:
    """A trainee that is tried."""

    plan: Plan
    mesh: Mesh
    trainee: Trainee

    @contextlib.contextmanager
    def dealing(self, batch: BatchPlan) -> Iterator[Callable[[int], StepOutcome]]:
        """For a while: a function that takes step n (from 0) as training takes it, loading and the
        count of targets included.

        Every rank calls it. `batch` may be dealt otherwise than the plan's; one at a time, since
        loaders of the same rows share their checks.
        """
        plan, trainee, mesh = self.plan, self.trainee, self.mesh
        with contextlib.closing(Loader(plan.rows, plan.order, batch, mesh.data.rank)) as loader:

            def take(step: int) -> StepOutcome:
                batches = loader.step(step)
                targets, _ = global_targets(trainee.objectives.training, batches, mesh)
                return train_step(
                    trainee.module,
                    trainee.objectives.training,
                    batches,
                    trainee.masters,
                    trainee.optimizer,
                    targets=max(1, targets),
                    clip_norm=plan.recipe.train.clip_norm,
                    compute=plan.compute,
                    mesh=mesh,
                    before=lambda index, one: seed_dropout(
                        trainee.model, plan.recipe.seed, step, index, one, mesh
                    ),
                )

            yield take


@contextlib.contextmanager
def trying(plan: Plan, mesh: Mesh) -> Iterator[Trial]:
    """Build what the plan says, as training would; torch's generators are left as they were.
    `let_go` when nothing names the trial any more.

    A reference model is not asked: what it thinks costs no time in a step.
    """
    table = (
        torch.zeros(max(len(plan.rows), len(plan.held_out)), 2)
        if plan.recipe.documents == "preference"
        else None
    )
    # A seeded draw in a trial must not be missing in the training that follows.
    devices = (
        {"devices": [mesh.device.index], "device_type": mesh.device.type}
        if mesh.device.type != "cpu"
        else {"devices": []}
    )
    with torch.random.fork_rng(**devices):
        yield Trial(
            plan,
            mesh,
            build_trainee(plan, None, None if table is None else Tables(table, table), mesh),
        )


def let_go(*, compiled: bool) -> None:
    """Give back memory that nothing uses any more, and what was compiled: shapes that were tried
    would count as shapes that change.
    """
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
