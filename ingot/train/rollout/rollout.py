"""Where a training on rewards takes its batches from: prompts of the data, answers sampled from the
model as it is now, their rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np

from ingot.base.errors import Failed
from ingot.base.progress import say
from ingot.base.runlog import FailSafeSink, JsonLines, append_line
from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.loader import Batch, ChecksumThread
from ingot.data.batches.rows import Rows
from ingot.models.device import computing_in
from ingot.models.generation.policy import PolicySampler, SampledAnswer, answer_draws
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.rewards.build import build_rewards
from ingot.rewards.protocol import RewardScores, Sample
from ingot.tokenizers.chat import stop_tokens
from ingot.train.build import TrainState
from ingot.train.rollout.answers import (
    RolloutAnswers,
    joined_answers,
    make_batches,
    share_of,
    shares_of,
    unequal_first,
)
from ingot.train.rollout.policy import SampledPolicy
from ingot.train.rollout.prompts import Prompt, PromptReader, check_prompts
from ingot.train.rollout.scored import mismatch, refer, with_recomputed
from ingot.train.setup import TrainSetup
from ingot.train.step import StepInfo

POLL_S = 0.5
SHOWN = 2
"""Prompts whose answers are written down at a logged step."""


class Rollout:
    """The batches of any step of a training on rewards; implements `BatchSource`.

    Step i trains on the answers of rollout i // updates. Its prompts are the next of the data's
    order, in 1 + `sample_again` sets of which later ones are only sampled where they are needed. An
    answer is a function of the weights, the prompt, and numbers drawn from (seed, number of the
    prompt in that order, its own number), so that a resumed training samples the same ones; the
    answers of a rollout that a checkpoint lies inside of are stored in it.

    Args:
        reference: the model that `objective.kl` is measured against.
        saved: what `state` said when the checkpoint was made.
    """

    def __init__(
        self,
        setup: TrainSetup,
        state: TrainState,
        reference: AnyModel | None,
        saved: Mapping[str, Any],
        mesh: Mesh,
    ) -> None:
        settings, rows = setup.recipe.objective, setup.rows
        assert isinstance(settings, GRPOSettings)
        assert isinstance(rows, Rows)
        assert isinstance(state.model, Decoder)
        self.settings, self.mesh, self._setup, self._order = settings, mesh, setup, setup.order
        self.folder = setup.recipe.folder
        self._objective, self._reference = state.objectives.training, reference
        self._state = state
        self._policy = SampledPolicy(setup, state.model, mesh)
        self._limits = state.model.config
        self._count = setup.batch.global_batch // settings.group
        self._sets = 1 + settings.sample_again
        self._reader = PromptReader(rows, setup.tokenizer)
        self._check(rows)
        self._rewards = build_rewards(settings.rewards)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._checksums = ChecksumThread(rows, mesh.rank, mesh.world)
        self._number = -1
        self._answers: RolloutAnswers | None = None
        self._batches: list[Batch] = []
        self.metrics: dict[str, float] = {}
        """Of the newest rollout, over all ranks."""
        if "answers" in saved:
            answers = RolloutAnswers.unpack(saved["answers"])
            self._take(int(saved["number"]), answers, saved.get("metrics", {}))

    def _check(self, rows: Rows) -> None:
        setup, updates = self._setup, self.settings.updates
        first, last = setup.begin // updates, -(-setup.last // updates)
        each = self._sets * self._count
        wanted = self._order.rows(first * each, min((last - first) * each, 2 * len(rows)))
        needs = any(reward.needs_reference for reward in self.settings.rewards)
        check_prompts(
            setup.recipe,
            self._reader,
            np.unique(wanted).tolist(),
            self._limits,
            needs_reference=needs,
        )

    def step(self, i: int, meanwhile: Callable[[], bool] = lambda: False) -> list[Batch]:
        """This rank's micro-batches of step `i`. Collective; once `meanwhile` is True on any rank,
        the result is empty on all of them.

        Raises:
            Failed: the answers that step `i` goes on with are lost, or replicas hold different
                weights.
        """
        self._checksums.raise_if_damaged()
        number, update = divmod(i, self.settings.updates)
        if number != self._number:
            if update:
                raise Failed(
                    f"step {i + 1:,} goes on with answers of step {i - update + 1:,}, and the"
                    " checkpoint does not hold them; delete it, so that the one before is taken"
                )
            began = time.monotonic()
            answers = self._sample(number, meanwhile)
            if answers is None:
                return []
            self._begin(number, answers)
            self.metrics["rollout/seconds"] = time.monotonic() - began
        return self._batches

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps needs of the rollout that it lies inside of."""
        if self._answers is None or step % self.settings.updates == 0:
            return {}
        said = {name: value for name, value in self.metrics.items() if np.isfinite(value)}
        return {"number": self._number, "answers": self._answers.pack(), "metrics": said}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._rewards.close()
        self._checksums.close()

    def _sample(self, number: int, meanwhile: Callable[[], bool]) -> RolloutAnswers | None:
        """The answers of a rollout: of as many sets of prompts as it takes; None if a rank was
        asked to stop.
        """
        found: list[RolloutAnswers] = []
        for one in range(number * self._sets, (number + 1) * self._sets):
            answers = self._sample_set(one, meanwhile)
            if answers is None:
                return None
            found.append(answers)
            if sum(int((~each.equal).sum()) for each in found) >= self._count:
                break
        return joined_answers(found)

    def _sample_set(self, number: int, meanwhile: Callable[[], bool]) -> RolloutAnswers | None:
        """Sample and judge the answers to a set of prompts, each rank as many of them as any other,
        or one more.
        """
        mesh, group, first = self.mesh, self.settings.group, number * self._count
        rows = self._order.rows(first, self._count)
        mine = share_of(len(rows) * group, mesh)
        prompts = self._prompts_of(rows, mine)
        numbers = [(first + one // group, one % group) for one in range(mine.start, mine.stop)]
        found = self._answer(prompts, numbers, meanwhile)
        scores = None if found is None else self._judge(prompts, found, meanwhile)
        if any(mesh.agree(float(scores is None))):
            return None
        assert found is not None
        assert scores is not None
        return self._arrays(rows, found, scores).everywhere(mesh)

    def _prompts_of(self, rows: np.ndarray, answers: slice) -> list[Prompt]:
        """The prompt of each of some answers, by their number in the rollout."""
        group = self.settings.group
        first, last = answers.start // group, -(-answers.stop // group)
        found = self._reader.prompts(rows[first:last].tolist())
        return [found[one // group - first] for one in range(answers.start, answers.stop)]

    def _answer(
        self,
        prompts: Sequence[Prompt],
        numbers: Sequence[tuple[int, int]],
        meanwhile: Callable[[], bool],
    ) -> list[SampledAnswer] | None:
        """An answer to each of `prompts`, with the random numbers of `numbers`. Collective."""
        settings, setup = self.settings, self._setup
        with self._policy.whole() as model, computing_in(setup.compute, self.mesh.device):
            sampler = PolicySampler(
                model,
                temperature=settings.temperature,
                eos=stop_tokens(setup.tokenizer),
                max_rows=settings.sample_rows,
            )
            return sampler.sample(
                [prompt.ids for prompt in prompts],
                answer_draws(setup.recipe.seed, numbers, settings.max_answer_tokens),
                meanwhile,
            )

    def _judge(
        self,
        prompts: Sequence[Prompt],
        found: Sequence[SampledAnswer],
        meanwhile: Callable[[], bool],
    ) -> RewardScores | None:
        """The rewards of this rank's answers, computed in a thread: they may take long."""
        samples = [
            Sample(
                prompt.text,
                self._text(answer.ids),
                prompt.reference,
                answer.finished,
                prompt.alone,
            )
            for prompt, answer in zip(prompts, found, strict=True)
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
        return scores

    def _text(self, ids: Sequence[int]) -> str:
        return self._setup.tokenizer.decode(ids)

    def _arrays(
        self, rows: np.ndarray, found: Sequence[SampledAnswer], scores: RewardScores
    ) -> RolloutAnswers:
        shape = len(found), self.settings.max_answer_tokens
        ids, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for row, answer in enumerate(found):
            ids[row, : len(answer.ids)] = answer.ids
            logprobs[row, : len(answer.ids)] = answer.logprobs
        each = [scores.each[name] for name in self._rewards.names]
        return RolloutAnswers(
            rows,
            ids,
            np.array([len(answer.ids) for answer in found], np.int64),
            logprobs,
            logprobs,
            np.array([answer.finished for answer in found], np.bool_),
            np.array(scores.total, np.float64),
            np.array(each, np.float64).T.reshape(len(found), len(each)),
        )

    def _begin(self, number: int, answers: RolloutAnswers) -> None:
        """Begin to train on the answers of a rollout with the weights as they are now."""
        measured = self._measured(answers)
        answers = unequal_first(answers, self._count)
        if self.settings.old_logprobs == "recomputed":
            compute, module = self._setup.compute, self._state.module
            batches = self._made(answers)
            answers = with_recomputed(answers, batches, module, self._objective, compute, self.mesh)
            kept = shares_of(answers, self.settings).kept
            measured |= mismatch(answers, kept, self.settings.importance_cap)
        self._take(number, answers, measured)

    def _take(self, number: int, answers: RolloutAnswers, measured: Mapping[str, float]) -> None:
        """Make the batches of a rollout. `measured`: of all answers, those left out included; older
        checkpoints do not know it.
        """
        self._number, self._answers = number, answers
        self._batches = self._made(answers)
        if self._reference is not None:
            for batch in self._batches:
                refer(batch, self._reference, self._objective, self._setup.compute, self.mesh)
        self.metrics = dict(measured) or self._measured(answers)

    def _made(self, answers: RolloutAnswers) -> list[Batch]:
        return make_batches(
            answers,
            self.settings,
            self._reader.prompts,
            self._setup.recipe.data.seq_len,
            self._setup.batch.micro_batch,
            self.mesh,
        )

    def _measured(self, answers: RolloutAnswers) -> dict[str, float]:
        groups = answers.rewards.reshape(-1, self.settings.group)
        failed = np.isnan(answers.each)
        return {
            "reward/mean": float(answers.rewards.mean()),
            "reward/deviation": float(groups.std(axis=1, ddof=1).mean()),
            **{
                f"reward/{name}": float(np.nanmean(one)) if not np.isnan(one).all() else np.nan
                for name, one in zip(self._rewards.names, answers.each.T, strict=True)
            },
            "reward/failed": float(failed.any(axis=1).mean()),
            "rollout/groups": float(len(groups)),
            "rollout/equal_groups": float(answers.equal.mean()),
            "rollout/answer_tokens": float(answers.lengths.mean()),
            "rollout/finished": float(answers.finished.mean()),
        }

    def remarks(self) -> dict[str, str]:
        """The mean reward of the newest rollout: the loss does not say how good answers are."""
        return {"reward": f"{self.metrics['reward/mean']:.3f}"} if self.metrics else {}

    def shown(self) -> list[dict[str, Any]]:
        """The first prompts of the newest rollout with their answers and rewards."""
        if self._answers is None:
            return []
        answers, group = self._answers, self.settings.group
        lines = []
        for place, prompt in enumerate(self._reader.prompts(answers.prompts[:SHOWN].tolist())):
            lines.append(
                {
                    "prompt": prompt.text,
                    "reference": prompt.reference,
                    "answers": [
                        {
                            "answer": self._text(answers.ids[one, : answers.lengths[one]].tolist()),
                            "reward": float(answers.rewards[one]),
                            "finished": bool(answers.finished[one]),
                        }
                        for one in range(place * group, (place + 1) * group)
                    ],
                }
            )
        return lines


class RolloutHook:
    """Writes rewards, and some prompts with their answers, whenever metrics are logged."""

    def __init__(
        self,
        rollout: Rollout,
        sinks: Sequence[JsonLines | FailSafeSink],
        every: int,
        last: int,
        first: int,
    ) -> None:
        """`first`: steps that were done before; samples of later ones are removed."""
        self._rollout, self._sinks, self._every, self._last = rollout, sinks, every, last
        self._path = rollout.folder.samples
        if rollout.mesh.is_main:
            JsonLines(self._path, first)

    def after_step(self, info: StepInfo) -> bool:
        if self._rollout.mesh.is_main and (
            info.step % self._every == 0 or info.step in (1, self._last)
        ):
            for sink in self._sinks:
                sink.write(info.step, self._rollout.metrics)
            for sample in self._rollout.shown():
                append_line(self._path, {"step": info.step, **sample})
        return False

    def close(self) -> None:
        pass
