"""What is measured while training runs: the objective on held-out rows, tasks, and texts for the
eye.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ingot.base.environment import Ranks
from ingot.evaluate.generation import complete
from ingot.evaluate.subject import Interrupted, Subject
from ingot.evaluate.validation import Watch, held_out_objective
from ingot.parallel.apply import evaluating
from ingot.parallel.mesh import Mesh
from ingot.parallel.shard import is_fsdp
from ingot.tokenizers.chat import stop_tokens
from ingot.train.build import Trainee
from ingot.train.plan import Plan
from ingot.train.watch import Measured


def subject_of(plan: Plan, trainee: Trainee, mesh: Mesh) -> Subject:
    """The model in training as evaluation sees it."""
    eos = frozenset(stop_tokens(plan.tokenizer))
    dealt = _dealt_over(trainee, mesh)
    return Subject(
        plan.recipe,
        trainee.model,
        plan.drawing.kind,
        plan.tokenizer,
        eos,
        plan.compute,
        dealt,
        "the model in training",
        quiet=True,
    )


def _dealt_over(trainee: Trainee, mesh: Mesh) -> Mesh:
    """The ranks that items are dealt over. Where weights are gathered for each use, all ranks must
    use them equally often, so each does all.
    """
    return Mesh(Ranks(), mesh.device) if is_fsdp(trainee.model) else mesh.data


def measuring(
    plan: Plan,
    trainee: Trainee,
    mesh: Mesh,
    all_asked: Callable[[], bool],
    asked: Callable[[], bool],
) -> Callable[[], dict[str, Measured] | None]:
    """What every evaluation while training measures, as a function of nothing; every rank calls it.
    None where it was broken off.

    `all_asked` is collective and says the same on all ranks, `asked` knows of this one alone: where
    items are dealt, ranks do not go in step.

    Raises:
        WrongInput: a task among `train.evaluate_tasks` cannot be done; before anything is trained.
    """
    knobs, micro_batch = plan.recipe.train, plan.batch.micro_batch
    subject = subject_of(plan, trainee, mesh)
    in_step = subject.mesh.world < mesh.data.world
    watch = Watch(replace(subject, asked=all_asked if in_step else asked), knobs.evaluate_tasks)
    held_out = trainee.objectives.held_out

    def measure() -> dict[str, Measured] | None:
        try:
            with evaluating(trainee.model):
                found = held_out_objective(
                    trainee.model,
                    held_out,
                    plan.held_out,
                    knobs.evaluate_rows,
                    micro_batch,
                    plan.compute,
                    mesh,
                    all_asked,
                )
                tasks = watch()
        except Interrupted:
            return None
        of_objective = {
            name: Measured(value, "lower" if name == "loss" else "higher")
            for name, value in found.items()
        }
        return of_objective | {
            key: Measured(value, direction) for key, (value, direction) in tasks.items()
        }

    return measure


def sample_texts(plan: Plan, trainee: Trainee, mesh: Mesh) -> list[dict[str, str]]:
    """Completions of `evaluate.prompts` by the model as it is now."""
    with evaluating(trainee.model):
        return complete(subject_of(plan, trainee, mesh), plan.recipe.evaluate.prompts)
