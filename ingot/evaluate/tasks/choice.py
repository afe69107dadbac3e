"""Multiple choice, including HellaSwag: the continuation with the highest log-likelihood, in total
and per character.

The same metrics as lm-evaluation-harness' acc and acc_norm, on the same items.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.config.sections.evaluation import ChoiceTask, HellaSwagTask
from ingot.data.sources.records import TaskRecord, read_records, tell_once
from ingot.evaluate.likelihood import ScoredSpan, encode_spans, log_likelihoods
from ingot.evaluate.metrics import mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult


@dataclass(frozen=True)
class ChoiceItem:
    """A context, its possible continuations (after a space), and the index of the right one."""

    place: str
    context: str
    choices: list[str]
    answer: int


@dataclass(frozen=True)
class OpenChoiceTask:
    """A multiple-choice task with encoded items: `spans` holds all choices of the first item, then
    those of the next.
    """

    name: str
    items: list[ChoiceItem]
    spans: list[ScoredSpan]

    def measure(self, subject: EvalModel) -> TaskResult:
        sums = log_likelihoods(subject, self.spans, self.name)[:, 0]
        examples, place = list[dict[str, Any]](), 0
        for item in self.items:
            examples.append(score_item(item, sums[place : place + len(item.choices)].tolist()))
            place += len(item.choices)
        on = fingerprint([[item.context, item.choices, item.answer] for item in self.items])
        metrics = {
            f"{self.name}/{metric}": mean_metric(
                [example[column] for example in examples], direction="higher", on=on
            )
            for metric, column in (("accuracy", "correct"), ("accuracy_norm", "correct_norm"))
        }
        return TaskResult(metrics, examples)


def score_item(item: ChoiceItem, sums: Sequence[float]) -> dict[str, Any]:
    """The example of one item. Of equally likely choices the first one counts as chosen."""
    likelihoods = np.array(sums)
    per_character = likelihoods / np.array([len(choice) for choice in item.choices])
    chosen, chosen_norm = int(likelihoods.argmax()), int(per_character.argmax())
    return {
        "id": item.place,
        "context": item.context,
        "choices": item.choices,
        "answer": item.answer,
        "log_likelihoods": list(sums),
        "chosen": chosen,
        "chosen_norm": chosen_norm,
        "correct": chosen == item.answer,
        "correct_norm": chosen_norm == item.answer,
    }


def open_choice(
    task: ChoiceTask | HellaSwagTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenChoiceTask:
    """Read and encode the questions of a source, or the items of HellaSwag.

    Raises:
        WrongInput: no such source, a malformed item, or one longer than the model's positions.
    """
    info.require_kind(f"evaluate.tasks, {task.name}: {task.kind}", *task.model_kinds)
    records = read_records(
        task.source,
        f"evaluate.tasks, {task.name}.source",
        task.item_columns,
        names=task.columns if isinstance(task, ChoiceTask) else None,
        split=task.split,
        limit=task.limit,
        tell=tell_once,
    )
    item = _question_item if isinstance(task, ChoiceTask) else _hellaswag_item
    return _encoded(task.name, info, [item(record) for record in records])


def _encoded(name: str, info: EvalModelInfo, items: list[ChoiceItem]) -> OpenChoiceTask:
    spans = encode_spans(
        info.tokenizer, [(item.context, f" {choice}") for item in items for choice in item.choices]
    )
    owners = [item for item in items for _ in item.choices]
    for item, span in zip(owners, spans, strict=True):
        if not span.continuation or not span.context:
            raise WrongInput(f"{item.place} has a choice or a context without a token; mend it")
        if len(span) > info.positions:
            raise WrongInput(
                f"{item.place} has {len(span):,} tokens with its longest choice, {info.where} has"
                f" {info.positions:,} positions; leave it out, or evaluate a model that reads more"
            )
    return OpenChoiceTask(name, items, spans)


def _question_item(record: TaskRecord) -> ChoiceItem:
    question, choices = record.text("question"), record.get("choices")
    if isinstance(choices, str):
        # Tables without list columns hold the choices as JSON.
        try:
            choices = json.loads(choices)
        except ValueError:
            raise WrongInput(
                f"{record.place}: `choices` is {choices[:40]!r}, not a list of texts; write it as"
                " JSON"
            ) from None
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise WrongInput(
            f"{record.place}: `choices` must be a list of two or more texts, none empty; mend it"
        )
    if not question.strip():
        raise WrongInput(f"{record.place}: `question` is empty; mend it")
    return ChoiceItem(record.place, question, choices, _answer_index(record, choices))


def _answer_index(record: TaskRecord, choices: list[str]) -> int:
    """The index of the right choice, given as a number from 0, the text of a choice, or a letter;
    an ambiguous text is read as the first that fits of: text, number, letter.
    """
    answer = record.get("answer")
    place = -1
    if isinstance(answer, int) and not isinstance(answer, bool):
        place = answer
    elif isinstance(answer, str) and answer in choices:
        place = choices.index(answer)
    elif isinstance(answer, str) and re.fullmatch(r"\s*\d{1,9}\s*", answer):
        place = int(answer)
    elif isinstance(answer, str) and len(answer.strip()) == 1:
        place = string.ascii_uppercase.find(answer.strip().upper())
    if not 0 <= place < len(choices):
        raise WrongInput(
            f"{record.place}: `answer` {answer!r} is none of its {len(choices)} choices; give a"
            " number from 0, a letter, or the text"
        )
    return place


def _hellaswag_item(record: TaskRecord) -> ChoiceItem:
    """An item prepared as lm-evaluation-harness does: activity label, both parts of the context,
    WikiHow's markup removed.
    """
    endings, label = record.get("endings"), record.get("label")
    if (
        not isinstance(endings, list)
        or len(endings) < 2
        or not all(isinstance(ending, str) for ending in endings)
    ):
        raise WrongInput(
            f"{record.place}: `endings` must be a list of texts; give HellaSwag's own columns"
        )
    if not re.fullmatch(r"\d{1,3}", str(label)) or int(label) >= len(endings):
        raise WrongInput(
            f"{record.place}: `label` is {label!r}, not one of {len(endings)} endings; the test"
            " split has none, take validation"
        )
    second = record.text("ctx_b")
    context = f"{record.text('activity_label')}: {record.text('ctx_a')} {second.capitalize()}"
    choices = [_strip_wikihow_marks(ending) for ending in endings]
    if not all(choices):
        raise WrongInput(f"{record.place} has an empty ending; mend it")
    return ChoiceItem(record.place, _strip_wikihow_marks(context), choices, int(label))


def _strip_wikihow_marks(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
