"""This rank's answers to a set of prompts, sampled and judged. Asks nothing of other ranks, so that
a thread may do it while the main one trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ingot.base.errors import Failed, WrongInput
from ingot.base.progress import say
from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.prompts import Prompt, PromptReader
from ingot.models.device import computing_in
from ingot.models.generation.policy import PolicySampler, SampledAnswer, answer_draws
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardScores, Sample
from ingot.tokenizers.chats.encode import stop_tokens
from ingot.train.rollout.answers import RolloutAnswers, share_of
from ingot.train.rollout.server import PolicyServer
from ingot.train.setup import TrainSetup

POLL_S = 0.5
MOST_UNJUDGED = 8
"""A reward that judges no answer to so many prompts in a row, of those of a rank, is absent. On all
answers to a few it may fail for what they are: a judge's own limit of length, for one.
"""


class RewardAbsent(Failed):
    """A reward judges nothing any more; without it, training would learn something else. Raised on
    all ranks together when `step` steps are done.
    """

    step = 0


@dataclass(frozen=True)
class SampleTask:
    """A rank's share of the answers to a set of prompts."""

    rows: npt.NDArray[np.int64]
    """Of the whole set, [P]."""
    prompts: Sequence[Prompt]
    """Of each answer of this rank."""
    numbers: Sequence[tuple[int, int]]
    """Of each answer: its prompt's in the order of the training, and its own in the group."""


class AnswerSampler:
    """Samples answers from a policy and judges them.

    Args:
        count: prompts in a set.
    """

    def __init__(self, setup: TrainSetup, reader: PromptReader, count: int, mesh: Mesh) -> None:
        settings = setup.recipe.objective
        assert isinstance(settings, GRPOSettings)
        self._settings, self._setup, self._mesh, self._count = settings, setup, mesh, count
        self._reader, self._rewards = reader, build_rewards(settings.rewards)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self.unjudged: dict[str, int] = {}
        """Prompts in a row of which a reward judged no answer, by its name."""
        self.names = self._rewards.names
        self._server = None
        if settings.sampler is not None:
            if mesh.world > 1:
                raise WrongInput(
                    f"objective.sampler serves a training of one process, not of {mesh.world};"
                    " remove it, or train with one"
                )
            folder = setup.recipe.folder.root / "sampler"
            self._server = PolicyServer(setup, folder, stop_tokens(setup.tokenizer))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._rewards.close()
        if self._server is not None:
            self._server.close()

    def task(self, number: int) -> SampleTask:
        """This rank's share of set `number`: as many answers as any other rank, or one more."""
        group, first = self._settings.group, number * self._count
        rows = self._setup.order.rows(first, self._count)
        mine = share_of(len(rows) * group, self._mesh)
        numbers = [(first + one // group, one % group) for one in range(mine.start, mine.stop)]
        return SampleTask(rows, self._prompts_of(rows, mine), numbers)

    def _prompts_of(self, rows: np.ndarray, answers: slice) -> list[Prompt]:
        """The prompt of each of some answers, by their number in the rollout."""
        group = self._settings.group
        first, last = answers.start // group, -(-answers.stop // group)
        found = self._reader.prompts(rows[first:last].tolist())
        return [found[one // group - first] for one in range(answers.start, answers.stop)]

    def sample(
        self, model: Decoder, task: SampleTask, meanwhile: Callable[[], bool]
    ) -> list[SampledAnswer] | None:
        """An answer to each prompt of the task; None once `meanwhile` says True."""
        settings, setup = self._settings, self._setup
        if self._server is not None:
            prompts = [prompt.ids for prompt in task.prompts]
            with computing_in(setup.compute, self._mesh.device):
                return self._server.sample(model, prompts, task.numbers, meanwhile)
        with computing_in(setup.compute, self._mesh.device):
            sampler = PolicySampler(
                model,
                temperature=settings.temperature,
                eos=stop_tokens(setup.tokenizer),
                max_rows=settings.sample_rows,
            )
            return sampler.sample(
                [prompt.ids for prompt in task.prompts],
                answer_draws(setup.recipe.seed, task.numbers, settings.max_answer_tokens),
                meanwhile,
            )

    def judge(
        self, task: SampleTask, found: Sequence[SampledAnswer], meanwhile: Callable[[], bool]
    ) -> RolloutAnswers | None:
        """The answers with their rewards, computed in a thread, as they may take long. None once
        `meanwhile` says True.

        Raises:
            RewardAbsent: on this rank alone (see `raise_together`).
        """
        samples = [
            Sample(
                prompt.text,
                self.text(answer.ids),
                prompt.reference,
                answer.finished,
                prompt.alone,
            )
            for prompt, answer in zip(task.prompts, found, strict=True)
        ]
        waiting = self._thread.submit(self._rewards, samples)
        while True:
            try:
                scores = waiting.result(timeout=POLL_S)
                break
            except NotYet:
                if meanwhile():
                    return None
        for name, reason in scores.reasons.items():
            say(f"warning: reward {name} failed on {scores.failures[name]} answers: {reason}")
        self._check_present(scores, len({number for number, _ in task.numbers}))
        shape = len(found), self._settings.max_answer_tokens
        ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for row, answer in enumerate(found):
            ids[row, : len(answer.ids)] = answer.ids
            logprobs[row, : len(answer.ids)] = answer.logprobs
        each = [scores.each[name] for name in self.names]
        return RolloutAnswers(
            task.rows,
            ids,
            np.array([len(answer.ids) for answer in found], np.int64),
            logprobs,
            logprobs,
            np.array([answer.finished for answer in found], np.bool_),
            np.array(scores.total, np.float64),
            np.array(each, np.float64).T.reshape(len(found), len(each)),
        )

    def _check_present(self, scores: RewardScores, prompts: int) -> None:
        """Raises RewardAbsent if with these `prompts` there are too many that one left unjudged."""
        unjudged = {name: self.unjudged.get(name, 0) + prompts for name in scores.absent}
        for name, count in unjudged.items():
            if count >= MOST_UNJUDGED:
                raise RewardAbsent(
                    f"reward {name} judged no answer to the last {count} prompts"
                    f" ({scores.reasons[name]}); see to it, and run the same command again: it goes"
                    " on from the newest checkpoint"
                )
        self.unjudged = unjudged  # those of a set that ends the training are answered anew

    def text(self, ids: Sequence[int]) -> str:
        return self._setup.tokenizer.decode(ids)


def raise_together(absent: RewardAbsent | None, mesh: Mesh) -> None:
    """Raises RewardAbsent on all ranks if any comes with one. Collective."""
    if any(mesh.agree(float(absent is not None))):
        raise absent or RewardAbsent("a reward is absent on another rank, which says what")
