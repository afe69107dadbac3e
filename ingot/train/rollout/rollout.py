"""Where a training on rewards takes its batches from: prompts of the data, answers sampled from the
model as it is now, their rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ingot.base.errors import Failed
from ingot.base.runlog import JsonLines, MetricSink, Resumed, append_line
from ingot.config.sections.grpo import GRPOSettings
from ingot.data.batches.loader import Batch, ChecksumThread
from ingot.data.batches.prompts import PromptReader
from ingot.data.batches.rows import Rows
from ingot.models.kinds import AnyModel
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.train.build import TrainState
from ingot.train.rollout.ahead import RolloutsAhead
from ingot.train.rollout.answers import (
    RolloutAnswers,
    joined_answers,
    make_batches,
    shares_of,
    unequal_first,
)
from ingot.train.rollout.policy import SampledPolicy
from ingot.train.rollout.sampling import AnswerSampler, RewardAbsent, raise_together
from ingot.train.rollout.scored import mismatch, refer, with_recomputed
from ingot.train.setup import TrainSetup
from ingot.train.step import StepInfo

SHOWN = 2
"""Prompts whose answers are written down at a logged step."""


class Rollout:
    """The batches of any step of a training on rewards; implements `BatchSource`.

    Step i trains on the answers of rollout i // updates. Its prompts are the next of the data's
    order, in 1 + `sample_again` sets of which later ones are only sampled where they are needed. An
    answer is a function of the weights, the prompt, and numbers drawn from (seed, number of the
    prompt in that order, its own number), so that a resumed training samples the same ones; the
    answers of a rollout that a checkpoint lies inside of are stored in it, as are those of rollouts
    that are sampled ahead.

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
        self.settings, self.mesh, self._setup = settings, mesh, setup
        self.folder = setup.recipe.folder
        self._objective, self._reference = state.objectives.training, reference
        self._state = state
        self._policy = SampledPolicy(setup, state.model, mesh)
        self._count = setup.batch.global_batch // settings.group
        self._sets = 1 + settings.sample_again
        self._reader = PromptReader(rows, setup.tokenizer)
        self._sampler = AnswerSampler(setup, self._reader, self._count, mesh)
        self._last = -(-setup.last // settings.updates)
        self._judged = set(saved.get("judged", []))
        self._unjudged = self._sampler.unjudged = {
            name: counts[mesh.rank] if len(counts) == mesh.world else max(counts)
            for name, counts in saved.get("unjudged", {}).items()
        }
        self._lacks_reward = not self._judged.issuperset(saved.get("unjudged", {}))
        self._checksums = ChecksumThread(rows, mesh.rank, mesh.world)
        self._ahead = None
        if settings.staleness:
            ahead = saved.get("ahead", {"answers": {}, "weights": {}})
            self._ahead = RolloutsAhead(
                self._sampler, self._policy, settings.staleness, self._last, ahead, mesh
            )
        self._beat: Callable[[], bool] = lambda: False
        self._number = -1
        self._answers: RolloutAnswers | None = None
        self._batches: list[Batch] = []
        self.metrics: dict[str, float] = {}
        """Of the newest rollout, over all ranks."""
        if "answers" in saved:
            answers = RolloutAnswers.unpack(saved["answers"])
            self._take(int(saved["number"]), answers, saved["metrics"])

    def step(self, i: int, meanwhile: Callable[[], bool] = lambda: False) -> list[Batch]:
        """This rank's micro-batches of step `i`. Collective; once `meanwhile` is True on any rank,
        the result is empty on all of them.

        Raises:
            Failed: the answers that step `i` goes on with are lost, or replicas hold different
                weights.
            RewardAbsent: on all ranks.
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
            self._beat = meanwhile
            try:
                taken = self._taken(number, meanwhile)
                if taken is None:
                    return []
                self._check_judged(number, taken[0])
            except RewardAbsent as absent:
                absent.step = i
                raise
            self._unjudged = self._sampler.unjudged
            self._begin(number, taken[0])
            if self._ahead is not None:
                self.metrics["rollout/behind"] = float(number - taken[1])
            self.metrics["rollout/seconds"] = time.monotonic() - began
        return self._batches

    def lacks_reward(self) -> bool:
        """Whether a reward has been absent all along; the same on all ranks."""
        return self._lacks_reward

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps needs of the rollout that it lies inside of, or that
        the next step would begin with where a signal came in between, and of those that are sampled
        ahead; and what rewards left unjudged, on each rank, since a training that is started again
        and again would else never count to the end. Collective.
        """
        held: dict[str, Any] = {}
        if self._ahead is not None:
            held["ahead"] = self._ahead.state(self._beat)
        # A rollout that was given up is answered, and counted, anew; those ahead are all held.
        unjudged = self._unjudged if self._ahead is None else self._sampler.unjudged
        names = self._sampler.names
        counts = self.mesh.gather([float(unjudged.get(name, 0)) for name in names])
        held["judged"] = sorted(self._judged)
        held["unjudged"] = {
            name: [int(one) for one in each]
            for name, each in zip(names, zip(*counts, strict=True), strict=True)
            if any(each)
        }
        if any(name not in self._judged for name in held["unjudged"]):
            for part in held.get("ahead", {}).values():  # what would end it is answered anew
                part.pop(str(self._last - 1), None)
        if self._answers is not None and self._number == step // self.settings.updates:
            said = {name: value for name, value in self.metrics.items() if np.isfinite(value)}
            held |= {"number": self._number, "answers": self._answers.pack(), "metrics": said}
        return held

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._sampler.close()
        self._checksums.close()

    def _taken(
        self, number: int, meanwhile: Callable[[], bool]
    ) -> tuple[RolloutAnswers, int] | None:
        """The answers of a rollout, and the number of that by whose weights they are; None if a
        rank was asked to stop.
        """
        if self._ahead is not None:
            return self._ahead.take(number, meanwhile)
        answers = self._sample(number, meanwhile)
        return None if answers is None else (answers, number)

    def _check_judged(self, number: int, answers: RolloutAnswers) -> None:
        """Note whether a reward was absent all along; raises RewardAbsent on all ranks if this is
        the last rollout: a training may have fewer prompts than it takes to tell. Collective.
        """
        each = zip(self._sampler.names, answers.each.T, strict=True)
        self._judged |= {name for name, one in each if not np.isnan(one).all()}
        counts = self._sampler.unjudged
        never = [name for name in counts if counts[name] and name not in self._judged]
        self._lacks_reward = any(self.mesh.agree(float(bool(never))))
        if number == self._last - 1:
            absent = RewardAbsent(
                f"reward {', '.join(never)} judged no answer of the whole training; see to it, and"
                " run the same command again: it goes on from the newest checkpoint"
            )
            raise_together(absent if never else None, self.mesh)

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
        """Sample and judge the answers to a set of prompts. Collective."""
        task = self._sampler.task(number)
        with self._policy.whole() as model:
            found = self._sampler.sample(model, task, meanwhile)
        answers, gone = None, None
        try:
            if found is not None:
                answers = self._sampler.judge(task, found, meanwhile)
        except RewardAbsent as absent:
            gone = absent
        raise_together(gone, self.mesh)
        if any(self.mesh.agree(float(answers is None))):
            return None
        assert answers is not None
        return answers.everywhere(self.mesh)

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
        """Make the batches of a rollout. `measured`: of all answers, those left out included."""
        self._number, self._answers = number, answers
        self._batches = self._made(answers)
        if self._reference is not None:
            for batch in self._batches:
                refer(batch, self._reference, self._objective, self._setup.compute, self.mesh)
        self.metrics = dict(measured)

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
                for name, one in zip(self._sampler.names, answers.each.T, strict=True)
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
                            "answer": self._sampler.text(
                                answers.ids[one, : answers.lengths[one]].tolist()
                            ),
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
        sinks: Sequence[MetricSink],
        every: int,
        last: int,
        first: int,
    ) -> None:
        """`first`: steps that were done before; samples of later ones are removed."""
        self._rollout, self._sinks, self._every, self._last = rollout, sinks, every, last
        self._path = rollout.folder.samples
        if rollout.mesh.is_main:
            JsonLines(self._path, Resumed(first))

    def after_step(self, info: StepInfo) -> bool:
        if self._is_logged(info.step):
            self._write(info.step)
        return False

    def at_end(self, info: StepInfo) -> None:
        """Write those of this step, too: training ends with it."""
        if not self._is_logged(info.step):
            self._write(info.step)

    def _is_logged(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self._last)

    def _write(self, step: int) -> None:
        if self._rollout.mesh.is_main:
            for sink in self._sinks:
                sink.write(step, self._rollout.metrics)
            for sample in self._rollout.shown():
                append_line(self._path, {"step": step, **sample})

    def close(self) -> None:
        pass
