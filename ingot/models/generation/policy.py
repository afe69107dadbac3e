"""Samples answers from the policy in training, with the log-probability of each token under the
distribution that it was drawn from.

An answer is a function of the weights, the prompt and its own random numbers: which others are
sampled beside it changes no more than rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingot.base.errors import Failed
from ingot.models.generation.generator import Generator
from ingot.models.generation.loop import GenerationJob
from ingot.models.generation.request import CompletionChunk, FinishReason, Request
from ingot.models.generation.sampling import invert_cumulative, running_sums
from ingot.models.native.decoder import Decoder


@dataclass
class SampledAnswer:
    """The tokens of an answer, the one that ended it included, and the log-probability of each."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    """Whether it ended by itself; else the limit of length cut it."""


class PolicySampler(Generator):
    """A generator that draws from the whole vocabulary at one temperature.

    Args:
        model: in evaluation mode; the caller enables autocast if wanted.
        temperature: what logits are divided by.
        eos: tokens that end an answer.
        max_rows: answers that are sampled at once.
    """

    def __init__(
        self, model: Decoder, *, temperature: float, eos: Collection[int], max_rows: int
    ) -> None:
        super().__init__(model, eos=eos, max_rows=max_rows)
        self._temperature = temperature
        self._answers: dict[GenerationJob, tuple[SampledAnswer, npt.NDArray[np.float64]]] = {}

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        draws: npt.NDArray[np.float64],
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> list[SampledAnswer] | None:
        """An answer to each of N prompts, of at most `draws.shape[1]` tokens.

        Args:
            draws: the random numbers of each answer in [0, 1), `[N, L]`, one for each token.
            meanwhile: polled between tokens; True gives up, and the result is None.

        Raises:
            Failed: the model gives numbers that are not finite.
            WrongInput: a prompt is empty, or leaves no position for an answer.
        """
        most = draws.shape[1]
        answers = [SampledAnswer() for _ in prompts]
        for prompt, answer, own in zip(prompts, answers, draws, strict=True):
            self._answers[self.add(Request(prompt, most))] = answer, own
        try:
            while self.busy:
                if meanwhile():
                    return None
                self.step()
        finally:
            self.clear()
            self._answers.clear()
        return answers

    def _accept(
        self, jobs: Sequence[GenerationJob], logits: Tensor
    ) -> list[tuple[GenerationJob, CompletionChunk]]:
        """Draw the next token of each of `jobs` from logits `[B, V]`."""
        logprobs = (logits.float() / self._temperature).log_softmax(dim=-1)
        rolls = [self._answers[job][1][job.generated] for job in jobs]
        # In float64 a vocabulary's tail keeps its probability.
        tokens = invert_cumulative(
            running_sums(logprobs.double().exp()),
            torch.tensor(rolls, dtype=torch.float64, device=logits.device),
        )
        chosen = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        if not all(np.isfinite(chosen)):
            raise Failed(
                "the model in training gives numbers that are not finite; lower train.optimizer.lr"
            )
        return [
            (job, self._take(job, token, logprob))
            for job, token, logprob in zip(jobs, tokens.tolist(), chosen, strict=True)
        ]

    def _take(self, job: GenerationJob, token: int, logprob: float) -> CompletionChunk:
        answer, _ = self._answers[job]
        job.last = token
        job.generated += 1
        answer.ids.append(token)
        answer.logprobs.append(logprob)
        answer.finished = token in self._eos
        finish: FinishReason | None = None
        if answer.finished:
            finish = "stop"
        elif job.generated == job.request.max_tokens:
            finish = "length"
        return CompletionChunk("", (), job.generated, finish)


def answer_draws(
    seed: int, numbers: Sequence[tuple[int, int]], count: int
) -> npt.NDArray[np.float64]:
    """The random numbers `[N, count]` of answers, each a function of the seed and of the answer's
    number (that of its prompt in the order of the training, its own in the group) alone.
    """
    draws = np.empty((len(numbers), count))
    for row, (prompt, number) in zip(draws, numbers, strict=True):
        row[:] = np.random.Generator(
            np.random.Philox(np.random.SeedSequence([seed, prompt, number]))
        ).random(count)
    return draws
