"""The knobs of the evaluation `reward`, which judges a model's answers as a training on rewards
does.
"""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

from typing import ClassVar, Literal, Self

from ingot.config.section import Positive
from ingot.config.sections.evaluation import TaskSettings
from ingot.config.sections.grpo import GRPOSettings
from ingot.config.sections.objective import ObjectiveSettings
from ingot.config.sections.rewards import Reward


class RewardTask(TaskSettings):
    """Rewards of a model's most likely answers to the held-out prompts of chats."""

    implementation = "ingot.evaluate.tasks.reward:open_reward"
    model_kinds = ("decoder",)
    document_kinds = ("chat",)
    own_names: ClassVar[tuple[str, ...]] = ("mean", "finished", "failed")
    """What its metrics are called beside those of single rewards, which have the reward's name."""

    kind: Literal["reward"]
    """Which evaluation."""
    name: str = "reward"
    """The name that its metrics carry in the report."""
    rewards: list[Reward] = []
    """What judges an answer; empty: `objective.rewards`."""
    max_tokens: Positive | None = None
    """Tokens of an answer; empty: `objective.max_answer_tokens`, or 256."""
    limit: Positive | None = None
    """Use only the first so many held-out prompts; empty: all."""

    @property
    def needs_held_out(self) -> bool:
        return True

    def metrics_with(self, objective: ObjectiveSettings) -> tuple[str, ...]:
        labels = [reward.label for reward in self.rewards]
        # A single reward has no metric beside the mean.
        return self.metric_names or (*self.own_names, *(labels if len(labels) > 1 else []))

    def why_not(self, objective: ObjectiveSettings, kind: str | None) -> str | None:
        if (problem := super().why_not(objective, kind)) or self.rewards:
            return problem
        return "there is no reward; set its `rewards`"

    def resolved(self, objective: ObjectiveSettings) -> Self:
        """Raises ValueError if a reward's metric would take the place of one of the task's own."""
        task = self
        if isinstance(objective, GRPOSettings):
            task = self.model_copy(
                update={
                    "rewards": self.rewards or objective.rewards,
                    "max_tokens": self.max_tokens or objective.max_answer_tokens,
                }
            )
        labels = [reward.label for reward in task.rewards]
        if len(labels) < 2:
            return task  # a single reward has no metric beside the mean
        if taken := [name for name in self.own_names if name in labels]:
            way = "give it another `name`"
            if not self.rewards:  # one in the objective would make another training
                way += ", or give the task `rewards` of its own, so named"
            raise ValueError(
                f"evaluate.tasks, {self.name}: a reward is called {taken[0]}, as another metric of"
                f" the task is; {way}"
            )
        return task
