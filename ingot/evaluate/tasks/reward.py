"""Rewards of the answers that a model gives to the held-out prompts of chats: the most likely
answer to each, judged by the rewards of the recipe.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.base.reports import Metric
from ingot.config.sections.evaluation import RewardTask
from ingot.data.cleaning.documents import read_documents
from ingot.data.documents.chats import from_chat
from ingot.evaluate.generation import generate_finished
from ingot.evaluate.metrics import mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.models.generation.request import Request
from ingot.rewards.build import build_rewards, check_rewards
from ingot.rewards.protocol import RewardScores, Sample

MAX_TOKENS = 256
"""Tokens of an answer where neither the task nor the objective says."""


@dataclass(frozen=True)
class RewardItem:
    """A prompt, and what rewards are told of it."""

    place: str
    prompt: list[int]
    text: str
    reference: str | None
    alone: bool


@dataclass(frozen=True)
class OpenRewardTask:
    """The task with its encoded items."""

    task: RewardTask
    max_tokens: int
    items: list[RewardItem]

    def measure(self, subject: EvalModel) -> TaskResult:
        """Raises Failed if the model gives numbers that are not finite."""
        requests = [Request(item.prompt, self.max_tokens) for item in self.items]
        answers = generate_finished(subject, requests, self.task.name)
        samples = [
            Sample(item.text, text, item.reference, finished, item.alone)
            for item, (text, finished) in zip(self.items, answers, strict=True)
        ]
        # A reward may start processes, ask a server, or cost money: once, not once a rank.
        scores = subject.mesh.from_main(lambda: self._scores(samples))
        on = fingerprint(
            {
                "items": [[item.text, item.reference] for item in self.items],
                "rewards": [reward.model_dump(mode="json") for reward in self.task.rewards],
                "max_tokens": self.max_tokens,
            }
        )
        name = self.task.name
        metrics: dict[str, Metric] = {
            f"{name}/mean": mean_metric(scores.total, direction="higher", on=on)
        }
        for label, values in scores.each.items():
            there = [value for value in values if value is not None]
            if there and len(scores.each) > 1:
                metrics[f"{name}/{label}"] = mean_metric(there, direction="higher", on=on)
        finished = [float(sample.finished) for sample in samples]
        metrics[f"{name}/finished"] = mean_metric(finished, direction="higher", on=on)
        examples: list[dict[str, Any]] = [
            {
                "id": item.place,
                "prompt": item.text,
                "reference": item.reference,
                "answer": sample.answer,
                "finished": sample.finished,
                "reward": total,
            }
            for item, sample, total in zip(self.items, samples, scores.total, strict=True)
        ]
        return TaskResult(metrics, examples)

    def _scores(self, samples: Sequence[Sample]) -> RewardScores:
        with build_rewards(self.task.rewards) as rewards:
            return rewards(samples)


def open_reward(
    task: RewardTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenRewardTask:
    """Read and encode the held-out prompts.

    Raises:
        WrongInput: there are no rewards, no prompts, or a prompt that leaves no room for an answer.
    """
    knob = f"evaluate.tasks, {task.name}"
    info.require_kind(f"{knob}: reward", *task.model_kinds)
    if not task.rewards:
        raise WrongInput(f"{knob}: there is no reward; set its `rewards`")
    check_rewards(task.rewards)
    max_tokens = task.max_tokens or MAX_TOKENS
    limits = [number for number in (task.limit, max_documents) if number is not None]
    items = [
        _item(knob, document.doc_id, document.text, info)
        for document in itertools.islice(
            read_documents(info.recipe, "validation"), min(limits, default=None)
        )
    ]
    if not items:
        raise WrongInput(f"{knob}: there is no prompt; set data.validation to more documents")
    longest = max(items, key=lambda item: len(item.prompt))
    if len(longest.prompt) + max_tokens > info.positions:
        raise WrongInput(
            f"{knob}: {longest.place} has {len(longest.prompt):,} tokens, which with max_tokens"
            f" {max_tokens} exceeds the {info.positions:,} positions of {info.where}; leave it"
            " out, or lower max_tokens"
        )
    return OpenRewardTask(task, max_tokens, items)


def _item(knob: str, place: str, stored: str, info: EvalModelInfo) -> RewardItem:
    """The chat up to its last assistant turn, as training has it."""
    if info.recipe.documents != "chat":
        raise WrongInput(f"{knob}: {info.recipe.documents} documents have no prompts; remove it")
    chat = from_chat(stored)
    messages = chat.messages
    last = max(place for place, one in enumerate(messages) if one["role"] == "assistant")
    before = messages[:last]
    asked = [str(one["content"]) for one in before if one["role"] == "user"]
    if not asked:
        raise WrongInput(f"{knob}: {place} asks nothing before its answer; leave it out")
    reference = str(messages[last]["content"])
    ids = info.tokenizer.encode_chat(before, chat.tools)
    return RewardItem(
        place, ids, asked[-1], reference or None, len(before) == 1 and chat.tools is None
    )
