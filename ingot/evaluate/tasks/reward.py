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
from ingot.base.progress import say
from ingot.base.reports import Metric
from ingot.config.identity import rewards_identity
from ingot.config.sections.reward_task import RewardTask
from ingot.data.batches.prompts import asked_in, said_in
from ingot.data.cleaning.documents import read_documents
from ingot.data.documents.chats import from_chat
from ingot.evaluate.generation import generate_finished
from ingot.evaluate.metrics import mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, NotJudged, TaskResult
from ingot.models.generation.request import Request
from ingot.rewards.build import build_rewards, check_rewards
from ingot.rewards.protocol import RewardScores, Sample
from ingot.tokenizers.chats.chat import is_trained
from ingot.tokenizers.chats.encode import encode_trained

MAX_TOKENS = 256
"""Tokens of an answer where neither the task nor the objective says."""
MOST_FAILED = 0.5
"""If a reward fails on a larger share of the answers, and no other one that has no value for some
judges these, their mean says more of `on_failure` than of the model, and there is none.
"""


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
        """Raises Failed if the model gives numbers that are not finite, and NotJudged if a reward
        has no value for most of the answers.
        """
        requests = [Request(item.prompt, self.max_tokens) for item in self.items]
        answers = generate_finished(subject, requests, self.task.name)
        samples = [
            Sample(item.text, text, item.reference, finished, item.alone)
            for item, (text, finished) in zip(self.items, answers, strict=True)
        ]
        # A reward may start processes, ask a server, or cost money: once, not once a rank.
        return subject.everyone.from_main(lambda: self._judged(samples))

    def _judged(self, samples: Sequence[Sample]) -> TaskResult:
        scores = self._scores(samples)
        examples: list[dict[str, Any]] = [
            {
                "id": item.place,
                "prompt": item.text,
                "reference": item.reference,
                "answer": sample.answer,
                "finished": sample.finished,
                "reward": total,
                **({"failed": ", ".join(failed)} if failed else {}),
            }
            for item, sample, total, failed in zip(
                self.items, samples, scores.total, failed_on_each(scores), strict=True
            )
        ]
        return TaskResult(self._metrics(samples, scores), examples)

    def _scores(self, samples: Sequence[Sample]) -> RewardScores:
        with build_rewards(self.task.rewards) as rewards:
            scores = rewards(samples)
        # Rewards that fail on some answers may each judge a part of a mixture. One that judges all
        # of them does not stand in for another.
        unjudged = sum(
            all(scores.each[label][number] is None for label in scores.reasons)
            for number in range(len(samples))
        )
        for label, reason in scores.reasons.items():
            count = scores.failures[label]
            failed = f"reward {label} failed on {count:,} of {len(samples):,} answers: {reason}"
            if count == len(samples) or unjudged > MOST_FAILED * len(samples):
                raise NotJudged(f"{self.task.name}: {failed}; mend it, and evaluate again")
            say(f"warning: {self.task.name}: {failed}")
        return scores

    def _metrics(self, samples: Sequence[Sample], scores: RewardScores) -> dict[str, Metric]:
        """Of the sum of all rewards, of each where there are several, of the answers that ended by
        themselves, and of those on which a reward failed, if there are any.
        """
        name, of_all = self.task.name, range(len(samples))
        on = self._set(of_all)
        metrics = {f"{name}/mean": mean_metric(scores.total, direction="higher", on=on)}
        for label, values in scores.each.items():
            judged = [number for number in of_all if values[number] is not None]
            there = [value for value in values if value is not None]
            if len(scores.each) > 1:
                one = mean_metric(there, direction="higher", on=self._set(judged))
                metrics[f"{name}/{label}"] = one
        finished = [float(sample.finished) for sample in samples]
        metrics[f"{name}/finished"] = mean_metric(finished, direction="higher", on=on)
        if scores.reasons:
            failed = [float(bool(labels)) for labels in failed_on_each(scores)]
            metrics[f"{name}/failed"] = mean_metric(failed, direction="lower", on=on)
        return metrics

    def _set(self, judged: Sequence[int]) -> str:
        """The identity of the answers that are judged, by number, and of what judges them."""
        items = [self.items[number] for number in judged]
        files = list(rewards_identity(self.task.rewards).values())
        return fingerprint(
            {
                "items": [[item.text, item.reference] for item in items],
                "rewards": [reward.model_dump(mode="json") for reward in self.task.rewards],
                "max_tokens": self.max_tokens,
                **({"files": files} if files else {}),
            }
        )


def failed_on_each(scores: RewardScores) -> list[list[str]]:
    """The rewards that failed on each sample."""
    return [
        [label for label, values in scores.each.items() if values[number] is None]
        for number in range(len(scores.total))
    ]


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
    info.check_room(knob, longest.place, len(longest.prompt), max_tokens)
    return OpenRewardTask(task, max_tokens, items)


def _item(knob: str, place: str, stored: str, info: EvalModelInfo) -> RewardItem:
    """The chat up to its last assistant turn that is trained, as training has it."""
    if info.recipe.documents != "chat":
        raise WrongInput(f"{knob}: {info.recipe.documents} documents have no prompts; remove it")
    chat = from_chat(stored)
    messages = chat.messages
    answers = [
        number
        for number, one in enumerate(messages)
        if one["role"] == "assistant" and is_trained(one)
    ]
    last = answers[-1] if answers else 0
    before = messages[:last]
    if not any(one["role"] == "user" for one in before):
        raise WrongInput(f"{knob}: {place} asks nothing before an answer; leave it out")
    tokenizer = info.tokenizer
    found = encode_trained(tokenizer, [chat.until(last + 1)], tokenizer.encode_batch, [last])
    reference = said_in(tokenizer, found.ids[found.mask != 0])
    ids = tokenizer.encode_chat(before, chat.tools)
    asked, alone = asked_in(tokenizer, ids)
    return RewardItem(place, ids, asked, reference, alone)
