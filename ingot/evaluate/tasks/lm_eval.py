"""Runs tasks of EleutherAI's lm-evaluation-harness on a model of ours, with the package's own
prompts, metrics and few-shot examples.

Every rank runs the harness as if it were the only one; the model's requests are distributed over
the ranks underneath.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ingot.base.errors import Failed, WrongInput, one_line
from ingot.base.markers import fingerprint
from ingot.base.reports import Metric
from ingot.config.sections.evaluation import LMEvalTask
from ingot.evaluate.generation import generate_answers
from ingot.evaluate.likelihood import ScoredSpan, encode_spans, log_likelihoods
from ingot.evaluate.metrics import Interval, mapped, ratio_interval
from ingot.evaluate.subject import EvalModel, EvalModelInfo, TaskResult
from ingot.models.generation.request import Request, special_in
from ingot.models.generation.sampling import Sampling

MAX_TOKENS = 256
RELATIVE_TOLERANCE = 1e-9


class HarnessModel:
    """The model as the harness calls it; combined with the harness' own base class, which is not
    imported here.
    """

    def __init__(self, subject: EvalModel) -> None:
        super().__init__()
        self.subject = subject
        special = subject.tokenizer.special
        self.start = special.bos if special.bos is not None else special.eos
        self.positions = subject.info.positions

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation after its context, and whether greedy decoding
        would produce it.
        """
        spans = [
            self._cut(span)
            for span in encode_spans(self.subject.tokenizer, [request.args for request in requests])
        ]
        found = log_likelihoods(self.subject, spans, "lm_eval", greedy=True)
        return [(float(total), bool(agrees)) for total, agrees in found]

    def _cut(self, span: ScoredSpan) -> ScoredSpan:
        """Truncate the context on the left to the model's positions."""
        if not span.context or not 0 < len(span.continuation) <= self.positions:
            raise WrongInput(
                f"lm_eval: a continuation of {len(span.continuation):,} tokens after"
                f" {len(span.context):,} cannot be scored by a model of {self.positions:,}"
                " positions; leave the task out"
            )
        return ScoredSpan(
            span.context[-(self.positions + 1 - len(span.continuation)) :], span.continuation
        )

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each whole text: every token is scored once, with as much context
        as the positions allow.
        """
        if self.start is None:
            raise WrongInput(
                f"lm_eval: the tokenizer of {self.subject.where} has neither BOS nor EOS to start a"
                " text with; leave the task out"
            )
        texts = [
            windows(
                self.subject.tokenizer.encode_prompt(request.args[0]), self.start, self.positions
            )
            for request in requests
        ]
        found = log_likelihoods(
            self.subject, [span for spans in texts for span in spans], "lm_eval"
        )[:, 0]
        ends = np.cumsum([len(spans) for spans in texts])
        return [
            float(found[end - len(spans) : end].sum())
            for spans, end in zip(texts, ends, strict=True)
        ]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated text of each request, up to one of its stop strings."""
        return generate_answers(
            self.subject,
            [
                self._request(number, request.args[0], request.args[1])
                for number, request in enumerate(requests)
            ],
            "lm_eval",
        )

    def _request(self, number: int, context: str, settings: Mapping[str, Any]) -> Request:
        max_tokens = int(settings.get("max_gen_toks", MAX_TOKENS))
        if max_tokens >= self.positions:
            raise WrongInput(
                f"lm_eval: {max_tokens} tokens are to be written, {self.subject.where} has"
                f" {self.positions:,} positions; leave the task out"
            )
        until = settings.get("until") or []
        stop = tuple(text for text in ([until] if isinstance(until, str) else until) if text)
        sampling = (
            Sampling(
                float(settings.get("temperature", 1.0)), float(settings.get("top_p", 1.0)), number
            )
            if settings.get("do_sample")
            else Sampling()
        )
        tokenizer = self.subject.tokenizer
        prompt = tokenizer.encode_prompt(context)[-(self.positions - max_tokens) :]
        special = special_in(stop, tokenizer.special_ids)
        return Request(prompt, max_tokens, sampling, stop, special=special)


def windows(tokens: Sequence[int], start: int, positions: int) -> list[ScoredSpan]:
    """Split a text into spans that fit the model, with every token in one continuation: the first
    follows `start`, later ones the preceding tokens.
    """
    spans = [ScoredSpan([start], list(tokens[:positions]))] if tokens else []
    for done in range(positions, len(tokens), positions):
        end = min(done + positions, len(tokens))
        spans.append(ScoredSpan(list(tokens[end - positions - 1 : done]), list(tokens[done:end])))
    return spans


@dataclass(frozen=True)
class OpenLMEvalTask:
    """The harness' tasks with their data loaded."""

    task: LMEvalTask
    library: Any
    manager: Any

    def measure(self, subject: EvalModel) -> TaskResult:
        task, library = self.task, self.library
        model = type("IngotLM", (HarnessModel, library.api.model.LM), {})(subject)
        # The harness must not seed the global generators, which a training run may use.
        seeds = {"random_seed": None, "numpy_random_seed": None, "torch_random_seed": None}
        results = library.simple_evaluate(
            model=model,
            tasks=list(task.tasks),
            num_fewshot=task.shots,
            limit=task.limit,
            task_manager=self.manager,
            bootstrap_iters=0,
            **seeds,
        )
        # The harness returns None to processes with a local rank above 0.
        return subject.everyone.from_main(lambda: report(task.name, results))


def open_lm_eval(
    task: LMEvalTask, info: EvalModelInfo, max_documents: int | None = None
) -> OpenLMEvalTask:
    """Find the tasks and load their data.

    Raises:
        WrongInput: the package is missing, or knows no such task.
        Failed: the data of a task cannot be loaded.
    """
    info.require_kind(f"evaluate.tasks, {task.name}: lm_eval", *task.model_kinds)
    library = _library()
    manager = _manager(library, task)
    if unknown := [name for name in task.tasks if name not in manager.all_tasks]:
        raise WrongInput(
            f"evaluate.tasks, {task.name}: lm_eval knows no task {', '.join(unknown)}; see `lm_eval"
            " ls tasks`, or set `include` to its folder"
        )
    try:
        manager.load(list(task.tasks))
    except Exception as error:  # data sets raise exceptions of any kind
        reason = one_line(error)
        raise Failed(
            f"evaluate.tasks, {task.name}: {', '.join(task.tasks)} cannot be loaded"
            f" ({type(error).__name__}: {reason}); check the network"
        ) from error
    return OpenLMEvalTask(task, library, manager)


def _manager(library: Any, task: LMEvalTask) -> Any:
    """Finds the tasks in the user's own folder; the package's thousands are indexed only if some
    are not there.
    """
    if task.include is not None:
        own = library.tasks.TaskManager(include_path=task.include, include_defaults=False)
        if all(name in own.all_tasks for name in task.tasks):
            return own
    return library.tasks.TaskManager(include_path=task.include)


def _library() -> Any:
    try:
        import lm_eval
        import lm_eval.api.model
        import lm_eval.tasks
    except ImportError as error:
        raise WrongInput(
            "evaluate.tasks: lm_eval needs a package that is not installed; pip install"
            " 'ingot[lm-eval]'"
        ) from error
    return lm_eval


def report(name: str, results: Mapping[str, Any]) -> TaskResult:
    """Convert the harness' results: metrics `NAME/TASK.METRIC`, with the filter's name appended if
    a task has several; one example per sample.
    """
    metrics: dict[str, Metric] = {}
    for task, values in results["results"].items():
        samples = list(results["samples"].get(task, []))
        higher = results.get("higher_is_better", {}).get(task, {})
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if (
                not kept
                or metric.endswith("_stderr")
                or isinstance(value, bool)
                or not isinstance(value, int | float)
            ):
                continue
            full = f"{name}/{task}.{metric}" if kept == "none" else f"{name}/{task}.{metric}.{kept}"
            own = [sample for sample in samples if sample.get("filter", kept) == kept]
            parts = _parts(task, results)
            on = fingerprint([_identity(task, own, results), *_identities(parts, results)])
            count = len(own) or sum(
                int(results["n-samples"].get(part, {}).get("effective", 0)) for part in parts
            )
            metrics[full] = Metric(
                float(value),
                *sample_interval(float(value), [sample.get(metric) for sample in own]),
                "lower" if higher.get(metric) is False else "higher",
                count,
                on,
            )
    return TaskResult(
        metrics,
        [
            _example(task, sample)
            for task, samples in results["samples"].items()
            for sample in samples
        ],
    )


def _parts(group: str, results: Mapping[str, Any]) -> list[str]:
    """The tasks of a group and of the groups in it, each once; none of a task."""
    groups = results.get("group_subtasks", {})
    found, waiting = dict[str, None](), list(groups.get(group, ()))
    while waiting:
        part = waiting.pop()
        if inner := groups.get(part):
            waiting.extend(inner)
        else:
            found[part] = None
    return sorted(found)


def _identities(tasks: Sequence[str], results: Mapping[str, Any]) -> list[str]:
    return [_identity(task, results["samples"].get(task, ()), results) for task in tasks]


def _identity(task: str, samples: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> str:
    """Of what a task asked, and how."""
    shots, versions = (results.get(key, {}).get(task) for key in ("n-shot", "versions"))
    return fingerprint([task, shots, versions, sorted(_hashes(samples))])


def _hashes(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{sample.get('doc_hash')} {sample.get('prompt_hash')} {sample.get('target_hash')}"
        for sample in samples
    ]


def sample_interval(value: float, samples: Sequence[Any]) -> Interval:
    """The interval of a metric that is a mean over samples or derived from the ratio of two sums
    over them; not known for any other.
    """
    if samples and all(isinstance(sample, bool | int | float) for sample in samples):
        numbers = np.array(samples, np.float64)
        if math.isclose(
            numbers.mean(), value, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE
        ):
            return ratio_interval(numbers, np.ones(len(numbers)))
    elif samples and all(
        isinstance(sample, tuple | list) and len(sample) == 2 for sample in samples
    ):
        above, below = np.array(samples, np.float64).T
        if below.sum() > 0:
            interval = ratio_interval(-above, below)
            rate = float(-above.sum() / below.sum())
            if math.isclose(rate / math.log(2), value, rel_tol=RELATIVE_TOLERANCE):
                return mapped(interval, lambda rate: rate / math.log(2))
            if rate < 700 and math.isclose(math.exp(rate), value, rel_tol=RELATIVE_TOLERANCE):
                return mapped(interval, lambda rate: math.exp(min(rate, 700.0)))
    return None, None


def _example(task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {
        metric: sample[metric]
        for metric in sample.get("metrics", ())
        if isinstance(sample.get(metric), bool | int | float)
    }
    return {
        "id": f"{task}:{sample['doc_id']}",
        "filter": str(sample.get("filter", "")),
        "target": str(sample.get("target")),
        "answer": str(sample.get("filtered_resps")),
        **{metric: float(value) for metric, value in numbers.items()},
    }
