"""Compares generated texts with references: F-measures of ROUGE (Lin 2004), by the package
rouge-score.

For ROUGE-Lsum, sentences are lines: both texts are split at newlines and nowhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ingot.base.errors import WrongInput
from ingot.base.markers import fingerprint
from ingot.config.sections.evaluation import RougeTask
from ingot.config.sections.objective import CHAT_TEMPLATED
from ingot.data.cleaning.documents import read_documents
from ingot.data.documents.chats import from_chat
from ingot.data.documents.examples import from_pair
from ingot.data.sources.records import read_records, tell_once
from ingot.evaluate.generation import encode_source, generate_texts
from ingot.evaluate.metrics import mean_metric
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.tokenizers.chats.chat import Messages, is_trained

METRICS = RougeTask.metric_names

ScoreFunction = Callable[[str, str], dict[str, float]]
"""(reference, prediction) -> F-measure of each metric."""


@dataclass(frozen=True)
class RougeItem:
    """The source as text and as tokens, and the reference."""

    place: str
    source: str
    prompt: list[int]
    reference: str


@dataclass(frozen=True)
class OpenRougeTask:
    """The task with its encoded items."""

    task: RougeTask
    items: list[RougeItem]
    score: ScoreFunction

    def measure(self, subject: EvalModel) -> TaskResult:
        """Raises Failed if the model gives numbers that are not finite."""
        task = self.task
        texts = generate_texts(
            subject, [item.prompt for item in self.items], task.max_tokens, task.name, task.beams
        )
        scores = [
            self.score(item.reference, text) for item, text in zip(self.items, texts, strict=True)
        ]
        simple = [self.score(item.reference, first_line(item.source)) for item in self.items]
        settings = {"stemmer": task.stemmer, "beams": task.beams, "max_tokens": task.max_tokens}
        on = fingerprint(
            {"items": [[item.source, item.reference] for item in self.items], **settings}
        )
        metrics = {
            f"{task.name}/{name}": mean_metric(
                [score[name] for score in scores], direction="higher", on=on
            )
            for name in METRICS
        }
        baselines = {
            f"{task.name}/{name}/first_line": sum(score[name] for score in simple) / len(simple)
            for name in METRICS
        }
        examples: list[dict[str, Any]] = [
            {
                "id": item.place,
                "source": item.source,
                "reference": item.reference,
                "prediction": text,
                **score,
            }
            for item, text, score in zip(self.items, texts, scores, strict=True)
        ]
        return TaskResult(metrics, examples, baselines)


def first_line(text: str) -> str:
    """The first line that is not empty: a baseline that copies without understanding."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def open_rouge(
    task: RougeTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenRougeTask:
    """Read and encode the items.

    Raises:
        WrongInput: the package is missing, there are no sources with references, a prompt leaves no
            room for an answer, or a decoder is asked for beams.
    """
    knob = f"evaluate.tasks, {task.name}"
    info.require_kind(f"{knob}: rouge", *task.model_kinds)
    score = scorer(task.stemmer)
    if task.beams > 1 and info.kind == "decoder":
        raise WrongInput(
            f"{knob}: beams {task.beams} is for a seq2seq, and {info.where} is a decoder; set it"
            " to 1"
        )
    # The task's own source has its own limit; `max_documents` is for validation documents.
    limits = (task.limit, max_documents if task.source is None else None)
    limit = min((number for number in limits if number is not None), default=None)
    items = list(
        _items_from_source(task, info, limit)
        if task.source is not None
        else _items_from_validation(knob, info, limit)
    )
    if not items:
        raise WrongInput(
            f"{knob}: there is no text to write; set data.validation to more documents, or"
            f" {knob}.source"
        )
    if empty := next((item for item in items if not item.prompt), None):
        raise WrongInput(f"{knob}: {empty.place} has a prompt without a token; leave it out")
    longest = max(items, key=lambda item: len(item.prompt))
    info.check_room(knob, longest.place, len(longest.prompt), task.max_tokens)
    return OpenRougeTask(task, items, score)


def scorer(stemmer: bool) -> ScoreFunction:
    """The package's scorer. Raises WrongInput if it is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise WrongInput(
            "evaluate.tasks: rouge needs a package that is not installed; pip install"
            " 'ingot[rouge]'"
        ) from error
    rouge_scorer = RougeScorer(list(METRICS), use_stemmer=stemmer)

    def score(reference: str, prediction: str) -> dict[str, float]:
        found = rouge_scorer.score(reference, prediction)
        return {name: float(found[name].fmeasure) for name in METRICS}

    return score


def _items_from_source(
    task: RougeTask, info: EvalModelInfo, limit: int | None
) -> Iterator[RougeItem]:
    """Items of the task's own source: pairs, whose source becomes a user message for a decoder
    trained on chats.
    """
    assert task.source is not None
    for record in read_records(
        task.source,
        f"evaluate.tasks, {task.name}.source",
        task.item_columns,
        names=task.columns,
        split=task.split,
        limit=limit,
        tell=tell_once,
    ):
        source, reference = record.text("source"), record.text("target")
        if info.kind == "decoder" and info.recipe.documents in CHAT_TEMPLATED:
            prompt = info.tokenizer.encode_chat([{"role": "user", "content": source}])
        elif info.kind == "decoder":
            prompt = info.tokenizer.encode_prompt(source)
        else:
            prompt = encode_source(info.tokenizer, source, info.recipe)
        yield RougeItem(record.place, source, prompt, reference)


def _items_from_validation(
    knob: str, info: EvalModelInfo, limit: int | None
) -> Iterator[RougeItem]:
    """Items of the validation documents: pairs, or chats up to the last answer."""
    recipe = info.recipe
    if recipe.documents not in ("pair", "chat"):
        raise WrongInput(
            f"{knob}: {recipe.documents} documents have no text to write after another; set its"
            " `source` to records with both"
        )
    for document in itertools.islice(read_documents(recipe, "validation"), limit):
        if recipe.documents == "pair":
            pair = from_pair(document.text)
            yield RougeItem(
                document.doc_id,
                pair.source,
                encode_source(info.tokenizer, pair.source, recipe),
                pair.target,
            )
            continue
        chat = from_chat(document.text)
        messages = chat.messages
        last = messages[-1]
        if len(messages) < 2 or last["role"] != "assistant" or not is_trained(last):
            raise WrongInput(
                f"{knob}: {document.doc_id} does not end with an answer to something that is"
                " trained; leave it out of data.validation, or set `source`"
            )
        yield RougeItem(
            document.doc_id,
            _last_user_message(messages),
            info.tokenizer.encode_chat(messages[:-1], chat.tools),
            str(last["content"]),
        )


def _last_user_message(messages: Messages) -> str:
    """The last user message before the final answer of a chat."""
    return next(
        (
            str(message["content"])
            for message in reversed(messages[:-1])
            if message["role"] == "user"
        ),
        "",
    )
