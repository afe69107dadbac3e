"""The side effects of training (metrics and progress, skipped steps; checkpoints are in
`checkpointing.py`), which are given a StepInfo and never the loop; and the loop's control, which
fetches a step's data and may stop before it.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from ingot.base.errors import WrongInput
from ingot.base.heartbeat import HeartbeatWriter
from ingot.base.progress import Progress
from ingot.base.runlog import MetricSink
from ingot.config.shape import flops_per_token
from ingot.data.batches.loader import Batch, BatchSource
from ingot.models.device import Compute, MeasuredPeak, gpu_usage, peak_flops, peak_memory_bytes
from ingot.parallel.mesh import Mesh
from ingot.train.checkpointing import CheckpointHook
from ingot.train.evaluation import EvaluateHook
from ingot.train.goodput import EventSink, TimeAccount
from ingot.train.interrupts import StopSignals
from ingot.train.optim.schedules import Recurrence
from ingot.train.setup import TrainSetup
from ingot.train.step import DropoutSeeds, StepControl, StepInfo, StepOutcome

MOST_RANKS = 64
"""More ranks than this are not logged one by one: a line of ten thousand would be a megabyte."""


@functools.cache
def peak_of(device: torch.device, compute: Compute, threads: int) -> MeasuredPeak:
    """The peak of a device in this process: what one training measured counts for the next, if it
    has as many threads of the CPU.
    """
    return MeasuredPeak(device, compute)


@dataclass(frozen=True)
class Workload:
    """The cost of a token and the peak of one device; both for MFU."""

    flops_per_token: float | None
    """None if there is no formula for this kind of model; then no MFU is reported."""
    stated_peak: float | None
    """The vendor's peak in FLOP/s; None if it is unknown and must be measured."""
    compute: Compute

    @classmethod
    def of(cls, setup: TrainSetup, mesh: Mesh) -> Workload:
        config, recipe = setup.model_spec.config, setup.recipe
        cost = (
            flops_per_token(
                config.to_hf(),
                recipe.data.seq_len,
                recipe.model.lora,
                recipe.objective.forward_only,
            )
            if setup.model_spec.kind == "decoder"
            else None
        )
        return cls(cost, peak_flops(mesh.device, setup.compute), setup.compute)


@dataclass
class LogHook:
    """Writes metrics to the sinks and shows progress, every `every` steps, at the first and at the
    last one.
    """

    sinks: Sequence[MetricSink]
    progress: Progress
    every: int
    last: int
    work: Workload
    mesh: Mesh
    _: KW_ONLY
    gpu: bool
    """Whether the use of GPUs is asked for, too."""
    clock: Callable[[], float]
    """Seconds that all steps so far have taken. Read after a result of the newest one was, since
    the host is ahead of a GPU.
    """
    skipped_before: float = 0.0
    """Steps that earlier attempts skipped."""
    remarks: Callable[[], Mapping[str, str]] = dict
    """What else the line of progress is to say, asked when metrics are written."""

    def __post_init__(self) -> None:
        # Where the outcomes are: reading one each step would make the GPU wait for the host.
        self._skipped = torch.tensor(self.skipped_before, device=self.mesh.device)
        self._forget(0.0)
        self._notes: dict[str, str] = {}
        self._shown_at = 0.0
        self._measured_peak = peak_of(self.mesh.device, self.work.compute, torch.get_num_threads())

    def _forget(self, now: float) -> None:
        """Begin to count anew, after a line was written."""
        self._since, self._steps, self._samples, self._tokens, self._positions = now, 0, 0, 0, 0

    def _elapsed(self) -> float:
        return max(self.clock() - self._since, 1e-9)

    def after_step(self, info: StepInfo) -> bool:
        self._steps += 1
        self._samples += info.samples
        self._tokens += info.counts.tokens
        self._positions += info.counts.positions
        self._skipped = self._skipped + info.outcome.skipped
        if info.step % self.every == 0 or info.step in (1, self.last):
            self._write(info)
        if self.progress.is_watched:
            self._notes |= self._newest(info)
        self.progress.update(info.step, **self._notes)
        return False

    def at_end(self, info: StepInfo) -> None:
        """Write the steps of which no line says anything yet: training ends with this one."""
        if self._steps:
            self._write(info)

    def _newest(self, info: StepInfo) -> dict[str, str]:
        """Loss and pace for a terminal. Reading the loss waits for a GPU, which is idle for a
        moment then, and so is asked less often.
        """
        now = time.monotonic()
        if now - self._shown_at < (1.0 if info.outcome.loss.is_cuda else 0.5) or not self._tokens:
            return {}
        self._shown_at, loss = now, float(info.outcome.loss)
        return {"loss": f"{loss:.3f}", "tokens/s": f"{self._tokens / self._elapsed():,.0f}"}

    def _write(self, info: StepInfo) -> None:
        loss = float(info.outcome.loss)  # waits for the device, so that `seconds` is right
        seconds = self._elapsed()
        rate, usage = self._tokens / seconds, self._usage()
        values: dict[str, float | str] = {
            "train/loss": loss,
            "train/lr": info.lr,
            "train/grad_norm": float(info.outcome.grad_norm),
            "train/tokens_per_s": rate,
            "train/tokens_per_step": self._tokens / self._steps,
            "train/examples_per_s": self._samples / seconds,
            "train/skipped_steps": float(self._skipped),
            **usage,
        }
        if info.outcome.load is not None:
            values |= info.outcome.load.metrics()
        if self.work.flops_per_token is not None:
            # Padding is computed too.
            reached = self._positions / seconds * self.work.flops_per_token / self.mesh.world
            values["train/mfu"] = reached / (
                self.work.stated_peak or self._measured_peak.flops(reached)
            )
        for name, value in info.outcome.metrics.items():
            if f"train/{name}" in values:
                raise WrongInput(
                    f"the objective's metric {name} would be logged as train/{name}, which is"
                    " ingot's own; give it another name in the objective's reduce"
                )
            values[f"train/{name}"] = float(value)
        for sink in self.sinks:
            sink.write(info.step, values)
        self._notes = {"loss": f"{loss:.3f}", **self.remarks(), "tokens/s": f"{rate:,.0f}"}
        self._forget(self.clock())

    @property
    def skipped(self) -> float:
        """The number of steps skipped since the start of training. Synchronises with the device."""
        return float(self._skipped)

    def _usage(self) -> dict[str, float]:
        """Memory and GPU use of every rank, `memory/rank0_gb` and so on; of more than `MOST_RANKS`
        only what reports make of them, and the ranks that stand out. Collective.
        """
        here = gpu_usage(self.mesh.device) if self.gpu else {}
        mine = [
            peak_memory_bytes(self.mesh.device) / 1e9,
            here.get("util", math.nan),
            here.get("memory", math.nan),
        ]
        ranks = self.mesh.gather(mine)
        if len(ranks) > MOST_RANKS:
            return _summarized(ranks)
        names = ("memory/rank{}_gb", "gpu/rank{}_util", "gpu/rank{}_memory")
        return {
            name.format(rank): value
            for rank, row in enumerate(ranks)
            for name, value in zip(names, row, strict=True)
            if not math.isnan(value)
        }

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def _summarized(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of the memory, GPU use and GPU memory of all ranks: the highest memory, the means, and which
    rank has the highest memory and which the lowest use.
    """
    memory, use, gpu_memory = (
        {rank: row[place] for rank, row in enumerate(ranks) if not math.isnan(row[place])}
        for place in range(3)
    )
    found: dict[str, float] = {}
    if memory:
        fullest = max(memory, key=memory.__getitem__)
        found |= {"memory/peak_gb": memory[fullest], "memory/peak_rank": float(fullest)}
        found["memory/mean_gb"] = math.fsum(memory.values()) / len(memory)
    if use:
        idlest = min(use, key=use.__getitem__)
        found["gpu/util"] = math.fsum(use.values()) / len(use)
        found |= {"gpu/lowest_util": use[idlest], "gpu/lowest_util_rank": float(idlest)}
    if gpu_memory:
        found["gpu/memory"] = math.fsum(gpu_memory.values()) / len(gpu_memory)
    return found


class EarlyEndHook:
    """Has the last steps logged, too, when training ends early: how many tokens it read and what
    its loss came to is taken from what is logged. So are steps that may turn out to be the last: an
    attempt that only makes up for their evaluation has nothing to log of them. Runs before the
    checkpoint hook, whose commit records that training is finished.
    """

    def __init__(
        self, evaluation: EvaluateHook, logs: Sequence[Callable[[StepInfo], None]]
    ) -> None:
        self._evaluation, self._logs = evaluation, logs

    def after_step(self, info: StepInfo) -> bool:
        if self._evaluation.is_over or self._evaluation.owes:
            for log in self._logs:
                log(info)
        return False

    def close(self) -> None:
        pass


class TooManySkipped(Exception):
    """Steps `first` to `last` (from 0) were all skipped."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self.first, self.last = first, last


class SkipHook:
    """Counts skipped steps. Each outcome is read one step late, so that the device never waits for
    the host; that of the last step by `finish`. It is the first hook, since it may end training.

    Args:
        row: how many of the steps right before were skipped.
    """

    def __init__(self, in_row: int, events: EventSink, row: int = 0) -> None:
        self._in_row, self._events = in_row, events
        self._row = row
        self._unread: tuple[int, StepOutcome] | None = None

    def after_step(self, info: StepInfo) -> bool:
        self.finish()
        self._unread = info.step - 1, info.outcome
        return False

    @property
    def row(self) -> int:
        """How many of the newest steps were skipped. Synchronises with the device."""
        if self._unread is None:
            return self._row
        return self._row + 1 if float(self._unread[1].skipped) else 0

    def finish(self) -> None:
        """Judge the newest step, where no other follows. Raises TooManySkipped as `judge` does."""
        if self._unread is not None:
            step, outcome = self._unread
            self._unread = None
            self.judge(step, outcome)

    def judge(self, step: int, outcome: StepOutcome) -> None:
        """Raises TooManySkipped if `step` (from 0) makes too many skipped steps in a row."""
        if not float(outcome.skipped):
            self._row = 0
            return
        self._row += 1
        norm = float(outcome.grad_norm)
        finite = torch.isfinite(outcome.loss) & torch.isfinite(outcome.grad_norm)
        self._events.emit(
            "skip",
            step=step + 1,
            cause=f"spike, gradient norm {norm:.4g}" if bool(finite) else "not finite",
        )
        if self._row >= self._in_row:
            raise TooManySkipped(step - self._row + 1, step)

    def close(self) -> None:
        pass


class KillHook:
    """Kills this process with SIGKILL after `step` steps, for proofs that nothing is lost."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, info: StepInfo) -> bool:
        if info.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def close(self) -> None:
        pass


class TrainingControl(StepControl):
    """Fetches from a loader, beats this rank's heartbeat, and ends the loop when any rank was asked
    to stop.

    Args:
        timed: recurrences that may depend on the clock; rank 0's clock decides.
        first: the first step of this attempt.
    """

    def __init__(
        self,
        loader: BatchSource,
        dropout: DropoutSeeds,
        heart: HeartbeatWriter,
        signals: StopSignals,
        account: TimeAccount,
        checkpoint: CheckpointHook,
        timed: Sequence[Recurrence],
        first: int,
        *,
        is_main: bool,
    ) -> None:
        super().__init__(loader.step, dropout)
        self._timed, self._is_main = timed, is_main
        self._loader, self._heart, self._signals = loader, heart, signals
        self._account, self._checkpoint, self._first = account, checkpoint, first

    def fetch(self, step: int) -> Sequence[Batch]:
        self._heart.beat("first step" if step == self._first else "step", step=step, place=0)
        with self._account.spending("waiting"):
            return self._loader.step(step, self._while_waiting)

    def _while_waiting(self) -> bool:
        """Beat while waiting for data. True gives up waiting: a rank that was asked to stop needs
        no data, since all ranks learn of it before the step.
        """
        self._heart.beat()
        return self._signals.signum != 0

    def votes(self) -> Sequence[bool]:
        clock_votes = [self._is_main and one.vote() for one in self._timed]
        return self._signals.signum != 0, self._checkpoint.has_failed, *clock_votes

    def must_stop(self, votes: Sequence[bool]) -> bool:
        asked, save_failed, *clock_votes = votes
        for one, vote in zip(self._timed, clock_votes, strict=True):
            one.set_due(vote)
        if save_failed:
            self._checkpoint.wait()  # raises on every rank
        return asked

    def begin_micro_batch(self, step: int, index: int, batch: Batch) -> None:
        self._heart.beat(place=index + 1)
        super().begin_micro_batch(step, index, batch)
