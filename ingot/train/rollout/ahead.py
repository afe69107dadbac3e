"""Rollouts that are sampled ahead, in a thread, while the main thread trains on earlier ones.

Which weights a rollout is sampled from follows from its number alone, never from how fast anything
is: with `objective.staleness` N, rollout n has the weights that training on rollout n - N began
with, and the first ones those that all training began with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import torch

from ingot.base.errors import Failed
from ingot.models.device import kernels_for_any_length
from ingot.models.native.decoder import Decoder
from ingot.parallel.mesh import Mesh
from ingot.train.rollout.answers import RolloutAnswers
from ingot.train.rollout.policy import SampledPolicy, own_checksum
from ingot.train.rollout.sampling import (
    POLL_S,
    AnswerSampler,
    RewardAbsent,
    SampleTask,
    raise_together,
)


class RolloutsAhead:
    """The rollouts that wait for their turn, at most `staleness` of them beside the present one.

    Weights are copied by the main thread, and answers of all ranks brought together by it: the
    thread asks nothing of other ranks. A copy is freed when its answers are there.

    Args:
        last: rollouts of the whole training; none is begun after them, and a training that is made
            longer later goes on from the weights that it ended with.
        saved: what `state` said when the checkpoint was made.
    """

    def __init__(
        self,
        sampler: AnswerSampler,
        policy: SampledPolicy,
        staleness: int,
        last: int,
        saved: Mapping[str, Any],
        mesh: Mesh,
    ) -> None:
        self._sampler, self._policy, self._mesh = sampler, policy, mesh
        self._staleness, self._last = staleness, last
        self._thread = ThreadPoolExecutor(
            1, "sampling", initializer=_use_device, initargs=(mesh.device,)
        )
        self._closing = threading.Event()
        # Sampling asks for these kernels, and the switch is the whole process's: training must not
        # have others while nothing is sampled, or its bits would depend on how fast that is.
        self._kernels = contextlib.ExitStack()
        self._kernels.enter_context(kernels_for_any_length)
        self._running: dict[int, Future[RolloutAnswers | None]] = {}
        self._done = {
            int(number): RolloutAnswers.unpack(text) for number, text in saved["answers"].items()
        }
        self._weights = {int(number): int(one) for number, one in saved["weights"].items()}

    def take(self, number: int, meanwhile: Callable[[], bool]) -> tuple[RolloutAnswers, int] | None:
        """The answers of a rollout, and the number of the one that training had come to when its
        weights were taken; those that are due are begun. Collective. None if a rank was asked to
        stop.

        Raises:
            RewardAbsent: on all ranks.
        """
        self._begin(number)
        if any(self._mesh.agree(float(not self._wait(number, meanwhile)))):
            return None
        self._join(number)
        return self._done.pop(number), self._weights.pop(number)

    def state(self, beat: Callable[[], bool]) -> dict[str, Any]:
        """What a checkpoint needs: the answers of all rollouts that are begun, since the weights
        that they come from are gone when it is read. Waits for them. Those that a reward was absent
        for are left out: who goes on from there samples them anew. Collective.

        Args:
            beat: called while waiting.
        """
        for number in sorted(self._running):
            while not self._wait(number, lambda: True):
                beat()
            with contextlib.suppress(RewardAbsent):
                self._join(number)
        return {
            "answers": {str(number): one.pack() for number, one in self._done.items()},
            "weights": {str(number): self._weights[number] for number in self._done},
        }

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._kernels.close()

    def _begin(self, number: int) -> None:
        """Begin what is to be sampled from the weights as they are when rollout `number` begins."""
        those = range(number, min(number + self._staleness + 1, self._last))
        due = [one for one in those if one not in self._running and one not in self._done]
        if not due:
            return
        copy = self._policy.copy()
        wanted = own_checksum(copy)
        for one in due:
            task = self._sampler.task(one)
            self._running[one] = self._thread.submit(self._sample, copy, wanted, task)
            self._weights[one] = number

    def _sample(self, copy: Decoder, wanted: int, task: SampleTask) -> RolloutAnswers | None:
        found = self._sampler.sample(copy, task, self._closing.is_set)
        if found is None:
            return None
        if own_checksum(copy) != wanted:
            raise Failed(
                "the weights that answers are sampled from changed meanwhile; go on from the newest"
                " checkpoint"
            )
        return self._sampler.judge(task, found, self._closing.is_set)

    def _wait(self, number: int, meanwhile: Callable[[], bool]) -> bool:
        """Whether this rank's answers are there, or what is wrong with them; polls `meanwhile`,
        which may give up.
        """
        while number in self._running:
            try:
                self._running[number].exception(timeout=POLL_S)
                break
            except NotYet:
                if meanwhile():
                    return False
        return True

    def _join(self, number: int) -> None:
        """Bring the answers of all ranks together, once. Raises RewardAbsent on all of them."""
        if number in self._running:
            wrong = self._running[number].exception()
            raise_together(wrong if isinstance(wrong, RewardAbsent) else None, self._mesh)
            own = self._running.pop(number).result()
            assert own is not None, "given up before the end"
            self._done[number] = own.everywhere(self._mesh)


def _use_device(device: torch.device) -> None:
    """A thread begins with the first GPU, whichever its process has."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
