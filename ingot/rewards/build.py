"""The rewards of a recipe as one function of a batch. Each is computed where its settings say: in
this process, in threads, or in processes that are killed when they hang.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ingot.base.errors import IngotError, WrongInput
from ingot.config.doors import REWARDS
from ingot.config.sections.rewards import RewardSettings
from ingot.rewards.process import ScoresInProcesses
from ingot.rewards.protocol import RewardFailed, RewardScores, Sample

Outcome = float | RewardFailed
"""The value of a sample, or why there is none."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
MOST_SHOWN = 300


def build_rewards(settings: Sequence[RewardSettings]) -> WeightedRewards:
    """The rewards that a recipe lists; `close()` ends their processes and threads.

    Raises:
        WrongInput: there is none, two share a name, or one cannot work on this machine.
    """
    check_rewards(settings)
    return WeightedRewards(settings)


def check_rewards(settings: Sequence[RewardSettings]) -> None:
    """Check all that can be known before a training starts.

    Raises:
        WrongInput: what is wrong, a line each.
    """
    if not settings:
        raise WrongInput("the list of rewards is empty; give one, such as {kind: exact}")
    labels = [reward.label for reward in settings]
    wrong = [
        f"two rewards are called {label}; give each its own `name`"
        for label in dict.fromkeys(labels)
        if labels.count(label) > 1
    ]
    for reward in settings:
        if (check := getattr(_implementation(reward), "check", None)) is not None:
            try:
                check(reward)
            except WrongInput as error:
                wrong.append(f"reward {reward.label}: {error}")
    if wrong:
        raise WrongInput("\n".join(wrong))


class WeightedRewards:
    """Several rewards, their weighted sum, and what failed."""

    def __init__(self, settings: Sequence[RewardSettings]) -> None:
        self._scorers: list[Scorer] = []
        try:
            for reward in settings:
                self._scorers.append(Scorer(reward))
        except BaseException:
            self.close()
            raise
        self.names = tuple(reward.label for reward in settings)

    def __call__(self, samples: Sequence[Sample]) -> RewardScores:
        """Score a batch. Never raises because of a sample, or of a reward that fails."""
        finishing = [(scorer, scorer.start(samples)) for scorer in self._scorers]
        scores = RewardScores([0.0] * len(samples), {}, {})
        for scorer, finish in finishing:
            settings, outcomes = scorer.settings, finish()
            values = [None if isinstance(each, RewardFailed) else each for each in outcomes]
            failed = [each for each in outcomes if isinstance(each, RewardFailed)]
            scores.each[settings.label] = values
            scores.failures[settings.label] = len(failed)
            if failed:
                scores.reasons[settings.label] = str(failed[0])[:MOST_SHOWN]
                is_gone = len(failed) == len(samples) and all(each.again for each in failed)
                if is_gone and settings.weight:  # of weight 0 it is told alone
                    scores.absent.append(settings.label)
            for place, value in enumerate(values):
                counted = settings.on_failure if value is None else value
                scores.total[place] += settings.weight * counted
        return scores

    def close(self) -> None:
        """End the processes and threads that score."""
        for scorer in self._scorers:
            scorer.close()

    def __enter__(self) -> WeightedRewards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Scorer:
    """One reward: its code, and the threads or processes in which it runs."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self._threads: ThreadPoolExecutor | None = None
        self._compute: Any
        if settings.where != "here":
            self._threads = ThreadPoolExecutor(settings.at_once, f"reward-{settings.label}")
        if settings.where == "process":
            self._compute = ScoresInProcesses(settings)
            self._start()
        else:
            self._compute = _implementation(settings)(settings)

    def _start(self) -> None:
        """Start the first process now, so that a function which is not there is refused."""
        assert self._threads is not None
        try:
            self._threads.submit(self._compute.process).result()
        except (WrongInput, RewardFailed) as error:
            self.close()
            raise WrongInput(f"reward {self.settings.label}: {error}") from None

    def start(self, samples: Sequence[Sample]) -> Callable[[], list[Outcome]]:
        """Begin to score a batch; the result waits for its outcomes."""
        if self._threads is None:
            return lambda: self._here(samples)
        futures: list[Future[Outcome]] = [
            self._threads.submit(self._one, sample) for sample in samples
        ]
        return lambda: [future.result() for future in futures]

    def _here(self, samples: Sequence[Sample]) -> list[Outcome]:
        if not self.settings.batched:
            return [self._one(sample) for sample in samples]
        with contextlib.suppress(Exception):
            values: list[Outcome] = [_number(value) for value in self._compute(samples)]
            if len(values) == len(samples):
                return values
        # One sample must not cost the others their values.
        return [self._one(sample) for sample in samples]

    def _one(self, sample: Sample) -> Outcome:
        """The outcome of a sample after all tries."""
        wait = FIRST_WAIT_S
        for attempt in range(self.settings.retries + 1):
            failed = self._try(sample)
            if not isinstance(failed, RewardFailed) or not failed.again:
                return failed
            if attempt < self.settings.retries:
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)
        return failed

    def _try(self, sample: Sample) -> Outcome:
        try:
            if self.settings.needs_reference and sample.reference is None:
                raise RewardFailed(
                    "the sample has no reference; let its chat end in an assistant turn with the"
                    " right answer, or give a sample of a file a `reference`"
                )
            if not self.settings.batched:
                return _number(self._compute(sample))
            (value,) = self._compute([sample])
            return _number(value)
        except RewardFailed as error:
            return error
        except Exception as error:  # whatever the code of a reward does, the training goes on
            return RewardFailed(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End its threads and processes."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if (close := getattr(self._compute, "close", None)) is not None:
            close()


def _implementation(settings: RewardSettings) -> Any:
    """The code of a reward. Raises WrongInput if it cannot be imported."""
    try:
        return settings.load_implementation()
    except IngotError:
        raise
    except Exception as error:
        package = REWARDS.package_of(settings.kind) or "ingot"
        raise WrongInput(
            f"reward {settings.label}: {settings.implementation} of {package} cannot be imported"
            f" ({type(error).__name__}: {error}); mend or reinstall the package"
        ) from error


def _number(value: Any) -> float:
    """A reward's value. Raises RewardFailed for what is no finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RewardFailed(f"its value is {str(value)[:80]!r}, which is no number") from None
    if not math.isfinite(number):
        raise RewardFailed(f"its value is {number}; it must be finite")
    return number
