"""An evaluation: in how many of the model's answers to some prompts a word appears."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ingot.base.lazy import lazy_import
from ingot.base.markers import fingerprint
from ingot.config.section import Positive
from ingot.config.sections.evaluation import TaskSettings

if TYPE_CHECKING:
    from ingot.evaluate import generation, metrics, subject
else:  # these import torch
    generation = lazy_import("ingot.evaluate.generation")
    metrics = lazy_import("ingot.evaluate.metrics")
    subject = lazy_import("ingot.evaluate.subject")


class Contains(TaskSettings):
    """The share of greedily generated answers that contain a word."""

    implementation = "open_contains"
    kind: Literal["contains"] = "contains"
    """Which evaluation."""
    name: str = "contains"
    """The name that its metrics carry in the report."""
    prompts: Annotated[list[str], Field(min_length=1)]
    """Texts to go on from."""
    word: str
    """What is looked for in the answers."""
    max_tokens: Positive = 16
    """Most tokens that are generated for each prompt."""


def open_contains(
    task: Contains, info: subject.EvalModelInfo, max_documents: int | None
) -> OpenContains:
    """Refuse what cannot be measured, before the model is loaded."""
    info.require_kind(f"evaluate.tasks, {task.name}: contains", "decoder")
    return OpenContains(task)


@dataclass(frozen=True)
class OpenContains:
    task: Contains

    def measure(self, model: subject.EvalModel) -> subject.TaskResult:
        task = self.task
        prompts = [model.tokenizer.encode(prompt) for prompt in task.prompts]
        answers = generation.generate_texts(model, prompts, task.max_tokens, task.name)
        found = [float(task.word in answer) for answer in answers]
        share = metrics.mean_metric(found, direction="higher", on=fingerprint(task.prompts))
        examples = [
            {"prompt": prompt, "answer": answer, "contains": bool(hit)}
            for prompt, answer, hit in zip(task.prompts, answers, found, strict=True)
        ]
        return subject.TaskResult({f"{task.name}/share": share}, examples)
